"""Makes `ludic.rollouts` importable under the top-level name `rollouts`, when it is imported.

>>> import ludic.rollouts.alias
>>> from rollouts.training import Sample

`rollouts.training.types` and `ludic.rollouts.training.types` are then one module, so that a class
has one identity. The distribution itself installs no package of that name.
"""

from __future__ import annotations

import importlib.util
import sys

from ludic.errors import ConfigError
from ludic.importing import MOVED

NAME = "rollouts"
HOME = "ludic.rollouts"


def install() -> None:
    """Bind the name. Raises ConfigError if another package of that name is loaded or installed; a
    folder without `__init__.py` is not one."""
    if NAME in MOVED:
        return
    loaded = sys.modules.get(NAME)
    other = loaded.__spec__ if loaded is not None else importlib.util.find_spec(NAME)
    if other is not None and other.origin is not None:
        raise ConfigError(f"{NAME!r} is already another package ({other.origin}); import {HOME}.training, or remove that package")
    sys.modules.pop(NAME, None)
    MOVED[NAME] = HOME


install()
