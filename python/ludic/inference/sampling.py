"""How tokens are drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings in OpenAI's terms."""

    temperature: float = 0.7
    """0 takes the most likely token."""
    max_tokens: int = 256
    """Tokens sampled at most, the end token among them."""
    top_p: float = 1.0
    """Smallest set of tokens whose probability reaches this; 1 keeps all."""
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
