"""Versions of the libraries that a run depends on."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version


def versions() -> dict[str, str]:
    """Versions of ludic, Python, torch and transformers, read without importing them."""
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
