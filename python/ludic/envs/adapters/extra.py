"""Optional libraries: imported where they are used."""

from __future__ import annotations

import importlib
from typing import Any

from ludic.errors import MissingExtraError


def import_extra(module: str, extra: str) -> Any:
    """The module. Raises MissingExtraError, which names the extra to install, if its package is
    absent; an import that fails within the package is shown as it is."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise MissingExtraError.for_extra(package, extra) from error
