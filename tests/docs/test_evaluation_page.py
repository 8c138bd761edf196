"""Every command of docs/evaluation.md runs as printed, on fewer problems and against a loopback
server."""

import json
import re
import shlex
from pathlib import Path

import pytest
from stub_openai_server import StubOpenAIServer, completion
from typer.testing import CliRunner

from ludic.cli.app import app
from ludic.cli.evaluate import SHORT_NAMES, EvalSettings

PAGE = Path(__file__).parents[2] / "docs" / "evaluation.md"
TEXT = PAGE.read_text(encoding="utf-8")
COMMANDS = [
    line for block in re.findall(r"^```sh\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE) for line in block.splitlines() if line
]
TINY = ["network.hidden_size=16", "network.num_heads=2", "network.num_kv_heads=1", "network.intermediate_size=16", "threads=1"]


def invoke(*arguments):
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    small = ["warmup.steps=0", "steps=0", "evaluation.prompts=2", "evaluation.samples_per_prompt=1"]
    invoke("train", *TINY, *small, f"output={folder / 'runs'}", "name=base")
    (folder / "my_recipe.yaml").write_text("recipe: sort\ntask: {args: {digits: 5}}\n")
    with StubOpenAIServer(lambda body: completion("123")) as server:
        yield folder, server.base_url


def test_the_page_evaluates_a_run_a_model_and_a_server():
    assert len(COMMANDS) == 7
    assert all(command.startswith("ludic eval ") for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_runs(command, world, monkeypatch):
    folder, base_url = world
    monkeypatch.chdir(folder)
    command = command.replace("http://127.0.0.1:8000/v1", base_url)
    arguments = shlex.split(command, comments=True)[1:]
    arguments, _, target = (arguments[: arguments.index(">")], ">", arguments[-1]) if ">" in arguments else (arguments, "", "")
    smaller = [argument for argument in arguments if not argument.startswith("problems=")]
    result = invoke(*smaller, "problems=2")
    if target:
        assert json.loads(result.stdout)["num_problems"] == 2


def test_every_setting_of_an_evaluation_is_in_the_table():
    named = set(re.findall(r"`([a-z_]+)`", "".join(line for line in TEXT.splitlines() if line.startswith("|"))))
    assert {*SHORT_NAMES, *EvalSettings.__dataclass_fields__} <= named
