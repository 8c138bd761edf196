"""The code of docs/rollouts.md runs as printed, and the names and settings on it exist."""

import ast
import importlib
import re
import shlex
from pathlib import Path

import pytest
import yaml

from ludic.recipes.compose import compose
from ludic.rollouts.training.pipeline_tree import read_tree

PAGE = (Path(__file__).parents[2] / "docs" / "rollouts.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def test_the_code_of_the_page_runs() -> None:
    names: dict[str, object] = {}
    for block in blocks("python"):
        exec(block, names)


@pytest.mark.integration
async def test_the_training_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tiny_policy import save_tiny_policy

    save_tiny_policy(tmp_path / "MODEL")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"engines": []}
    first, _, losses, *_ = blocks("python")
    exec(first[: first.index("async def two_batches")], names)
    exec(losses, names)
    training, _ = blocks("py")
    await eval(compile(training, "page", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
    assert [line["step"] for line in names["metrics"]] == [1, 2]  # type: ignore[attr-defined]
    assert (tmp_path / "checkpoints" / "step_000002").is_dir()


def test_what_the_page_imports_exists() -> None:
    _, block = blocks("py")
    tree = compile(block, "page", "exec", flags=ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    [statement] = [node for node in tree.body if isinstance(node, ast.ImportFrom)]  # type: ignore[attr-defined]
    module = importlib.import_module(str(statement.module))
    assert all(hasattr(module, alias.name) for alias in statement.names)


def test_the_tree_of_the_page_is_read(caplog: pytest.LogCaptureFixture) -> None:
    [block] = blocks("yaml")
    assert read_tree(yaml.safe_load(block))["output"]["mode"] == "sft+rl"
    assert not caplog.records


def test_the_command_of_the_page_is_a_recipe() -> None:
    [block] = blocks("bash")
    recipe = compose(shlex.split(block)[2:])
    assert (recipe.warmup.data, recipe.steps > 0) == ("chats.jsonl", True)
    for mode in re.findall(r"`mode=([a-z+]+)`", PAGE):
        assert compose([f"mode={mode}"]).mode == mode


def test_the_new_names_exist() -> None:
    table = PAGE.split("## Names")[1].split("## Beside")[0]
    modules = {name for name in re.findall(r"`(ludic\.[a-z_.]+)`", table) if name != "ludic."}
    assert len(modules) > 8
    for name in modules:
        importlib.import_module(name)


def test_each_source_of_the_comparison_is_listed() -> None:
    table, sources = PAGE.split("## Beside")[1].split("\n1. ")
    used = {int(number) for number in re.findall(r"\[(\d+)\]", table)}
    listed = {1, *(int(number) for number in re.findall(r"^(\d+)\. ", sources, re.MULTILINE))}
    assert used == listed
