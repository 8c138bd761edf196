"""The base class of request settings that only one kind of server has."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class BackendExtensions:
    """Base class of server-specific settings; `kind` names the server."""

    kind: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
