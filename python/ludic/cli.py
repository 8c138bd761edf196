"""The command `ludic`: train, doctor, version. Each command imports what it needs when it runs, so that `--help` is quick."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="ludic",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Post-training of language models: reinforcement learning, reward modelling and supervised fine-tuning.",
    epilog="Start with `ludic train`: it teaches a small model to sort digits, on this machine's CPU, in under a minute.",
)

_TRAIN_HELP = """Train a recipe and show what it learnt: held-out accuracy before and after, answers side by side, and the
reward curve.

Everything is written to `runs/NAME/`: config.yaml, metrics.jsonl, rollouts.jsonl, summary.json, reward.png and the model in
Hugging Face layout. Ctrl-C ends after the current step and keeps what was done.

**Examples**

- `ludic train` sorts digits; `ludic train addition` adds with a scratchpad
- `ludic train tictactoe` plays against an opponent; `ludic train tools` looks up what it answers, one call after the other
- `ludic train --algorithm cispo seed=3 trainer.lr=1e-4` sets fields (`--print-config` lists them all)
- `ludic train my_recipe.yaml` reads a file; its `recipe:` key names the built-in recipe it starts from
- `ludic train model=path/to/model` trains any causal model on disk, or a hub id
- `ludic train --resume runs/NAME` goes on where an interrupted run stopped
- `ludic train --json > summary.json` prints the summary alone
"""


@app.command(help=_TRAIN_HELP)
def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RECIPE] [KEY=VALUE]...", help="A built-in recipe or a YAML file, and fields to set."),
    ] = None,
    algorithm: Annotated[
        str | None, typer.Option(help="grpo, cispo, gspo, reinforce, reinforce_baseline or scalerl; with its own settings.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Folder of a run to go on with.")] = None,
    json_only: Annotated[bool, typer.Option("--json", help="Print summary.json alone on standard output.")] = False,
    print_config: Annotated[bool, typer.Option(help="Print the resolved recipe as YAML and stop.")] = False,
) -> None:
    from ludic.errors import ConfigError, LudicError
    from ludic.recipes.command import train_command

    given = [*(arguments or ()), *([f"algorithm={algorithm}"] if algorithm else ())]
    try:
        code = train_command(given, resume=resume, json_only=json_only, print_config=print_config)
    except LudicError as error:
        typer.secho(f"ludic: {error}", err=True, fg="red")
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from error
    raise typer.Exit(code)


@app.command(help="Print versions, devices, and optional extras with what each would add.")
def doctor(
    json_only: Annotated[bool, typer.Option("--json", help="Print the same as JSON.")] = False,
) -> None:
    from ludic.recipes.doctor import examine, show

    show(examine(), as_json=json_only)


@app.command(help="Print the version.")
def version() -> None:
    from importlib.metadata import version as installed

    typer.echo(installed("ludic"))


def main() -> None:
    """The entry point of the `ludic` script.

    Threads of torch that wait for one another spin for some microseconds and then sleep, unless the environment says otherwise.
    libgomp's own default spins for milliseconds: on a machine whose cores are busy, that made a step of a small model seven times
    slower, and never to spin makes it half as slow again on one that is idle.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    app(prog_name="ludic")


if __name__ == "__main__":
    main()
