"""The public names of `ludic.training` and `ludic.training.batching`."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ludic.training
import ludic.training.batching


@pytest.mark.parametrize("package", [ludic.training, ludic.training.batching])
def test_every_public_name_exists_and_type_checkers_see_the_same_names(package):
    for name in package.__all__:
        assert getattr(package, name) is not None
    tree = ast.parse(Path(package.__file__).read_text())
    [guarded] = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {alias.name: statement.module for statement in guarded.body for alias in statement.names}
    assert seen == {name: f"{package.__name__}.{home}" for name, home in package._HOME_OF.items()}
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        _ = package.absent


def test_the_package_imports_torch_only_when_asked_and_the_trainer_needs_no_transformers():
    code = (
        "import sys, ludic.training; assert 'torch' not in sys.modules;"
        "from ludic.training import Trainer, RichLiveLogger, make_grpo; assert 'torch' in sys.modules;"
        "print([name for name in ('transformers', 'vllm', 'peft', 'wandb') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
