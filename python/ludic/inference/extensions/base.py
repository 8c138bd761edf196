"""Settings that only one kind of server understands."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class BackendExtensions:
    """The root of all server-specific settings; `kind` names the server."""

    kind: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
