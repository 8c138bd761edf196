"""The options of `ludic dpo`."""

from __future__ import annotations

import typer

from ludic.cli.shared_options import JsonOnly, LearningRate, PrintConfig, Resume, Settings, make_lr_setting, refuse_flags_in
from ludic.cli.user_errors import report_user_errors

HELP = """Train a policy on preference pairs, without a reward model: DPO or IPO. Measure it on held-out pairs and by its answers.

A row of the data has `prompt`, `chosen` and `rejected`, as text or as messages. The reference is the model as it is given, or
`reference.model`; it scores every pair once. Everything is written to `runs/NAME/`: config.yaml, metrics.jsonl, summary.json,
answers.jsonl, plots, and the model in Hugging Face layout. Ctrl-C stops after the current step and saves the run.

**Examples**

- `ludic dpo` warms up a small model and trains it on generated preferences with a known best possible accuracy
- `ludic dpo model=path/to/model data=pairs.jsonl trainer.lr=5e-7 lora.rank=8` (`--print-config` lists all fields)
- `ludic dpo model=path/to/model data=pairs.jsonl loss.loss_type=ipo loss.beta=0.05` is IPO
- `ludic dpo --resume runs/NAME` resumes an interrupted run
"""


def dpo(
    arguments: Settings = None,
    resume: Resume = None,
    lr: LearningRate = None,
    json_only: JsonOnly = False,
    print_config: PrintConfig = False,
) -> None:
    from ludic.cli.dpo import dpo_command

    settings = [*(arguments or ()), *make_lr_setting(lr)]
    with report_user_errors():
        refuse_flags_in(arguments)
        code = dpo_command(settings, resume=resume, json_only=json_only, print_config=print_config)
    raise typer.Exit(code)
