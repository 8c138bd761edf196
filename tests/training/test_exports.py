"""The public names of the packages that import nothing until a name is used."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import ludic.importing

ROOT = Path(ludic.importing.__file__).parent
FACADES = sorted(str(path.parent.relative_to(ROOT.parent)).replace("/", ".") for path in ROOT.rglob("__init__.pyi"))


def test_every_lazy_package_has_a_stub():
    assert len(FACADES) >= 5
    lazy = {path for path in ROOT.rglob("__init__.py") if "lazy_exports(__name__)" in path.read_text(encoding="utf-8")}
    assert {str(path.parent.relative_to(ROOT.parent)).replace("/", ".") for path in lazy} == set(FACADES)


@pytest.mark.parametrize("name", FACADES)
def test_stubs_list_exactly_the_names_that_can_be_imported(name):
    package = importlib.import_module(name)
    stub = ast.parse(Path(package.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    homes = {alias.name: node.module for node in stub.body for alias in node.names}
    assert sorted(package.__all__) == sorted(homes)
    assert all(alias.name == alias.asname for node in stub.body for alias in node.names)
    for public, home in homes.items():
        assert getattr(package, public) is getattr(importlib.import_module(home), public)
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        _ = package.absent


def test_the_package_imports_torch_lazily_and_the_trainer_needs_no_transformers():
    code = (
        "import sys, ludic.training; assert 'torch' not in sys.modules;"
        "from ludic.training import Trainer, RichLiveLogger, make_grpo; assert 'torch' in sys.modules;"
        "print([name for name in ('transformers', 'vllm', 'peft', 'wandb') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
