"""The task of docs/recipes.md runs as printed."""

import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ludic.cli.app import app
from ludic.recipes.compose import compose

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_the_task_of_the_page_can_be_trained(tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "page_task.py").write_text(next(block for block in blocks("python") if "class Successor" in block))
    monkeypatch.syspath_prepend(tmp_path)
    try:
        result = CliRunner().invoke(app, ["train", *tiny, "task.kind=page_task:Successor", "task.args={right: 0.5}"])
    finally:
        sys.modules.pop("page_task", None)
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 3
    assert "80+" in result.output


def test_the_file_of_the_page_is_a_recipe(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(blocks("yaml")[0])
    assert compose([str(path)]).task.args["digits"] == 7
    assert compose([str(path), "algorithm=cispo"]).algorithm_args["clip_eps_high"] == 0.3
