"""OpenAI's completions of plain texts and of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ludic.inference.gateway.dialects.base import Answered, Ask, CallError, Events, Sampling, decode, event, now, openai_error
from ludic.inference.gateway.dialects.chat import usage

PATH = "/v1/completions"
PING = b": ping\n\n"
ID = "cmpl-"
error_body = openai_error


class _Body(Sampling):
    prompt: str | list[int | str] | None = None
    model: str = ""
    stream: bool | None = None
    n: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    logprobs: int | bool | None = None


def read(body: bytes, *, ignore_format: bool = False) -> Ask:
    """The request. Raises CallError for one that is malformed."""
    given = decode(body, _Body)
    prompt: Any = given.prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
        if len(prompt) > 1:
            raise CallError(f"prompt has {len(prompt)} texts; send one")
        prompt = prompt[0]
    if not prompt:
        raise CallError("prompt is missing or empty; send a text or token ids")
    return Ask(
        [],
        given.model,
        stream=bool(given.stream),
        n=1 if given.n is None else given.n,
        max_tokens=given.max_tokens or 16,
        stop=[given.stop] if isinstance(given.stop, str) else given.stop or [],
        logprobs=given.logprobs is not None and given.logprobs is not False,
        prompt=prompt,
        sampling=given.given(),
    )


def write(ask: Ask, answers: Sequence[Answered], ident: str) -> dict[str, Any]:
    """The body of a whole answer."""
    choices = []
    for index, answer in enumerate(answers):
        tokens = [text for text, _ in answer.logprobs]
        probs = {
            "tokens": tokens,
            "token_logprobs": [logp for _, logp in answer.logprobs],
            "top_logprobs": None,
            "text_offset": [],
        }
        choices.append(
            {
                "index": index,
                "text": answer.text,
                "finish_reason": answer.finish_reason,
                "logprobs": probs if ask.logprobs else None,
            }
        )
    shared = {"id": ident, "object": "text_completion", "created": now(), "model": ask.model}
    return {**shared, "choices": choices, "usage": usage(answers)}


def stream(ask: Ask, answers: Sequence[Answered], ident: str) -> Events:
    """The answer as events."""
    yield event(write(ask, answers, ident))
    yield b"data: [DONE]\n\n"
