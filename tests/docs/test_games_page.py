"""The code of docs/games.md runs as printed; its commands name existing recipes and settings."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from training_samples import tiny_model

import ludic
from ludic.models.byte_tokenizer import make_line_tokenizer
from ludic.recipes.compose import compose, list_builtin_recipes

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "games.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def run(source: str, page: str = "docs/games.md") -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(source, page, "exec"), names)
    return names


def replaced(source: str, *pairs: tuple[str, str]) -> str:
    for old, new in pairs:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


def test_the_environments_can_be_used_on_their_own_as_shown() -> None:
    for code in blocks("python"):
        names = run(code)
        assert (names["held"], names["info"]) == ("h", {})


def test_the_commands_name_built_in_recipes_and_settings() -> None:
    commands = re.findall(r"^ludic train (.*?)(?:  +#.*)?$", PAGE.replace("\\\n", ""), re.MULTILINE)
    assert len(commands) > 6
    for command in commands:
        recipe, *settings = shlex.split(command)
        assert recipe in {"data", "tictactoe", "tools"} & set(list_builtin_recipes())
        compose([recipe, *settings])


def test_an_environment_trains_from_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the quickstart, with a tiny model and one step of a few episodes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    quickstart = (DOCS / "quickstart.md").read_text(encoding="utf-8")
    (search,) = re.findall(r"^```python search\n(.*?)^```", quickstart, re.DOTALL | re.MULTILINE)
    Path("search.py").write_text(search)
    tiny_model(max_position_embeddings=512).save_pretrained("tiny")
    make_line_tokenizer().save_pretrained("tiny")
    (source,) = blocks("python parts")
    names = run(replaced(source, ("runs/NAME/model", "tiny"), ("range(32)", "range(2)"), ("train_sync(100)", "train_sync(1)")))
    assert names["trainer"].current_step == 1


def test_a_small_model_learns_to_call_the_tools_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All files of the section, with few rows and one step. Calls in the format of the template are
    read as calls of the tools."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name, language in (("shop.py", "python shop"), ("tools.jinja", "jinja")):
        Path(name).write_text(blocks(language)[0])
    small = ("epochs=3", "steps=2, threads=1")
    sft = run(replaced(blocks("python start")[0], ("range(8000)", "range(40)"), small))["sft"]
    assert isinstance(sft, ludic.SFT)
    expected = 'u:stock a\na:<tool_call>{"name": "stock", "arguments": {"item": "a"}}</tool_call>\nt:3\n'
    assert render_call(sft.tokenizer) == expected
    few = ("steps=45", 'steps=1, threads=1, evaluation={"samples_per_prompt": 1}')
    names = run(replaced(blocks("python train")[0], few, ('"prompts": 12', '"prompts": 2')))
    assert isinstance(names["grpo"], ludic.GRPO)
    assert names["grpo"].recipe.tools == ["shop:stock", "shop:price"]
    assert names["grpo"].trainer.current_step == 1
    assert Path("runs/trained/model/config.json").is_file()
    assert (names["stock"]("a"), names["price"]("b")) == ("3", "0")


def render_call(tokenizer: Any) -> str:
    call = {"type": "function", "function": {"name": "stock", "arguments": {"item": "a"}}}
    messages = [
        {"role": "user", "content": "stock a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert isinstance(text, str)
    return text
