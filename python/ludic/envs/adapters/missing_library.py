"""Imports optional libraries, with an error that names the extra to install."""

from __future__ import annotations

import importlib
from typing import Any

from ludic.errors import MissingExtraError


def import_extra(module: str, extra: str) -> Any:
    """Import and return a module. Raises MissingExtraError, which names the extra, if its package
    is not installed; an import error within the package passes through."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise MissingExtraError.for_extra(package, extra) from error
