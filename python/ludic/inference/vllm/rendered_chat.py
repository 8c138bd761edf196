"""Renders a chat to prompt ids, and turns sampled ids into the assistant's message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ludic.errors import InferenceError
from ludic.inference.extensions import VLLMExtensions
from ludic.inference.prompts.template import select_tools
from ludic.inference.prompts.tokens import Dialogue, PromptTokens
from ludic.inference.prompts.tool_calls import assistant_message, completion_finish_reason, count_tool_calls
from ludic.inference.request import ChatCompletionRequest
from ludic.inference.vllm.in_server.think_limits import respects_limit
from ludic.inference.vllm.responses import SampledTokens
from ludic.types import ChatResponse, Message, TokenTrace


class RenderedChat:
    """One request. The text of its answer is decoded from the sampled ids, which are remembered so
    that the chat's next prompt begins with them."""

    def __init__(self, request: ChatCompletionRequest, messages: list[Message], tokens: PromptTokens) -> None:
        """`messages` are the request's, after clipping. Raises what the chat template raises."""
        self._request, self._messages, self._tokens = request, messages, tokens
        self._tools = select_tools(request.tools)
        self._dialogue = Dialogue(messages, self._tools, request.chat_template_kwargs)
        self.prompt_ids = tokens.encode(self._dialogue)

    def read(self, sampled: SampledTokens) -> tuple[ChatResponse, Mapping[str, Any]]:
        """The response, also as a choice of a chat completion. Raises InferenceError if the server
        ignored `max_think`."""
        tokens = self._tokens
        self._check_think_limit(sampled.token_ids)
        text = tokens.decode(sampled.token_ids[:-1] if sampled.ended_by_token else sampled.token_ids)
        if isinstance(sampled.stop_reason, str):
            text = text.split(sampled.stop_reason, 1)[0]
        message = {"role": "assistant", "content": text}
        if self._tools:
            message = assistant_message(text, first_id=count_tool_calls(self._messages))
        tokens.remember_answer(self._dialogue, message, self.prompt_ids, sampled.token_ids)
        finish_reason = completion_finish_reason(sampled.finish_reason, message)
        trace = TokenTrace.from_arrays(self.prompt_ids, sampled.token_ids, sampled.logprobs, finish_reason)
        return self._request.return_.make_response(text, trace), {
            "index": 0,
            "message": message,
            "finish_reason": finish_reason,
        }

    def _check_think_limit(self, ids: Sequence[int]) -> None:
        """Raise InferenceError if the server ignored `max_think`, as it silently does without the
        logits processor."""
        extensions = self._request.extensions
        limit = extensions.max_think if isinstance(extensions, VLLMExtensions) else None
        closing = () if limit is None else self._tokens.tokenizer("</think>", add_special_tokens=False)["input_ids"]
        if limit is not None and not respects_limit(ids, limit, closing):
            raise InferenceError(
                f"the server did not end the thinking after max_think ({limit}) tokens; start it with the logits processor for "
                "that (`ludic serve --think-limits`)"
            )
