"""The commands of docs/sft.md run in order as printed, and its rows are valid."""

import json
import re
import shlex
from pathlib import Path

import pytest
from chat_tokenizers import CHATML, chat_tokenizer
from typer.testing import CliRunner

from ludic.cli.app import app
from ludic.recipes.epochs_schema import compose_sft
from ludic.training.samples.sft import SFTItems

PAGE = (Path(__file__).parents[2] / "docs" / "sft.md").read_text(encoding="utf-8")


def commands(language: str) -> list[list[str]]:
    [block] = re.findall(rf"^```{language}\n(ludic .*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    return [shlex.split(line, comments=True)[1:] for line in block.replace("\\\n", " ").splitlines()]


def test_the_commands_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in commands("bash"):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
    first, second = (json.loads((tmp_path / "runs" / name / "summary.json").read_text()) for name in ("first", "second"))
    assert first["after"]["loss"] < first["before"]["loss"]
    kept = len((tmp_path / "good.jsonl").read_text().splitlines())
    assert 0 < kept < 512
    assert second["data"]["samples"] + second["data"]["heldout_samples"] == kept


def test_the_settings_of_the_page_exist() -> None:
    shown = [arguments for arguments in commands("") if arguments[0] == "sft" and "settings.yaml" not in arguments]
    settings = [[a for a in arguments[1:] if "=" in a] for arguments in shown]
    assert len(settings) == 7
    for given in [*settings, re.findall(r"`(\w[\w.]*=[\w.]+)`", PAGE)]:
        sft_keys = [setting for setting in given if not setting.startswith(("rollout.", "step_to_item"))]
        compose_sft(sft_keys)


def test_the_rows_of_the_page_are_accepted() -> None:
    rows = [
        json.loads(row)
        for row in re.findall(r"^\| `(\{.*?\})` \|", PAGE, re.MULTILINE)
        if "..." not in row and "[messages]" not in row
    ]
    assert [list(row) for row in rows] == [
        *(["messages"], ["prompt", "completion"], ["text"]),
        *(["instruction", "input", "output"], ["conversations", "system"]),
    ]
    assert len(SFTItems(chat_tokenizer(CHATML)).of((str(n), row) for n, row in enumerate(rows))) == 5
