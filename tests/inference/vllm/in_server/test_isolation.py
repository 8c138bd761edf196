"""Code that runs inside vLLM's process imports nothing of ludic except its own package, and the
extension, which needs numpy alone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ludic.inference.vllm.in_server as in_server

FOLDER = Path(in_server.__path__[0])
PACKAGE = "ludic.inference.vllm.in_server"
EXTENSION = "ludic._core"
MODULES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
VLLM = """
import sys, types
def module(name, **members):
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(members)
class Base:
    def __class_getitem__(cls, _): return cls
class Factory:
    _registry = {}
    @classmethod
    def register_engine(cls, name, engine): cls._registry[name] = engine
for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer", "vllm.v1", "vllm.v1.sample"):
    module(name)
module("vllm.distributed.weight_transfer.base", WeightTransferEngine=Base, WeightTransferInitInfo=Base, WeightTransferUpdateInfo=Base)
module("vllm.distributed.weight_transfer.factory", WeightTransferEngineFactory=Factory)
module("vllm.v1.sample.logits_processor", LogitsProcessor=Base, MoveDirectionality=Base)
"""


def imported_names(source):
    """Every module that the source imports, including imports inside functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield f"{'.' * node.level}{node.module or ''}"


def foreign_imports(source):
    """Those imports that are from ludic but not from the package itself."""
    return [
        name
        for name in imported_names(source)
        if name != EXTENSION and name.split(".")[0] in ("ludic", "") and not f"{name}.".startswith(f"{PACKAGE}.")
    ]


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_its_own_package_of_ludic(module):
    assert foreign_imports(FOLDER.joinpath(f"{module}.py").read_text(encoding="utf-8")) == []


def test_the_check_detects_other_imports():
    source = (
        f"from {PACKAGE}.flags import a\nimport ludic.errors\nfrom . import b\ndef f():\n    from ludic.inference import vllm"
    )
    assert foreign_imports(source) == ["ludic.errors", ".", "ludic.inference"]


def test_every_module_can_be_imported_without_the_rest_of_ludic(tmp_path):
    folder = tmp_path
    for name in ("ludic", "inference", "vllm"):
        folder = folder / name
        folder.mkdir()
        folder.joinpath("__init__.py").touch()
    folder.joinpath("in_server").symlink_to(FOLDER, target_is_directory=True)
    code = f"""{VLLM}
sys.path.insert(0, {str(tmp_path)!r})
import importlib
try:
    import ludic.errors
except ModuleNotFoundError:
    print("alone")
for name in {MODULES!r}:
    for loaded in [loaded for loaded in sys.modules if loaded.startswith("ludic")]:
        del sys.modules[loaded]
    importlib.import_module(f"{PACKAGE}.{{name}}")
    print(name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout.split() == ["alone", *MODULES], done.stderr
