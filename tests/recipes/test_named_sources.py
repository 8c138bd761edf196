"""Names in a recipe are looked up before torch is imported."""

import json
import subprocess
import sys

import pytest

from ludic.errors import ConfigError, DataError
from ludic.recipes.compose import compose
from ludic.recipes.epochs_schema import compose_sft
from ludic.recipes.named_sources import check_named_sources

RUN = """
import json, sys
from typer.testing import CliRunner
from ludic.cli.app import app
for arguments in json.loads(sys.argv[1]):
    result = CliRunner().invoke(app, arguments)
    print(json.dumps([result.exit_code, " ".join(result.stderr.split()), "torch" in sys.modules]))
"""


def test_a_missing_name_is_reported_before_torch_is_imported(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "broken.py").write_text("def exact(:\n")
    data = ["data=rows.jsonl", "model=./m"]
    (tmp_path / "m").mkdir()
    expected = {
        "rosw.jsonl does not exist, seen from": ["train", "data=rosw.jsonl", "reward=gsm8k"],
        "did you mean rows.jsonl?": ["train", "data=rosw.jsonl", "reward=gsm8k"],
        "b.jsonl does not exist": ["train", "data={datasets: [{id: rows.jsonl}, {id: b.jsonl}]}", "reward=gsm8k"],
        "runs/nosuch does not exist": ["train", "model=runs/nosuch"],
        "./judge does not exist": ["train", *data, "reward_model=./judge"],
        "reward (rewards:exact) cannot be imported: No module": ["train", *data, "reward=[gsm8k,rewards:exact]"],
        "reward (broken:exact) cannot be imported: SyntaxError": ["train", *data, "reward=broken:exact"],
        "eval_reward (json:exact)": ["train", *data, "reward=gsm8k", "eval_reward=json:exact"],
        "nosuch.jsonl does not exist": ["sft", "data=[rows.jsonl,nosuch.jsonl]"],
        "pairs.jsonl does not exist": ["train-rm", "data=pairs.jsonl"],
        "held.jsonl does not exist": ["dpo", "data=rows.jsonl", "heldout_data=held.jsonl"],
    }
    made = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(list(expected.values()))],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    for message, line in zip(expected, made.stdout.splitlines(), strict=True):
        code, said, has_torch = json.loads(line)
        assert message in said, said
        assert code in (1, 2)
        assert not has_torch, message
    assert not (tmp_path / "runs").exists()


def test_what_exists_and_what_may_be_on_the_hub_pass(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "own_named.py").write_text("def exact(completions):\n    return [0.0] * len(completions)\n")
    for arguments in (
        ["data=rows.jsonl", "reward={own_named:exact: 2.0}", "model=Qwen/Qwen2.5-0.5B"],
        ["data=openai/gsm8k", "reward=gsm8k", "reward_model=someone/judge"],
        [],
    ):
        check_named_sources(compose(arguments))
    check_named_sources(compose_sft(["data=rows.jsonl"]))
    check_named_sources(compose_sft([]))


def test_a_name_that_is_wrong_is_named_with_its_setting(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"data: \./none does not exist, .*file"):
        check_named_sources(compose(["data=./none", "reward=gsm8k"]))
    with pytest.raises(ConfigError, match=r"algorithm \(nosuch_module:make\) cannot be imported"):
        check_named_sources(compose(["algorithm=nosuch_module:make"]))
    with pytest.raises(ConfigError, match=r"task\.kind \(nosuch_module:Own\) cannot be imported"):
        check_named_sources(compose(["task.kind=nosuch_module:Own"]))
