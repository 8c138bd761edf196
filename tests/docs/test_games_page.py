"""The code of docs/games.md runs as printed, and its commands name existing recipes."""

import re
from pathlib import Path

from ludic.recipes.compose import list_builtin_recipes

PAGE = (Path(__file__).parents[2] / "docs" / "games.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def test_the_environments_can_be_used_on_their_own_as_shown() -> None:
    for code in blocks("python"):
        names: dict[str, object] = {}
        exec(code, names)
        assert (names["held"], names["info"]) == ("h", {})


def test_the_commands_name_built_in_recipes() -> None:
    named = set(re.findall(r"ludic train (\w+)", PAGE))
    assert named == {"tictactoe", "tools"} < set(list_builtin_recipes())
