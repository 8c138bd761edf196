"""The versions that a run depends on."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version


def versions() -> dict[str, str]:
    """Of ludic, Python, torch and transformers. Nothing is imported."""
    return {
        "ludic": _of("ludic"),
        "python": platform.python_version(),
        "torch": _of("torch"),
        "transformers": _of("transformers"),
    }


def _of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
