"""Completions from vLLM servers: either the server renders the chat, or it is rendered here and
sent as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ludic.errors import InferenceError, ServerError
from ludic.images.content import to_openai
from ludic.images.store import current_store
from ludic.inference.client import Sampled, current_episode
from ludic.inference.extensions import VLLMExtensions
from ludic.inference.prompts.encoder import PromptEncoder
from ludic.inference.prompts.images import shorten_prompt
from ludic.inference.prompts.template import Dialogue
from ludic.inference.prompts.transcript import message_keys
from ludic.inference.request import ChatCompletionRequest, request_body
from ludic.inference.servers.answers import version_number
from ludic.inference.servers.errors import is_missing_endpoint
from ludic.inference.servers.http import HttpResponse
from ludic.inference.servers.prompt_clipping import PromptClipper
from ludic.inference.servers.routing import block_keys
from ludic.inference.servers.server import Server
from ludic.inference.vllm.images import SentImages
from ludic.inference.vllm.in_server.think_limits import respects_limit
from ludic.inference.vllm.requests import (
    CHAT_FIELDS,
    TOKEN_FIELDS,
    ContextRoom,
    TokenRequest,
    chat_arguments,
    check_fields,
    extension_fields,
)
from ludic.inference.vllm.responses import ResponseReader, SampledTokens, WeightSpan, read_chat_response
from ludic.inference.vllm.servers import CHAT, COMPLETIONS, GENERATE, VLLMServers
from ludic.types import ChatResponse, TokenTrace

Completion = tuple[ChatResponse, dict[str, Any]]
"""The response, and the info of `ChatClient.complete`."""


@dataclass(frozen=True)
class CompletionSettings:
    """How a client changes its requests and checks its responses."""

    room: ContextRoom
    reader: ResponseReader
    clipper: PromptClipper | None
    allow_unknown_fields: bool


class ChatCompletions:
    """Sends messages to `/v1/chat/completions`; the server renders them."""

    def __init__(self, servers: VLLMServers, settings: CompletionSettings) -> None:
        self._servers, self._settings = servers, settings

    async def complete(self, request: ChatCompletionRequest) -> Completion:
        """One completion. Raises ConfigError before anything is sent, InferenceError after."""
        settings, tag = self._settings, self._settings.reader.tag
        if not settings.allow_unknown_fields:
            check_fields(extension_fields(request.extensions), CHAT_FIELDS)
        sent = chat_arguments(request)
        sent["model"] = self._servers.served_names.get(request.model, request.model)
        if settings.clipper is not None:
            sent["messages"] = settings.clipper(request.messages)
        if tag is not None:
            sent["extra_body"] = {**sent.get("extra_body", {}), "client_tag": tag.tag}
            sent["extra_headers"] = tag.headers()
        body = request_body(sent)
        body["messages"] = to_openai(body["messages"], current_store())  # `used_args` have no bytes

        async def call(server: Server) -> tuple[ChatResponse, dict[str, Any]]:
            answer = await server.post(CHAT, body, headers=sent.get("extra_headers"))
            response, payload = settings.reader.read_chat(answer, request)
            settings.room.check_completion(request.model, response, request.sampling.max_tokens)
            return response, payload

        (response, payload), version = await self._servers.send(
            call, reports_version=False, prompt=lambda: message_keys(Dialogue.of(request))
        )
        return response, {"raw_response": payload, "used_args": sent, "policy_version": version}


class TokenCompletions:
    """Sends token ids to the token endpoint. Finds out with the first request which endpoint each
    server has."""

    def __init__(self, servers: VLLMServers, settings: CompletionSettings, tokens: PromptEncoder | None) -> None:
        self._servers, self._settings, self._tokens = servers, settings, tokens
        self.images = None if tokens is None else tokens.images
        """The processor of a model that sees images."""
        self._sent_images = None if self.images is None else SentImages(self.images.store)
        self.without_generate: set[str] = set()
        """URLs of servers that have only `/v1/completions`, which does not report the weight
        version."""

    async def sample(self, request: TokenRequest) -> tuple[SampledTokens, dict[str, Any]]:
        """One continuation, and an info with `policy_version`, `used_args` without the prompt, and
        `weight_versions` if the server reports them."""
        sampling = self._settings.room.fit(request.model, request.prompt_ids, request.sampling)
        ends = () if self._tokens is None else self._tokens.extra_end_ids
        request = replace(request, sampling=sampling, stop_token_ids=ends)
        if (images := self.images) is not None:
            short = shorten_prompt(request.prompt_ids, request.images, images) if request.images else ()
            request = replace(request, short_ids=short, banned_ids=images.banned_ids)
        tag = self._settings.reader.tag
        tag_field = {} if tag is None else {"client_tag": tag.tag}
        generate, completions = {**tag_field, **request.generate_body()}, {**tag_field, **request.completions_body()}

        async def call(server: Server) -> SampledTokens:
            least = self._servers.version
            headers = None if tag is None else tag.headers()

            async def ask(model: str) -> HttpResponse:
                generate["model"] = completions["model"] = model
                if self._sent_images is not None and request.images:
                    return await self._sent_images.post(server, generate, [span.digest for span in request.images], headers)
                return await self._post(server, generate, completions, headers)

            answer, of_adapter = await self._servers.ask_newest(server, request.model, ask)
            sampled = self._settings.reader.read_tokens(answer, request)
            if of_adapter is not None:  # the server's own version is of its base model
                sampled = replace(sampled, weight_versions=[WeightSpan(version=of_adapter, start=0, end=len(sampled.token_ids))])
            self._servers.check_served(server, sampled.weight_versions, least)
            return sampled

        def keys() -> list[bytes]:
            return block_keys(request.prompt_ids, self._servers.served_names.get(request.model, request.model))

        sampled, version = await self._servers.send(call, reports_version=not self.without_generate, prompt=keys)
        numbers = [version_number(span["version"]) for span in sampled.weight_versions]
        versions = [number for number in numbers if number is not None]
        info: dict[str, Any] = {"policy_version": min(versions) if versions else version}
        if versions:
            info["weight_versions"] = sampled.weight_versions
        info["used_args"] = {key: value for key, value in generate.items() if key != "token_ids"}
        return sampled, info

    async def _post(
        self, server: Server, generate: dict[str, Any], completions: dict[str, Any], headers: Mapping[str, str] | None
    ) -> HttpResponse:
        """Post the body that fits the server's endpoint: `generate` or `completions`, which are the
        same request. Raises InferenceError."""
        if server.url not in self.without_generate:
            try:
                return await server.post(GENERATE, generate, headers=headers)
            except ServerError as error:
                if not is_missing_endpoint(error):
                    raise
                self.without_generate.add(server.url)
        return await server.post(COMPLETIONS, completions, headers=headers)


def make_sampled(request: TokenRequest, sampled: SampledTokens, info: Mapping[str, Any]) -> Sampled:
    """The tokens as clients return them, with the versions of the `info` of `TokenCompletions`."""
    trace = TokenTrace.from_arrays(request.prompt_ids, sampled.token_ids, sampled.logprobs, sampled.finish_reason, request.images)
    trace = trace if sampled.routes is None else replace(trace, routes=sampled.routes)
    return Sampled(trace, sampled.ended_by_token, info["policy_version"], info.get("weight_versions", ()))


class RenderedCompletions:
    """Renders and encodes chats with the policy's tokenizer, and sends the token ids.

    The text of an answer is decoded from the sampled ids, which are remembered so that the chat's
    next prompt begins with them.
    """

    def __init__(self, completions: TokenCompletions, settings: CompletionSettings, tokens: PromptEncoder) -> None:
        self._completions, self._settings, self._tokens = completions, settings, tokens

    async def complete(self, request: ChatCompletionRequest) -> Completion:
        """One completion. Raises ConfigError before anything is sent, InferenceError after."""
        tokens, clipper = self._tokens, self._settings.clipper
        messages = request.messages if clipper is None else clipper(request.messages)
        dialogue, episode = Dialogue.of(request, messages), current_episode()
        prompt = tokens.encode(dialogue, episode)
        fields = extension_fields(request.extensions)
        if not self._settings.allow_unknown_fields:
            check_fields(fields, TOKEN_FIELDS)
        top_k = request.return_.top_logprobs_k
        sent = TokenRequest(
            request.model, prompt.ids, request.sampling, request.seed, top_k=top_k, fields=fields, images=prompt.images
        )
        sampled, info = await self._completions.sample(sent)
        self._check_think_limit(sampled.token_ids, request.extensions)
        stops = [sampled.stop_reason] if isinstance(sampled.stop_reason, str) else []
        answer = tokens.read_answer(prompt, make_sampled(sent, sampled, info), stops=stops, episode=episode)
        choice = {"index": 0, "message": answer.message, "finish_reason": answer.trace.finish_reason}
        return request.return_.make_response(answer.text, answer.trace), {"raw_response": {"choices": [choice]}, **info}

    def _check_think_limit(self, ids: Sequence[int], extensions: object) -> None:
        """Raise InferenceError if the server ignored `max_think`, as it silently does without the
        logits processor."""
        limit = extensions.max_think if isinstance(extensions, VLLMExtensions) else None
        closing = () if limit is None else self._tokens.tokenizer("</think>", add_special_tokens=False)["input_ids"]
        if limit is not None and not respects_limit(ids, limit, closing):
            raise InferenceError(f"the thinking exceeds max_think ({limit}); start the server with `ludic serve --think-limits`")


class OpenAICompletions:
    """Sends chats through a client of the openai package, without the checks of the other
    classes."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def complete(self, request: ChatCompletionRequest) -> Completion:
        """One completion."""
        arguments = chat_arguments(request)
        answer = await self._client.chat.completions.create(**arguments)
        return read_chat_response(answer), {"raw_response": answer.model_dump(exclude_none=True), "used_args": arguments}
