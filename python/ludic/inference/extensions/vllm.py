"""Request settings that only one kind of server has."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class BackendExtensions:
    """Base class of server-specific settings; `kind` names the server."""

    kind: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class VLLMExtensions(BackendExtensions):
    """Request settings that only vLLM has."""

    max_think: int | None = None
    """Number of output tokens after which `</think>` is forced."""
    repetition_penalty: float = 1.0
    extra_body_overrides: dict[str, Any] = field(default_factory=dict)
    """Merged last into the extra body of the request."""
    kind: str = "vllm"
