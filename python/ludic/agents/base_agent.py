"""The base agent: a context, a client of a model, and a parser."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ludic.context.strategies import ContextStrategy
from ludic.errors import InferenceError
from ludic.inference.client import ChatClient
from ludic.inference.prompts.template import read_template_kwargs
from ludic.inference.request import ChatCompletionRequest, InferenceSpec, ToolRequest
from ludic.parsers import Parser, ParseResult
from ludic.types import TRACE_KEYS, ChatResponse, Info, Message, Observation, TokenTrace

if TYPE_CHECKING:
    from torch import Tensor

INCOMPLETE_FEEDBACK = "Your answer reached the token limit before it was complete. Please answer more briefly."


@dataclass(frozen=True)
class IntermediateCall:
    """A model call before the one that returns the action, such as a tool call. The protocol turns
    it into a step."""

    text: str
    """The model's text."""
    info: dict[str, Any]
    trace: TokenTrace | None
    result: str
    """The reply to the model: the results of its tools."""


class Agent:
    """Calls the model once per step and parses its answer.

    An answer that reached the token limit (`finish_reason == "length"`) is not parsed and never
    reaches the environment or its verifier. Its step gets the reward
    `incomplete_completion_penalty` (-0.1), and the model sees `incomplete_completion_feedback` if
    the episode continues. With `reject_incomplete_completions=False` it is parsed like any other
    answer, which suits models that have not yet learnt to end their answers.
    """

    name = "agent"

    def __init__(
        self,
        *,
        client: ChatClient,
        model: str,
        ctx: ContextStrategy,
        parser: Parser,
        reject_incomplete_completions: bool = True,
        incomplete_completion_penalty: float = -0.1,
        incomplete_completion_feedback: str = INCOMPLETE_FEEDBACK,
    ) -> None:
        self._client, self._model, self._ctx, self._parser = client, model, ctx, parser
        self._reject_incomplete_completions = reject_incomplete_completions
        self._incomplete_completion_penalty = incomplete_completion_penalty
        self._incomplete_completion_feedback = incomplete_completion_feedback
        self._template_kwargs: dict[str, Any] = {}
        """Arguments of the chat template in this episode; the environment's reset may give them."""
        self.last_info: dict[str, Any] = {}
        self.intermediate_calls: list[IntermediateCall] = []
        """The model calls of the last `act`, without the one that it returned. Empty for an agent
        that calls the model once."""

    @property
    def system_prompt(self) -> str | None:
        """The system prompt of the context. If None, the environment's is used."""
        return self._ctx.default_system_prompt

    def reset(self, system_prompt: str | None = None) -> None:
        """Begin an episode."""
        self._ctx.reset(system_prompt=system_prompt)

    def on_env_reset(self, obs: Observation, info: Info) -> None:
        self._template_kwargs = read_template_kwargs(info, "the environment's reset")
        self._ctx.on_env_reset(obs, info)

    def on_after_step(self, obs: Observation, info: Info) -> None:
        self._ctx.on_after_step(obs, info)

    async def act(
        self, inference: InferenceSpec | None = None, sampling_seed: int | None = None, timeout_s: float | None = None
    ) -> tuple[ParseResult, str, dict[str, Any], TokenTrace | None]:
        """One model call: (parsed, raw text, info, trace). The context keeps the raw text even if
        it is rejected.

        Raises TimeoutError after `timeout_s`.
        """
        response, info, self.last_info, trace = await self._infer_once(
            messages=self._ctx.on_before_act(),
            inference=inference,
            sampling_seed=sampling_seed,
            timeout_s=timeout_s,
        )
        self._ctx.on_after_act(response)
        return self._parse(response, info), response.text, info, trace

    def _parse(self, response: ChatResponse, info: dict[str, Any]) -> ParseResult:
        if self._is_rejected(response):
            info["incomplete_completion"] = True
            return ParseResult(None, self._incomplete_completion_penalty, self._incomplete_completion_feedback)
        return self._parser(response.text)

    def _is_rejected(self, response: ChatResponse) -> bool:
        return self._reject_incomplete_completions and response.finish_reason == "length"

    async def _infer_once(
        self,
        *,
        messages: list[Message],
        inference: InferenceSpec | None,
        sampling_seed: int | None,
        timeout_s: float | None,
        tools: ToolRequest | None = None,
    ) -> tuple[ChatResponse, dict[str, Any], dict[str, Any], TokenTrace | None]:
        """One request: (response, info without token traces, info as the client returned it,
        trace)."""
        spec = inference or InferenceSpec()
        request = ChatCompletionRequest(
            model=self._model,
            messages=messages,
            sampling=spec.sampling,
            return_=spec.return_,
            seed=sampling_seed,
            tools=tools,
            extensions=spec.extensions,
            chat_template_kwargs=self._template_kwargs,
        )
        async with asyncio.timeout(timeout_s):
            response, client_info = await self._client.complete(request)
        last_info = dict(client_info)
        info = drop_traces(last_info)
        info["chat_prompt_messages"] = messages
        if self._template_kwargs:
            info["chat_template_kwargs"] = self._template_kwargs
        info["chat_completion"] = {"role": "assistant", "content": response.text}
        response.merge_into_info(info)
        return response, info, last_info, response.to_trace()

    def push_policy_update(
        self, params: Mapping[str, Tensor], *, timeout_s: float = 600.0, version: str | int | None = None
    ) -> str:
        """Pass new weights to the client. Returns the version that it now serves."""
        if not hasattr(self._client, "sync_weights"):
            raise InferenceError(f"{type(self._client).__name__} has no sync_weights; use a client that takes new weights")
        return self._client.sync_weights(params, timeout_s=timeout_s, version=version)


def drop_traces(client_info: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a client's info without token ids and log-probabilities, which the trace has."""
    info = {key: value for key, value in client_info.items() if key not in TRACE_KEYS}
    raw = info.get("raw_response")
    if isinstance(raw, Mapping):
        response = {key: value for key, value in raw.items() if key != "prompt_token_ids"}
        if isinstance(response.get("choices"), list):
            response["choices"] = [
                {key: value for key, value in choice.items() if key not in ("token_ids", "logprobs")}
                if isinstance(choice, Mapping)
                else choice
                for choice in response["choices"]
            ]
        info["raw_response"] = response
    return info
