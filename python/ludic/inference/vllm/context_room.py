"""Checks that a prompt and `max_tokens` fit into the server's context, because the server would
silently clip `max_tokens`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from ludic.errors import ConfigError, InferenceError
from ludic.inference.sampling import SamplingParams
from ludic.list_fields import stored
from ludic.types import ChatResponse


class ContextRoom:
    """The context lengths of one client's models.

    >>> ContextRoom({"tiny": 512}).fit("tiny", prompt_ids, SamplingParams(max_tokens=64))
    """

    def __init__(self, lengths: Mapping[str, int], *, on_overflow: Literal["error", "clip"] = "error") -> None:
        """`lengths`: maximum number of prompt plus completion tokens, by model; if empty, there is
        no limit. If a request does not fit, `on_overflow="error"` raises ConfigError, and "clip"
        clips and counts it."""
        if on_overflow not in ("error", "clip"):
            raise ConfigError(f"on_overflow ({on_overflow!r}) must be 'error' or 'clip'")
        self.lengths, self._on_overflow = dict(lengths), on_overflow
        self.clipped = 0

    def fit(self, model: str, prompt_ids: Sequence[int], sampling: SamplingParams) -> SamplingParams:
        """The sampling parameters with a `max_tokens` that fits after the prompt. Raises
        InferenceError for a prompt that is empty or leaves no room."""
        length = self._length(model)
        if not prompt_ids:
            raise InferenceError("the prompt has no tokens; a model needs at least one to continue")
        if length is None or len(prompt_ids) + sampling.max_tokens <= length:
            return sampling
        if len(prompt_ids) >= length:
            raise InferenceError(
                f"the prompt has {len(prompt_ids)} tokens and the server's context {length}, which leaves no room for a completion; "
                "shorten the prompt or start the server with a larger --max-model-len"
            )
        self._handle_overflow(model, len(prompt_ids), sampling.max_tokens)
        return replace(sampling, max_tokens=length - len(prompt_ids))

    def check_completion(self, model: str, response: ChatResponse, max_tokens: int) -> None:
        """Detect from the response that the server clipped `max_tokens`, for a prompt that the
        server rendered."""
        prompt, completion = stored(response, "prompt_token_ids"), stored(response, "completion_token_ids")
        if prompt is None or completion is None or response.finish_reason != "length" or len(completion) >= max_tokens:
            return
        self._handle_overflow(model, len(prompt), max_tokens)

    def _handle_overflow(self, model: str, prompt: int, max_tokens: int) -> None:
        if self._on_overflow == "error":
            raise ConfigError(
                f"the prompt ({prompt} tokens) and max_tokens ({max_tokens}) must fit into the server's context ({self._length(model)}), "
                "which would silently clip the completion; lower max_tokens, start the server with a larger --max-model-len, or set "
                "on_overflow='clip'"
            )
        self.clipped += 1

    def _length(self, model: str) -> int | None:
        return self.lengths.get(model, min(self.lengths.values(), default=None))
