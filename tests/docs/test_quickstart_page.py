"""docs/quickstart.md and the first program of the README run as printed, with a small model and few
steps."""

import re
import shlex
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from tiny_recipe import TINY
from training_samples import tiny_model
from typer.testing import CliRunner

from ludic.cli.app import app
from ludic.errors import LudicError
from ludic.models.byte_tokenizer import make_byte_tokenizer
from ludic.recipes.compose import compose
from ludic.recipes.epochs_schema import compose_dpo, compose_rm, compose_sft

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
COMPOSE = {"train": compose, "sft": compose_sft, "train-rm": compose_rm, "dpo": compose_dpo}


def block(text: str, tag: str) -> str:
    (found,) = re.findall(rf"^```{tag}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return str(found)


def test_the_multi_turn_task_trains_with_the_command_below_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("search.py").write_text(block(PAGE, "python search"))
    command = next(line for line in PAGE.splitlines() if line.startswith("ludic train tools task.kind=search"))
    arguments = shlex.split(command.split("#")[0])[1:]
    result = CliRunner().invoke(app, [*arguments, *TINY, "name=run"])
    assert result.exit_code == 0, result.output
    assert "the reward sees whether the digit was found" in result.output


@pytest.mark.parametrize(
    "command", sorted(set(re.findall(r"^ludic ((?:train|sft|train-rm|dpo) .*?)(?:  +#.*)?$", PAGE, re.MULTILINE)))
)
def test_every_command_has_settings_that_there_are(command: str) -> None:
    name, *arguments = shlex.split(command)
    settings = [argument for argument in arguments if argument != "..."]
    try:
        COMPOSE[name](settings)
    except LudicError as error:
        pytest.fail(f"ludic {command}: {error}")


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_first_program_of_a_page_trains(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first reward function of the page. Its model is replaced by a tiny one, and its 100
    steps by 1."""
    monkeypatch.chdir(tmp_path)
    tiny_model().save_pretrained("tiny")
    make_byte_tokenizer().save_pretrained("tiny")
    text = (ROOT / page).read_text(encoding="utf-8")
    reward = re.findall(r"^def exact\(.*?(?=^```|^$)", text, re.DOTALL | re.MULTILINE)[0]
    source = f"{reward}\n{block(text, 'python hub')}"
    small = 'steps=1, threads=1, rollout={"prompts": 2, "group_size": 2, "max_new_tokens": 3}, evaluation={"prompts": 2}'
    for old, new in (('"Qwen/Qwen2.5-0.5B-Instruct"', '"tiny"'), ("steps=100", small)):
        assert source.count(old) == 1
        source = source.replace(old, new)
    exec(compile(source, page, "exec"), {"__name__": "example"})
    assert Path("runs/first/summary.json").is_file()


def test_the_program_with_a_tool_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tiny model, whose template writes tools, calls and results, and one step."""
    monkeypatch.chdir(tmp_path)
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}"
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %};{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    tiny_model(max_position_embeddings=512).save_pretrained("tiny")
    tokenizer.save_pretrained("tiny")
    source = block(PAGE, "python tools")
    small = 'steps=1, threads=1, rollout={"prompts": 2, "group_size": 2, "max_new_tokens": 3}, evaluation={"prompts": 2}'
    for old, new in (("Qwen/Qwen2.5-0.5B-Instruct", "tiny"), ("steps=100", small)):
        assert source.count(old) == 1
        source = source.replace(old, new)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(source, "docs/quickstart.md", "exec"), names)
    assert names["look"]("pears") == "4"
    assert Path("runs/tools/summary.json").is_file()
    assert "__main__" not in (config := Path("runs/tools/config.yaml").read_text())
    assert "\ntools:\n- look\n" in config


def test_the_picture_of_the_dashboard_is_whole_and_fetches_nothing() -> None:
    text = (ROOT / "docs" / "dashboard.svg").read_text(encoding="utf-8")
    assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    assert not re.findall(r"@font-face|url\(http|href=", text)
    assert text.count(">entropy") == 1
