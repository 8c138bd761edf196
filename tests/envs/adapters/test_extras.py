"""Other libraries are imported when one of their environments is created. If missing, the error
names the extra to install."""

import re
import subprocess
import sys

import pytest

from ludic.envs.adapters.episode import import_extra
from ludic.errors import MissingExtraError

LIBRARIES = ["gymnasium", "textarena", "openenv", "verifiers"]


def run(code):
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=600).stdout.strip()


def test_importing_environments_loads_no_adapter_and_importing_adapters_no_library():
    assert run("import sys, ludic.envs; print('ludic.envs.adapters' in sys.modules)") == "False"
    code = f"""
import sys, ludic.envs.adapters as adapters
for name in adapters.__all__:
    getattr(adapters, name)
print(*[name for name in {[*LIBRARIES, "torch", "numpy"]!r} if name in sys.modules])
"""
    assert run(code) == ""


@pytest.mark.parametrize(
    ("library", "make"),
    [
        ("gymnasium", "GymnasiumEnv('CartPole-v1')"),
        ("textarena", "TextArenaEnv('TicTacToe-v0')"),
        ("openenv", "OpenEnvEnv('http://127.0.0.1:9')"),
        ("verifiers", "VerifiersEnv(['task'])"),
    ],
)
def test_the_error_of_a_missing_library_names_the_extra(library, make):
    code = f"""
import sys
sys.modules[{library!r}] = None
from ludic.envs import adapters
try:
    adapters.{make}
except ImportError as error:
    print(type(error).__name__, error)
"""
    assert re.search(rf"^MissingExtraError {library} .*`pip install 'ludic-rl\[{library}\]'`", run(code))


def test_an_import_error_inside_the_library_is_raised_unchanged(tmp_path, monkeypatch):
    (tmp_path / "half_there.py").write_text("import surely_absent\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="surely_absent") as failed:
        import_extra("half_there", "half")
    assert not isinstance(failed.value, MissingExtraError)
    with pytest.raises(MissingExtraError, match=r"nowhere_at_all .*`pip install 'ludic-rl\[some\]'`"):
        import_extra("nowhere_at_all.part", "some")
