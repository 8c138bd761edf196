"""docs/dpo.md: its commands and settings exist, its keys are written, and its Python runs."""

import re
import shlex
from pathlib import Path

import pytest
from commands import write_rows
from training_samples import tiny_model

from ludic.models.byte_tokenizer import make_byte_tokenizer
from ludic.recipes.epochs_schema import compose_dpo
from ludic.runs.dpo import Answer, Answers
from ludic.training.evaluators.held_out import MEASURED
from ludic.training.loss.dpo import STATISTICS

PAGE = (Path(__file__).parents[2] / "docs" / "dpo.md").read_text(encoding="utf-8")


def test_the_commands_of_the_page_resolve() -> None:
    [block] = re.findall(r"^```\n(ludic .*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    commands = [shlex.split(line.partition(" > ")[0], comments=True)[2:] for line in block.splitlines()]
    assert len(commands) == 8
    for arguments in commands:
        compose_dpo([a for a in arguments if a not in ("settings.yaml", "--print-config", "--json", "--resume", "runs/NAME")])


def test_the_settings_of_the_page_exist() -> None:
    given = re.findall(r"`((?!key=|reference_file=)[a-z][\w.]*=[\w./]+)`", PAGE)
    assert len(given) >= 3
    for setting in given:
        compose_dpo([setting])
    named = re.findall(r"`(?!reference\.logps`)((?:warmup|loss|reference|trainer|columns)\.\w+)`", PAGE)  # a file
    assert len(set(named)) >= 8
    for name in named:
        section, _, key = name.partition(".")
        assert key in vars(getattr(compose_dpo(), section)), name


def test_the_keys_of_the_page_are_those_that_are_logged() -> None:
    trained = set(re.findall(r"`train/([\w/]+)`", PAGE))
    assert trained == set(STATISTICS) - {"num_pairs"}
    assert set(re.findall(r"`(ece|negative_margin_rate|margin_p\d+)`", PAGE)) <= set(MEASURED)
    answered = Answers([Answer("p", "1", True, 1.0)] * 2, is_judged=True).to_dict()
    for key in ("finished", "score", "well_formed"):
        assert key in answered
        assert f"`{key}`" in PAGE


def test_the_python_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_model().save_pretrained(tmp_path / "path/to/model")
    make_byte_tokenizer().save_pretrained(tmp_path / "path/to/model")
    rows = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n + 2)} for n in range(40)]
    write_rows(tmp_path / "pairs.jsonl", *rows)
    blocks = re.findall(r"^```python run\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    for code in blocks:
        exec(code, {})
        assert 0 <= float(capsys.readouterr().out.splitlines()[-1]) <= 1
    assert len(blocks) == 2
