"""Chats that are rendered and encoded here: the ids of the prompt, and the message that sampled
ids are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ludic.errors import InferenceError
from ludic.inference.extensions import VLLMExtensions
from ludic.inference.prompts.template import offered_tools
from ludic.inference.prompts.tokens import PromptTokens
from ludic.inference.prompts.tool_calls import assistant_message, calls_made
from ludic.inference.request import ChatCompletionRequest
from ludic.inference.vllm.in_server.think_limits import respects_limit
from ludic.inference.vllm.responses import SampledTokens
from ludic.types import ChatResponse, Message


class RenderedChat:
    """One request. Its answer becomes text by the ids that came back, which the next prompt of
    the chat begins with."""

    def __init__(self, request: ChatCompletionRequest, messages: list[Message], tokens: PromptTokens) -> None:
        """`messages` are those of the request as they are sent. Raises what the chat template
        raises."""
        self._request, self._messages, self._tokens = request, messages, tokens
        self._tools = offered_tools(request.tools)
        self.prompt_ids = tokens.encode(messages, self._tools)

    def read(self, sampled: SampledTokens) -> tuple[ChatResponse, Mapping[str, Any]]:
        """The response, and the choice of a chat completion that says the same. InferenceError
        where `max_think` was not heeded."""
        asked, tokens = self._request.return_, self._tokens
        self._check_thought(sampled.token_ids)
        text = tokens.text(sampled.token_ids[:-1] if sampled.ended_by_token else sampled.token_ids)
        if isinstance(sampled.stop_reason, str):
            text = text.split(sampled.stop_reason, 1)[0]
        message = {"role": "assistant", "content": text}
        if self._tools:
            message = assistant_message(text, first_id=calls_made(self._messages))
        tokens.answered(self._messages, self._tools, message, self.prompt_ids, sampled.token_ids)
        called = "tool_calls" in message and sampled.finish_reason == "stop"
        response = ChatResponse(
            text=text,
            completion_token_ids=sampled.token_ids if asked.return_token_ids else None,
            completion_logprobs=sampled.logprobs if asked.return_chosen_logprobs else None,
            finish_reason="tool_calls" if called else sampled.finish_reason,
            prompt_token_ids=self.prompt_ids if asked.return_token_ids else None,
        )
        return response, {"index": 0, "message": message, "finish_reason": response.finish_reason}

    def _check_thought(self, ids: Sequence[int]) -> None:
        """A server that does not know `max_think` ignores it without a word."""
        extensions = self._request.extensions
        limit = extensions.max_think if isinstance(extensions, VLLMExtensions) else None
        closing = () if limit is None else self._tokens.tokenizer("</think>", add_special_tokens=False)["input_ids"]
        if limit is not None and not respects_limit(ids, limit, closing):
            raise InferenceError(
                f"the server let a thought go on after max_think ({limit}) tokens; start it with what heeds it "
                "(`ludic serve --think-limits`)"
            )
