"""Environments of other libraries as environments of ours.

Each adapter is imported when it is first asked for, and its library when an environment is made: importing this package needs none of
them. A library that is missing is a `MissingExtraError` that names the extra to install.
"""

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "GymnasiumEnv": "gymnasium",
    "OpenEnvEnv": "openenv",
    "TextArenaEnv": "textarena",
    "VerifiersEnv": "verifiers",
    "rollout_from_trace": "verifiers_trace",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if TYPE_CHECKING:
    from ludic.envs.adapters.gymnasium import GymnasiumEnv as GymnasiumEnv
    from ludic.envs.adapters.openenv import OpenEnvEnv as OpenEnvEnv
    from ludic.envs.adapters.textarena import TextArenaEnv as TextArenaEnv
    from ludic.envs.adapters.verifiers import VerifiersEnv as VerifiersEnv
    from ludic.envs.adapters.verifiers_trace import rollout_from_trace as rollout_from_trace
