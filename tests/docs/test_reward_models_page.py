"""docs/reward-models.md: its commands and settings exist, its rows are valid, and its Python runs
on the output of a run."""

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ludic.cli.app import app
from ludic.data import load_data
from ludic.recipes.epochs_schema import compose_rm

PAGE = (Path(__file__).parents[2] / "docs" / "reward-models.md").read_text(encoding="utf-8")
TINY = [
    *("network.hidden_size=16", "network.num_heads=2", "network.num_kv_heads=1", "network.intermediate_size=16"),
    *("threads=1", "pairs=40", "batch_size=8", "train_sample=16", "task.args.num_heldout=20", "name=NAME"),
]


def test_the_commands_of_the_page_resolve() -> None:
    [block] = re.findall(r"^```\n(ludic .*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    commands = [shlex.split(line.partition(" > ")[0], comments=True)[2:] for line in block.splitlines()]
    assert len(commands) == 8
    for arguments in commands:
        compose_rm([a for a in arguments if a not in ("settings.yaml", "--print-config", "--json", "--resume", "runs/NAME")])


def test_the_settings_of_the_page_exist() -> None:
    given = re.findall(r"`((?!key=)\w[\w.]*=[\w./]+)`", PAGE)
    assert len(given) >= 8
    for setting in given:
        compose_rm([setting])


def test_the_rows_of_the_page_are_pairs(tmp_path: Path) -> None:
    rows = [json.loads(row) for row in re.findall(r"^\| `(\{.*?\})` \|", PAGE, re.MULTILINE) if "[messages]" not in row]
    assert len(rows) == 3
    for number, row in enumerate(rows):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(json.dumps(row))
        [found] = load_data(str(path), kind="preference").rows
        assert found["chosen"] != found["rejected"]


def test_the_python_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["train-rm", *TINY]).exit_code == 0
    summary = json.loads((tmp_path / "runs" / "NAME" / "summary.json").read_text())
    keys = {key.partition("@")[0] for key in summary}
    for named in re.findall(r"`((?:eval|train|bayes|latent)_\w+)(?:@0.5)?`", PAGE.partition("## The built-in task")[0]):
        assert named in keys | {"train_rm_isambard", "train_rm_bradley_terry", "train_sample"}, named
    [code] = re.findall(r"^```python run\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    exec(code, {})
    assert 0 <= float(capsys.readouterr().out.splitlines()[-1]) <= 1
