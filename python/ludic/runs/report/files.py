"""The files of a run: summary.json, and all of them as a report lists them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ludic.files.atomic import write_text
from ludic.runs.directory import RunDirectory

if TYPE_CHECKING:
    from rich.console import Console


def write_summary(directory: RunDirectory, summary: Mapping[str, Any]) -> str:
    """Write summary.json whole, and return its text."""
    text = json.dumps(summary, indent=2) + "\n"
    write_text(directory.summary, text)
    return text


def describe_files(
    directory: RunDirectory, pictures: Mapping[Path, str], episodes_or_rows: Mapping[Path, str]
) -> dict[Path, str]:
    """The content of each file of a training run: files that all commands write, its `pictures`,
    and the episodes or rows that it trained on."""
    return {
        directory.summary: "this, for programs",
        **pictures,
        directory.config: f"the resolved settings; `ludic {directory.command}` reads them",
        directory.metrics: "every step",
        **episodes_or_rows,
        directory.model: "model and tokenizer in Hugging Face layout",
        directory.adapter: "the adapters alone, in PEFT's layout; they are merged in model",
        directory.base: "what the adapters adapt",
    }


def show_files(console: Console, folder: Path, descriptions: Mapping[Path, str]) -> None:
    """Print the files in `folder` with their descriptions; those that do not exist are skipped."""
    console.print(f"[bold]Written to[/] {folder}/", highlight=False)
    for path, description in descriptions.items():
        if path.exists():
            console.print(f"  {path.name:<16}{description}", highlight=False, markup=False)
