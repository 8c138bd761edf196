"""`ludic train`, `sft`, `dpo` and `train-rm`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ludic.cli.settings import add_named_recipe, format_recipe
from ludic.errors import check_value
from ludic.launch.rank_environment import read_rank_environment
from ludic.runs.command import RunCommand
from ludic.runs.console import quiet_libraries, run_with_console
from ludic.runs.directory import DIRECTORIES, RunDirectory, SFTDirectory


def train_command(name: str, arguments: Sequence[str], *, resume: Path | None, json_only: bool, print_config: bool) -> int:
    """Run the command `name` and return its exit status, see `RunCommand.execute`."""
    arguments = add_named_recipe(arguments, resume) if name == RunDirectory.command else arguments
    command = RunCommand(DIRECTORIES[name], arguments, resume=resume)
    if not print_config:
        return command.execute(json_only=json_only)
    environment = read_rank_environment()
    if environment is None or environment.rank == 0:
        print(format_recipe(command.resolve()), end="")
    return 0


def preview_command(arguments: Sequence[str], *, rows: int, json_only: bool) -> int:
    """Show what would be trained on. Loads the tokenizer and no model, and writes nothing."""
    check_value("--preview", rows, least=1)
    recipe = SFTDirectory.compose(arguments)

    def work(console: Console) -> tuple[int, str]:
        from ludic.recipes.model import build_tokenizer
        from ludic.runs.data.preview import preview

        quiet_libraries()
        shown = preview(recipe, build_tokenizer(recipe), rows)
        shown.show(console)
        return 0, json.dumps(shown.to_dict(), indent=2, ensure_ascii=False) + "\n"

    return run_with_console(work, json_only=json_only)
