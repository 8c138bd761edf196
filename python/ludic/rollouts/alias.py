"""Makes `ludic.rollouts` importable under the top-level name `rollouts`, when it is imported.

>>> import ludic.rollouts.alias
>>> from rollouts.training import Sample

`rollouts.training.types` and `ludic.rollouts.training.types` are then one module, so that a class
has one identity. The distribution itself installs no package of that name.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from ludic.errors import ConfigError

NAME = "rollouts"
HOME = "ludic.rollouts"


class _Alias(MetaPathFinder, Loader):
    """Finds `rollouts.x` as `ludic.rollouts.x`."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != NAME and not fullname.startswith(f"{NAME}."):
            return None
        home = importlib.util.find_spec(_home_of(fullname))
        return None if home is None else ModuleSpec(fullname, self, is_package=home.submodule_search_locations is not None)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(_home_of(spec.name))
        spec.loader_state = module.__spec__  # the import system overwrites it with the alias's
        return module

    def exec_module(self, module: ModuleType) -> None:
        """The module has run already; give it its own spec back."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def _home_of(name: str) -> str:
    """The module that `name` stands for. Example: `rollouts.training` is
    `ludic.rollouts.training`."""
    return HOME + name.removeprefix(NAME)


def install() -> None:
    """Bind the name. Raises ConfigError if another package of that name is loaded or installed; a
    folder without `__init__.py` is not one."""
    if any(isinstance(finder, _Alias) for finder in sys.meta_path):
        return
    loaded = sys.modules.get(NAME)
    other = loaded.__spec__ if loaded is not None else importlib.util.find_spec(NAME)
    if other is not None and other.origin is not None:
        raise ConfigError(
            f"the name {NAME!r} belongs to another package ({other.origin}), which the alias would hide; import {HOME}.training, "
            "or remove that package from the path"
        )
    sys.modules.pop(NAME, None)
    sys.meta_path.insert(0, _Alias())


install()
