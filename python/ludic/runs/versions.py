"""Versions of the libraries that a run depends on."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version


def collect_versions() -> dict[str, str]:
    """Versions of ludic, Python, torch and transformers, read without importing them."""
    return {
        "ludic": _find_version("ludic"),
        "python": platform.python_version(),
        "torch": _find_version("torch"),
        "transformers": _find_version("transformers"),
    }


def _find_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
