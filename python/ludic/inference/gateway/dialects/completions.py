"""OpenAI's completions of plain texts and of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ludic.inference.gateway.dialects import base
from ludic.inference.gateway.dialects.chat import usage

PATH = "/v1/completions"
PING = b": ping\n\n"
ID = "cmpl-"
error_body = base.openai_error


class _Body(base.Body):
    prompt: str | list[int | str] | None = None
    n: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    logprobs: int | bool | None = None


def read(body: bytes, *, ignore_format: bool = False) -> base.Ask:
    """The request. Raises CallError for one that is malformed."""
    given = base.decode(body, _Body)
    prompt: Any = given.prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
        if len(prompt) > 1:
            raise base.CallError(f"prompt has {len(prompt)} texts; send one")
        prompt = prompt[0]
    if not prompt:
        raise base.CallError("prompt is missing or empty; send a text or token ids")
    return base.Ask(
        [],
        n=1 if given.n is None else given.n,
        max_tokens=given.max_tokens or 16,
        stop=[given.stop] if isinstance(given.stop, str) else given.stop or [],
        logprobs=given.logprobs is not None and given.logprobs is not False,
        prompt=prompt,
        **given.shared(),
    )


def write(ask: base.Ask, answers: Sequence[base.Answered], ident: str) -> dict[str, Any]:
    """The body of a whole answer."""
    choices = []
    for index, answer in enumerate(answers):
        tokens = [text for text, _ in answer.logprobs]
        logps = [logp for _, logp in answer.logprobs]
        probs = {"tokens": tokens, "token_logprobs": logps, "top_logprobs": None, "text_offset": []} if ask.logprobs else None
        choices.append({"index": index, "text": answer.text, "finish_reason": answer.finish_reason, "logprobs": probs})
    shared = {"id": ident, "object": "text_completion", "created": base.now(), "model": ask.model}
    return {**shared, "choices": choices, "usage": usage(answers)}


def stream(ask: base.Ask, answers: Sequence[base.Answered], ident: str) -> base.Events:
    """The answer as events."""
    yield base.event(write(ask, answers, ident))
    yield b"data: [DONE]\n\n"
