"""Sampling parameters, and the checks of their values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ludic.errors import ConfigError


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings in OpenAI's terms."""

    temperature: float = 0.7
    """0 takes the most likely token."""
    max_tokens: int = 256
    """Maximum number of sampled tokens, including the end token."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probability reaches this; 1 keeps all."""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    stop: str | list[str] | None = None
    """Text that ends the completion."""

    def to_openai_kwargs(self) -> dict[str, Any]:
        """Keywords of an OpenAI chat completion."""
        kwargs: dict[str, Any] = {
            "temperature": float(self.temperature),
            "max_tokens": int(self.max_tokens),
            "top_p": float(self.top_p),
            "frequency_penalty": float(self.frequency_penalty),
            "presence_penalty": float(self.presence_penalty),
        }
        if self.stop:
            kwargs["stop"] = self.stop
        return kwargs


SamplingConfig = SamplingParams


def check_sampling(params: SamplingParams) -> None:
    """Raise ConfigError if temperature, top_p or max_tokens is outside its range."""
    if not 0 <= params.temperature < float("inf"):
        raise ConfigError(f"temperature ({params.temperature}) must be >= 0 and finite; 0 takes the most likely token")
    if not 0 < params.top_p <= 1:
        raise ConfigError(f"top_p ({params.top_p}) must be in (0, 1]; 1 keeps all tokens")
    if params.max_tokens < 1:
        raise ConfigError(f"max_tokens ({params.max_tokens}) must be >= 1")


def check_penalties(params: SamplingParams) -> None:
    """Raise ConfigError for a penalty outside the range that servers accept."""
    for name in ("frequency_penalty", "presence_penalty"):
        if not -2 <= getattr(params, name) <= 2:
            raise ConfigError(f"{name} ({getattr(params, name)}) must be in [-2, 2]; 0 changes nothing")
