"""Request settings that only vLLM has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ludic.inference.extensions.base import BackendExtensions


@dataclass(frozen=True, kw_only=True)
class VLLMExtensions(BackendExtensions):
    """Request settings that only vLLM has."""

    max_think: int | None = None
    """Number of output tokens after which `</think>` is forced."""
    repetition_penalty: float = 1.0
    extra_body_overrides: dict[str, Any] = field(default_factory=dict)
    """Merged last into the extra body of the request."""
    kind: str = "vllm"
