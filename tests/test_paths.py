"""Documented import paths keep working when a module moves, and so do the paths that servers
receive as strings."""

import importlib
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from ludic.importing import MOVED, home_of
from ludic.inference.vllm.in_server import server

PUBLIC: dict[str, list[str]] = json.loads(Path(__file__).with_name("public_names.json").read_text(encoding="utf-8"))
"""Module -> the names that users import from it."""
SERVER_STRINGS = {
    "ludic.inference.vllm.worker.WeightWorker": server.WORKER_EXTENSION,
    "ludic.inference.vllm.think:GlobalThinkProcessor": server.THINK_PROCESSOR,
    "ludic.inference.servers.client_tag_middleware.ClientTagMiddleware": server.TAG_MIDDLEWARE,
    "ludic.inference.servers.secret_middleware.SecretMiddleware": server.SECRET_MIDDLEWARE,
}
"""Strings in users' command lines -> the strings that `ludic serve` writes."""
NEED_VLLM = {"ludic.inference.vllm.worker", "ludic.inference.vllm.think"}
"""Modules that only the server can import."""
PACKAGE = Path(__file__).parents[1] / "python"


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=600)
    return (done.stdout + done.stderr).strip()


@pytest.mark.parametrize("module", PUBLIC)
def test_every_documented_name_can_be_imported_from_its_documented_module(module):
    names = PUBLIC[module]
    assert names
    assert [name for name in names if not hasattr(importlib.import_module(module), name)] == []


@pytest.mark.parametrize(
    ("path", "home"), [(path, home) for path, home in MOVED.items() if path.startswith("ludic.") and path not in NEED_VLLM]
)
def test_a_moved_path_is_the_module_that_it_stands_for(path, home):
    """In each form of import, in whichever order, and with the specification of its own name."""
    package, _, last = path.rpartition(".")
    text = f"""
import importlib, importlib.util, sys
assert importlib.util.find_spec({path!r}).name == {path!r}
import {path} as module
from {package} import {last}
home = sys.modules[{home!r}]
assert module is {last} is home is sys.modules[{path!r}] is importlib.import_module({path!r})
assert home.__spec__.name == home.__name__ == {home!r}
import {home} as again
assert again is home
"""
    assert run("-c", text) == ""


def test_moved_paths_name_files_that_exist_and_none_that_is_there_already():
    for path, home in MOVED.items():
        here, there = (Path(PACKAGE, *name.split(".")) for name in (path, home_of(home)))
        assert there.with_suffix(".py").is_file() or (there / "__init__.py").is_file(), home
        assert not here.with_suffix(".py").exists(), path
        assert not here.exists(), path


def test_a_module_below_a_moved_package_is_loaded_once():
    assert home_of("ludic.agent.base_agent") == "ludic.agents.base_agent"
    moved, home = (importlib.import_module(f"ludic.{name}.base_agent") for name in ("agent", "agents"))
    assert moved is home


def test_an_unknown_module_below_a_moved_one_is_reported_under_its_path():
    with pytest.raises(ModuleNotFoundError, match=r"ludic\.agent\.bass_agent"):
        importlib.import_module("ludic.agent.bass_agent")
    with pytest.raises(ModuleNotFoundError, match=r"ludic\.agentz"):
        importlib.import_module("ludic.agentz")


def test_a_class_of_a_moved_path_is_pickled_under_the_path_of_its_module():
    request = importlib.import_module("ludic.training.batching.intra_batch_control").GRPORequestStrategy(2)
    assert pickle.loads(pickle.dumps(request)) == request
    named = b"cludic.training.batching.intra_batch_control\nGRPORequestStrategy\n."  # a pickle that names the documented path
    assert pickle.loads(named) is type(request)


def test_python_runs_a_module_under_its_moved_path():
    """Without vLLM both say where to get it."""
    moved, home = (run("-m", f"ludic.inference.{name}") for name in ("vllm_server", "vllm.in_server.server"))
    assert moved == home
    assert "vLLM" in moved


@pytest.mark.parametrize("string", SERVER_STRINGS.values())
def test_a_string_that_a_server_loads_names_an_existing_class_or_function(string):
    """The source is parsed and not imported: some of these modules need vLLM, which only the server
    has."""
    module, name = string.replace(":", ".").rsplit(".", 1)
    text = Path(PACKAGE, *module.split(".")).with_suffix(".py").read_text(encoding="utf-8")
    assert f"class {name}" in text


@pytest.mark.parametrize(("old", "new"), SERVER_STRINGS.items())
def test_an_old_server_string_names_the_same_class_as_the_new_one(old, new):
    path, name = old.replace(":", ".").rsplit(".", 1)
    assert f"{MOVED[path]}.{name}" == new.replace(":", ".")
