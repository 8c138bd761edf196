"""Packages that import a name when it is first read.

The stub beside the package's `__init__.py` is the one list of names: type checkers read it, and so
does `lazy_exports`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_exports(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of `package`, from the imports in its `__init__.pyi`.

    Example: a stub with the line `from ludic.training.trainer import Trainer as Trainer` makes
    `package.Trainer` import `ludic.training.trainer` the first time it is read.
    """
    namespace = vars(sys.modules[package])
    homes = _homes(Path(namespace["__file__"]).with_suffix(".pyi"))

    def __getattr__(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(homes[name]), name)
        namespace[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*namespace, *homes})

    return __getattr__, __dir__, sorted(homes)


def _homes(stub: Path) -> dict[str, str]:
    """Name -> module, from the imports of the stub."""
    imports = (node for node in ast.parse(stub.read_text(encoding="utf-8")).body if isinstance(node, ast.ImportFrom))
    return {alias.name: node.module for node in imports if node.module for alias in node.names}
