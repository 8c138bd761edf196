"""The options of `ludic sft`."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ludic.cli.shared_options import JsonOnly, LearningRate, PrintConfig, Resume, Settings, make_lr_setting, refuse_flags_in
from ludic.cli.user_errors import report_user_errors

DEFAULT_PREVIEW = 3
"""Rows that `ludic sft --preview` shows."""

SFT_HELP = """Supervised fine-tuning: a data file in, a model out.

A row of the file has `messages`, `prompt` and `completion`, or `text`; or is one of Alpaca (`instruction`, `output`) or ShareGPT
(`conversations`); or is a rollout written by `ludic rollout`. The loss covers only the assistant's tokens, and all of a `text`.
Everything is written to `runs/NAME/`: config.yaml, metrics.jsonl, summary.json, loss.png and the model in Hugging Face layout. Ctrl-C
stops after the current step and saves the run.

**Examples**

- `ludic sft` teaches a small model to sort digits, from demonstrations
- `ludic sft model=path/to/model data=chats.jsonl epochs=2 trainer.lr=1e-5` (`--print-config` lists all fields)
- `ludic sft model=path/to/model data=chats.jsonl --preview` shows rows with their trained tokens marked, and stops
- `ludic sft settings.yaml trainer.packing=padding_free` reads a settings file
- `ludic sft --resume runs/NAME` resumes an interrupted run
"""


class SFTTyperCommand(TyperCommand):
    """Accepts `--preview` without a number."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        following = [*args[1:], ""]
        return super().parse_args(
            ctx,
            [
                f"--preview={DEFAULT_PREVIEW}" if one == "--preview" and not next_.isdecimal() else one
                for one, next_ in zip(args, following, strict=True)
            ],
        )


def sft(
    arguments: Settings = None,
    resume: Resume = None,
    lr: LearningRate = None,
    json_only: JsonOnly = False,
    print_config: PrintConfig = False,
    preview: Annotated[
        int | None,
        typer.Option(
            metavar="[N]", help=f"Show the first N rows ({DEFAULT_PREVIEW}) with their trained tokens marked, and stop."
        ),
    ] = None,
) -> None:
    from ludic.cli.sft import preview_command, sft_command

    with report_user_errors():
        refuse_flags_in(arguments)
        settings = [*(arguments or ()), *make_lr_setting(lr)]
        if preview is not None:
            code = preview_command(settings, rows=preview, json_only=json_only)
        else:
            code = sft_command(settings, resume=resume, json_only=json_only, print_config=print_config)
    raise typer.Exit(code)
