"""The command `ludic`: train, eval, sft, train-rm, dpo, rollout, runs, view, serve, slurm,
checkpoint, status, doctor, convert, version.

Each command imports what it needs when it runs, so that `--help` is fast.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ludic import __version__
from ludic.cli.options import JsonOnly, LearningRate, PrintConfig, Resume, Settings, read_settings, report_user_errors
from ludic.runs.exit_status import find_rank
from ludic.training.presets.registry import REGISTRY


class _Commands(TyperGroup):
    """Accepts `--version` before and after the command. Commands return their exit status; None is
    0."""

    def invoke(self, ctx: Any) -> Any:
        with report_user_errors():
            code = super().invoke(ctx)
        raise typer.Exit(code or 0)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = args[: args.index("--")] if "--" in args else args  # what follows is for vLLM
        return super().parse_args(ctx, ["--version"] if "--version" in own else args)


app = typer.Typer(
    name="ludic",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Post-training of language models: reinforcement learning, reward modelling and supervised fine-tuning.",
    epilog="Start with `ludic train`: it teaches a small model to sort digits, on this machine's CPU, in under a minute.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit()


@app.callback()
def ludic(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Options before the command."""
    if (level := os.environ.get("MAXENT_GRPO_LOGLEVEL", "").upper()) in logging.getLevelNamesMapping():
        logging.basicConfig()
        logging.getLogger("ludic").setLevel(level)


ALGORITHMS = " or ".join([", ".join(sorted(REGISTRY)[:-1]), sorted(REGISTRY)[-1]])

_OF_THE_COMMAND = ("arguments", "task", "accelerator", "resume", "submit", "setup")
"""Options that are not fields of `SlurmSettings`."""
_CheckpointPath = Annotated[Path, typer.Argument(metavar="PATH", help="A run, its folder of checkpoints, or one checkpoint.")]
_AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_TRAIN_HELP = """Train a model with reinforcement learning and show what it learnt: held-out accuracy before and after, answers side by
side, and the reward curve.

Everything is written to `runs/NAME/`: config.yaml, metrics.jsonl, rollouts.jsonl, summary.json, reward.png and the model in
Hugging Face layout. Ctrl-C stops after the current step and saves the run.

**Examples**

- `ludic train` sorts digits; `ludic train addition` adds with a scratchpad
- `ludic train errand` trains the model inside an agent that calls it through a URL
- `ludic train terminal` learns to use files in a shell; `ludic train harbor data=tasks/ model=DIR` trains on tasks in Harbor's format
- `ludic train mixture` trains on two problems at once
- `ludic train shapes` learns to count shapes in pictures with a model that sees images;
  `shapes-turns` uncovers each picture in three turns first
- `ludic train tictactoe` plays against an opponent; `ludic train tools` learns to call a tool twice before it answers
- `ludic train maxent` keeps the variety of right answers; `ludic train maxent --algorithm grpo` is the same run with GRPO
- `ludic train --algorithm cispo seed=3 trainer.lr=1e-4` sets fields (`--print-config` lists them all)
- `ludic train gsm8k` trains Qwen2.5-0.5B-Instruct on GSM8K, `ludic train math` the 1.5B on MATH, `ludic train gsm8k-tools` with a
calculator, `ludic train mbpp` on programs
- `ludic train my_recipe.yaml` reads a file; its `recipe:` key names the built-in recipe it starts from
- `ludic train model=path/to/model` trains any causal model on disk, or a hub id
- `ludic train model=path/to/model data=problems.jsonl reward=rewards:exact` trains it on your prompts with the reward function `exact`
of `rewards.py`
- `ludic train inference=vllm` starts a vLLM server, samples from it and updates its weights (`inference.url=URL`: a running server)
- `ludic train --resume runs/NAME` resumes an interrupted run; with `steps=+100`, a finished one takes 100 steps more
- `ludic train --json > summary.json` prints only the summary
"""


@app.command(help=_TRAIN_HELP, context_settings={"ignore_unknown_options": True})
def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RECIPE] [KEY=VALUE]...", help="A built-in recipe or a YAML file, and fields to set."),
    ] = None,
    algorithm: Annotated[str | None, typer.Option(help=f"{ALGORITHMS}, with its default settings.")] = None,
    resume: Resume = None,
    lr: LearningRate = None,
    json_only: JsonOnly = False,
    print_config: Annotated[bool, typer.Option(help="Print the resolved recipe as YAML and stop.")] = False,
) -> int:
    from ludic.cli.train import train_command

    settings = [*read_settings(arguments, lr), *([f"algorithm={algorithm}"] if algorithm else ())]
    return train_command("train", settings, resume=resume, json_only=json_only, print_config=print_config)


_DEFAULT_PREVIEW = 3
"""Rows that `ludic sft --preview` shows."""

_SFT_HELP = """Supervised fine-tuning: a data file in, a model out.

A row of the file has `messages`, `prompt` and `completion`, or `text`; or is one of Alpaca (`instruction`, `output`) or ShareGPT
(`conversations`); or is a rollout written by `ludic rollout`. The loss covers only the assistant's tokens, and all of a `text`.
Everything is written to `runs/NAME/`: config.yaml, metrics.jsonl, summary.json, loss.png and the model in Hugging Face layout. Ctrl-C
stops after the current step and saves the run.

**Examples**

- `ludic sft` teaches a small model to sort digits, from demonstrations
- `ludic sft capybara` trains Qwen2-0.5B on the conversations of Capybara
- `ludic sft model=path/to/model data=chats.jsonl epochs=2 trainer.lr=1e-5` (`--print-config` lists all fields)
- `ludic sft model=path/to/model data=chats.jsonl --preview` shows rows with their trained tokens marked, and stops
- `ludic sft settings.yaml trainer.packing=padding_free` reads a settings file
- `ludic sft --resume runs/NAME` resumes an interrupted run
"""


class _PreviewCommand(TyperCommand):
    """Accepts `--preview` without a number."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        following = [*args, ""][1:]
        return super().parse_args(
            ctx,
            [
                f"--preview={_DEFAULT_PREVIEW}" if one == "--preview" and not next_.isdecimal() else one
                for one, next_ in zip(args, following, strict=True)
            ],
        )


@app.command(help=_SFT_HELP, cls=_PreviewCommand, context_settings={"ignore_unknown_options": True})
def sft(
    arguments: Settings = None,
    resume: Resume = None,
    lr: LearningRate = None,
    json_only: JsonOnly = False,
    print_config: PrintConfig = False,
    preview: Annotated[
        int | None,
        typer.Option(
            metavar="[N]", help=f"Show the first N rows ({_DEFAULT_PREVIEW}) with their trained tokens marked, and stop."
        ),
    ] = None,
) -> int:
    from ludic.cli.train import preview_command, train_command

    settings = read_settings(arguments, lr)
    if preview is not None:
        return preview_command(settings, rows=preview, json_only=json_only)
    return train_command("sft", settings, resume=resume, json_only=json_only, print_config=print_config)


_TRAIN_RM_HELP = """Train a reward model on preference pairs, and measure it on held-out pairs.

A row of the data has `prompt`, `chosen` and `rejected`, as text or as messages, or two responses with scores, as in SHP.
Everything is written to `runs/NAME/`: config.yaml, metrics.jsonl, summary.json, plots of calibration and margins, and the model in
Hugging Face layout, for `AutoModelForSequenceClassification`. Ctrl-C stops after the current step and saves the run.

**Examples**

- `ludic train-rm` trains a small model on generated preferences with a known best possible accuracy
- `ludic train-rm ultrafeedback` trains Qwen2-0.5B-Instruct on UltraFeedback
- `ludic train-rm model=path/to/model data=pairs.jsonl trainer.lr=1e-5 lora.rank=8` (`--print-config` lists all fields)
- `ludic train-rm --model Qwen/Qwen2.5-0.5B --hf-dataset stanfordnlp/SHP --limit 5000 --eval-split test --lora` uses flags
- `ludic train-rm --resume runs/NAME` resumes an interrupted run

**Flags**, each short for a setting: --model --tokenizer --data --hf-dataset --hf-config --hf-split --limit --steps --batch-size
--micro-token-budget --max-seq-len --lr --weight-decay --warmup-steps --lr-scheduler --beta --regularization-lambda --label-smoothing
--lora --lora-rank --lora-alpha --lora-dropout --lora-target-modules --eval-data --eval-split --eval-limit --eval-every
--early-stopping-patience --profile-memory --gradient-checkpointing --seed --output-dir
"""


@app.command("train-rm", help=_TRAIN_RM_HELP, context_settings={"ignore_unknown_options": True})
def train_rm(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RECIPE] [KEY=VALUE]... [FLAGS]...", help="A built-in recipe or a YAML file, and fields to set."),
    ] = None,
    resume: Resume = None,
    json_only: JsonOnly = False,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print the resolved settings as YAML and stop.")] = False,
) -> int:
    from ludic.cli.train import train_command

    return train_command("train-rm", arguments or (), resume=resume, json_only=json_only, print_config=print_config)


_DPO_HELP = """Train a policy on preferences, without a reward model: DPO, IPO, KTO, CPO, SimPO or ORPO. Measure held-out pairs and answers.

A row of the data has `prompt`, `chosen` and `rejected`, as text or as messages. The reference is the model as it is given, or
`reference.model`; it scores every pair once. Everything is written to `runs/NAME/`: config.yaml, metrics.jsonl, summary.json,
answers.jsonl, plots, and the model in Hugging Face layout. Ctrl-C stops after the current step and saves the run.

**Examples**

- `ludic dpo` warms up a small model and trains it on generated preferences with a known best possible accuracy
- `ludic dpo ultrafeedback` trains Qwen2-0.5B-Instruct on UltraFeedback
- `ludic dpo model=path/to/model data=pairs.jsonl trainer.lr=5e-7 lora.rank=8` (`--print-config` lists all fields)
- `ludic dpo model=path/to/model data=pairs.jsonl loss.loss_type=ipo loss.beta=0.05` is IPO
- `ludic dpo model=path/to/model data=answers.jsonl loss=kto` trains on rows with `prompt`, `completion` and `label`
- `ludic dpo --resume runs/NAME` resumes an interrupted run
"""


@app.command(help=_DPO_HELP, context_settings={"ignore_unknown_options": True})
def dpo(
    arguments: Settings = None,
    resume: Resume = None,
    lr: LearningRate = None,
    json_only: JsonOnly = False,
    print_config: PrintConfig = False,
) -> int:
    from ludic.cli.train import train_command

    settings = read_settings(arguments, lr)
    return train_command("dpo", settings, resume=resume, json_only=json_only, print_config=print_config)


_ROLLOUT_HELP = """Play episodes of a recipe's task with a model and write them to a file, with token traces. `ludic sft` reads it.

**Examples**

- `ludic rollout runs/NAME --episodes 2000 --keep "reward>0" --out good.jsonl` samples from the model of a run and keeps the successful ones
- `ludic rollout addition model=runs/NAME/model --keep "reward>=1 and scratchpad_right==1" --out textbook.jsonl`
"""


@app.command(help=_ROLLOUT_HELP)
def rollout(
    out: Annotated[Path, typer.Option(metavar="FILE", help="File for the episodes; it must not exist yet.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE | RUN] [KEY=VALUE]...",
            help="A recipe with model=DIRECTORY, or a run's folder; uses its rollout section.",
        ),
    ] = None,
    episodes: Annotated[int, typer.Option(min=1, help="Episodes to play, rounded up to groups of rollout.group_size.")] = 1024,
    keep: Annotated[
        str | None,
        typer.Option(metavar="CONDITION", help='Write only episodes with KEY > NUMBER, joined by "and". Default: all.'),
    ] = None,
    json_only: Annotated[bool, typer.Option("--json", help="Print only the counts, as JSON, on standard output.")] = False,
) -> int:
    from ludic.cli.rollout import rollout_command

    return rollout_command(arguments or (), episodes=episodes, keep=keep, out=out, json_only=json_only)


agents = typer.Typer(
    help="Agents: programs of your own that call the model through a URL (docs/agents.md).", no_args_is_help=True
)
app.add_typer(agents, name="agent")


@agents.command("try")
def try_agent(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RECIPE | RUN] [KEY=VALUE]...", help="With model=DIRECTORY and agent.function or agent.command."),
    ] = None,
    solution: Annotated[
        bool, typer.Option("--solution", help="Test the task folders of data=FOLDER by their own solutions instead.")
    ] = False,
    json_only: Annotated[bool, typer.Option("--json", help="Print only the calls, as JSON, on standard output.")] = False,
) -> int:
    """Play one episode of an agent, and show its calls: which continues which, which prompts were
    encoded again and why, and which settings were ignored.

    With `--solution` no model is needed: each task folder of `data` is tested by its own solution,
    which must earn 1, and by doing nothing, which must earn 0."""
    from ludic.cli.agent import solve_command, try_command

    return (solve_command if solution else try_command)(arguments or (), json_only=json_only)


@agents.command("serve")
def serve_agent(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[RECIPE | RUN] [KEY=VALUE]...", help="With model=DIRECTORY.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on this machine; 0 takes a free one.")] = 0,
) -> int:
    """Serve a model to a program that you start by hand. Ctrl-C ends it and shows the calls."""
    from ludic.cli.agent import serve_command

    return serve_command(arguments or (), port=port)


judges = typer.Typer(help="Judges: language models that reward answers (docs/judges.md).", no_args_is_help=True)
app.add_typer(judges, name="judge")


@judges.command("eval")
def evaluate_judge(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RECIPE | RUN] [KEY=VALUE]...", help="With data=FILE and the settings judge.*."),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Samples of each verdict; more than one needs judge.temperature.")] = 1,
    limit: Annotated[int | None, typer.Option(min=1, help="Measure this number of rows, drawn at random. Default: all.")] = None,
    json_only: Annotated[bool, typer.Option("--json", help="Print only the report, as JSON, on standard output.")] = False,
) -> int:
    """Measure a judge on labelled rows: agreement with the labels, calibration, position bias,
    agreement with itself, and whether orders in an answer change its verdict.

    A row has `prompt`, `chosen` and `rejected`, or `prompt`, `completion` and `label` (true or
    false)."""
    from ludic.cli.judge import judge_command

    return judge_command(arguments or (), samples=samples, limit=limit, json_only=json_only)


_EVAL_HELP = """Measure a model on the held-out problems of a task: accuracy (avg@k) and pass@k with confidence intervals.

Everything is written to `runs/eval-NAME/`: rollouts.jsonl, problems.jsonl, summary.json, accuracy.png and config.yaml. Failed episodes
are counted and reported; they do not count as wrong answers.

**Examples**

- `ludic eval runs/NAME` measures the model of a run on its own task
- `ludic eval gsm8k model=Qwen/Qwen2.5-0.5B-Instruct` measures a model on a benchmark: gsm8k, math-500, aime-2024, aime-2025, ifeval
- `ludic eval sort model=path/to/model k=8 temperature=0.7` samples eight answers to each problem
- `ludic eval addition model=path/to/model temperature=0` uses greedy decoding
- `ludic eval sort base_url=http://127.0.0.1:8000/v1` queries an OpenAI-compatible server (`model=` chooses one of several models)
- `ludic eval my_recipe.yaml model=path/to/model problems=100 seed=3 --json > summary.json`
- `--print-config` lists all settings
"""


@app.command("eval", help=_EVAL_HELP)
def evaluate(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[BENCHMARK | RECIPE | RUN] [KEY=VALUE]...",
            help="A benchmark, a recipe, a YAML file or a run's folder, and fields to set.",
        ),
    ] = None,
    json_only: JsonOnly = False,
    print_config: Annotated[bool, typer.Option(help="Print the resolved recipe and settings as YAML and stop.")] = False,
) -> int:
    from ludic.cli.evaluate import eval_command

    return eval_command(arguments or (), json_only=json_only, print_config=print_config)


_SERVE_HELP = """Start a vLLM server for training. Ctrl-C stops it with all its processes.

It returns token ids and the log-probabilities of the distribution that it samples from, and accepts new weights while it serves. It runs
in `--python`, else in the interpreter that `LUDIC_VLLM_PYTHON` names, else in `./.venv-vllm` (`make vllm` builds it), else in ludic's own.

**Examples**

- `ludic serve runs/NAME/model` serves on this machine's CPU or GPU, at http://127.0.0.1:8000
- `ludic serve Qwen/Qwen3-8B --weights ludic_nccl -- --tensor-parallel-size 2` passes the arguments after `--` to vLLM
- `ludic serve path/to/model --lora-rank 16 --client-tags` serves LoRA adapters, and returns each client's tag with its answer
"""


@app.command(help=_SERVE_HELP)
def serve(
    model: Annotated[str, typer.Argument(help="A folder, or a hub id.")],
    flags: Annotated[list[str] | None, typer.Argument(metavar="[-- FLAGS...]", help="vLLM's own flags.")] = None,
    host: Annotated[str, typer.Option(help="Anyone who can reach this address can replace the weights.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    name: Annotated[str | None, typer.Option(help="Name of the model in requests. Default: MODEL.")] = None,
    python: Annotated[str | None, typer.Option(metavar="PATH", help="The interpreter that has vLLM.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str | None, typer.Option(help="Default: float32 on a CPU, the model's own on a GPU.")] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, envvar="VLLM_MAX_LEN", help="Maximum tokens of prompt and answer together.")
    ] = None,
    gpu_memory_utilization: Annotated[
        float, typer.Option(min=0.01, max=1.0, envvar="VLLM_MEM_UTIL", help="Share of a GPU's memory.")
    ] = 0.7,
    logprobs_mode: Annotated[str, typer.Option(help="Which log-probabilities are returned.")] = "processed_logprobs",
    weights: Annotated[
        str, typer.Option(help="Transport of new weights: gloo, ludic_nccl, disk, none, or auto (by device).")
    ] = "auto",
    lora_rank: Annotated[int, typer.Option(min=0, help="Maximum rank of LoRA adapters; 0 serves none.")] = 0,
    client_tags: Annotated[
        bool, typer.Option(help="Return each client's tag with its answer, for servers that several clients share.")
    ] = False,
    think_limits: Annotated[
        bool, typer.Option(help="Enforce `max_think` of a request: end its thinking after that many tokens.")
    ] = False,
    batch_invariant: Annotated[
        bool, typer.Option(help="Make samples independent of the other requests in the batch, where vLLM can.")
    ] = False,
    compiled: Annotated[
        bool, typer.Option(help="Compile the model and capture CUDA graphs: slower start, faster sampling.")
    ] = False,
    ready_timeout_s: Annotated[
        float, typer.Option(min=1.0, help="Seconds until the server must have sampled its first token.")
    ] = 600.0,
) -> int:
    options = locals() | {"flags": flags or ()}
    from ludic.cli.serve import serve_command

    return serve_command(SimpleNamespace(**options))


checkpoints = typer.Typer(
    no_args_is_help=True,
    help="List the checkpoints of a run, verify them (every file has the size and the hash that it was written with), or export one.",
)
app.add_typer(checkpoints, name="checkpoint")

_SLURM_HELP = """Train in a Slurm job, with its vLLM servers if the recipe samples from vLLM.

On one node the servers have its first GPUs and training the others; on several, the servers have the last nodes, as few as
hold them. Every GPU that trains has a rank. Prints the batch script and the plan, or submits the job from the current folder,
which all nodes must see.

**Examples**

- `ludic slurm sort --gpus-per-node 0` prints the script of a job on one node without GPUs
- `ludic slurm maths.yaml --nodes 3 --dp 2 --tp 2 --time 12:00:00 --partition gpu --submit` trains on two nodes and serves on the
third, with two servers of two GPUs
- `ludic slurm --resume runs/NAME --nodes 3 --submit` resumes a run in a new job
- `ludic slurm maths.yaml --task maxent --setup 'module load cuda' --setup 'source env/bin/activate'`
"""


@app.command(help=_SLURM_HELP)
def slurm(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[RECIPE] [KEY=VALUE]...", help="As in `ludic train`.")] = None,
    task: Annotated[str | None, typer.Option(help="grpo or maxent: short for algorithm=NAME. infoseed: grpo with seeds.")] = None,
    accelerator: Annotated[
        str | None, typer.Option(help="ddp; or fsdp, zero2, zero3: sharding.kind=full, which shares out weights and optimizer.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Folder of the run to resume, with servers of the new job.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1)] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=0)] = 8,
    cpus_per_task: Annotated[int, typer.Option(min=1, help="Cores of the job on each node.")] = 8,
    data_parallel: Annotated[int, typer.Option("--dp", min=1, help="Servers.")] = 1,
    tensor_parallel: Annotated[int, typer.Option("--tp", min=1, help="GPUs of each server.")] = 1,
    time: Annotated[str, typer.Option(help="Time limit; the run is saved before it.")] = "24:00:00",
    job_name: Annotated[str | None, typer.Option(help="Default: the run's.")] = None,
    partition: Annotated[str | None, typer.Option()] = None,
    account: Annotated[str | None, typer.Option()] = None,
    exclusive: Annotated[bool, typer.Option(help="No other job on the nodes.")] = False,
    setup: Annotated[list[str] | None, typer.Option(help="A line of the script before training; may be repeated.")] = None,
    logs: Annotated[str, typer.Option(help="Folder of the logs.")] = "var/artifacts/logs",
    python: Annotated[str, typer.Option(help="The interpreter on the nodes.")] = ".venv/bin/python",
    server_port: Annotated[
        int | None, typer.Option("--server-port", "--vllm-port", help="Port of the first server. Default: by the job's number.")
    ] = None,
    group_port: Annotated[int | None, typer.Option("--group-port", "--vllm-group-port", help="Kept free.")] = None,
    master_port: Annotated[
        int | None, typer.Option(help="Port at which the ranks meet. Default: by the job's number, if no port is set.")
    ] = None,
    submit: Annotated[bool, typer.Option(help="Submit the job instead of printing it.")] = False,
) -> int:
    options = {name: value for name, value in locals().items() if name not in _OF_THE_COMMAND}
    from ludic.cli.slurm import slurm_command

    return slurm_command(
        arguments or (), task=task, accelerator=accelerator, resume=resume, submit=submit, setup=setup or (), options=options
    )


_RUNS_HELP = """List runs: how each ended, its steps, held-out rates before and after, its time, and the settings in which they differ.

**Examples**

- `ludic runs` lists the runs in `runs/`
- `ludic runs runs/a runs/b` compares two of them
- `ludic runs other/folder --json` has every rate, interval and differing setting
"""


@app.command(help=_RUNS_HELP)
def runs(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="[FOLDER]...", help="Runs, or folders with runs. Default: runs.")
    ] = None,
    json_only: _AsJson = False,
) -> int:
    from ludic.cli.runs import runs_command

    return runs_command(folders or [], json_only=json_only)


_VIEW_HELP = """Write one HTML file that shows runs: curves laid over each other, held-out rates with intervals, settings side by side,
sampled episodes turn by turn with their tokens, and a reward model's margins and calibration. It needs no network.

**Examples**

- `ludic view` shows the newest run in `runs/`
- `ludic view runs/NAME` writes `runs/NAME/report.html`
- `ludic view runs/a runs/b -o compare.html` lays two runs over each other
- `ludic view runs` shows all runs in the folder
"""


@app.command(help=_VIEW_HELP)
def view(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUN]...", help="Runs, or folders with runs. Default: the newest in runs.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Default: report.html in the run's folder, or here for several runs."),
    ] = None,
    episodes: Annotated[int, typer.Option(min=1, help="Episodes of each run to show at most.")] = 10_000,
) -> int:
    from ludic.cli.runs import view_command

    return view_command(folders or [], out=out, episodes=episodes)


@app.command(
    help="Print what the processes of a run do: role, state, restarts, last end; the last step and checkpoint; what the queue holds. "
    "The exit status is 1 if the supervisor has died."
)
def status(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    json_only: _AsJson = False,
) -> int:
    from ludic.cli.status import status_command

    return status_command(path, json_only=json_only)


_DOCTOR_HELP = """Print versions, devices, and the optional extras with what each adds; with settings of `ludic train`, or of the command
that comes first, what such a run needs of memory, whether it fits, and which settings help. No weights are loaded.

**Examples**

- `ludic doctor`
- `ludic doctor model=path/to/model trainer.max_seq_len=4096`
- `ludic doctor model=path/to/model lora.rank=16 dtype=bfloat16 --json`
- `ludic doctor gsm8k`; `ludic doctor dpo ultrafeedback`
"""


@app.command(help=_DOCTOR_HELP)
def doctor(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[train | sft | dpo | train-rm] [RECIPE] [KEY=VALUE]...", help="As in the command, by default `ludic train`."
        ),
    ] = None,
    json_only: _AsJson = False,
) -> None:
    from ludic.cli.doctor import examine, show, show_memory

    if arguments:
        show_memory(arguments, as_json=json_only)
    else:
        show(examine(), as_json=json_only)


_CONVERT_HELP = """Write a GGUF file, the format of llama.cpp, as a folder in Hugging Face layout, which every command takes as a model.
Quantised weights are dequantised.

**Examples**

- `ludic convert SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2`
- `ludic convert model.gguf models/mine --dtype bfloat16`
"""


@app.command(help=_CONVERT_HELP)
def convert(
    file: Annotated[Path, typer.Argument(metavar="FILE.gguf", help="The file, in one part.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write, which must not exist.")],
    dtype: Annotated[str, typer.Option(help="Type of the weights that are written: float32, bfloat16 or float16.")] = "float32",
) -> None:
    from ludic.models.gguf import convert_gguf
    from ludic.runs.console import quiet_libraries

    quiet_libraries()
    made = convert_gguf(file, out, dtype)
    tensors = ", ".join(f"{number} {kind}" for kind, number in made.stored_as.items())
    typer.echo(f"{out}: {made.name}, {made.parameters:,} parameters as {dtype}, from tensors stored as {tensors}")
    typer.echo(f"Licence: {made.licence or 'not named by the file'}")
    if not made.has_chat_template:
        typer.echo("It has no chat template: conversations need chat_template=FILE.jinja")


@app.command(help="Print the version.")
def version() -> None:
    typer.echo(__version__)


@checkpoints.command("list", help="Print path, time and size of each checkpoint. No file is read.")
def list_checkpoints(path: _CheckpointPath, json_only: _AsJson = False) -> int:
    from ludic.cli.checkpoint import checkpoint_command

    return checkpoint_command(path, verify=False, json_only=json_only)


@checkpoints.command("verify", help="Read every file and compare it with the manifest. The exit status is 1 if one is damaged.")
def verify_checkpoints(path: _CheckpointPath, json_only: _AsJson = False) -> int:
    from ludic.cli.checkpoint import checkpoint_command

    return checkpoint_command(path, verify=True, json_only=json_only)


@checkpoints.command(
    "export",
    help="Verify a checkpoint and write it, whole or in shards, as one folder that `from_pretrained` and vLLM open. A tensor at a "
    "time is in memory.",
)
def export_checkpoint(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, or a run that has one.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write, which must not exist.")],
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; by default as stored.")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge adapters into the model that they adapt.")] = False,
    base: Annotated[str | None, typer.Option(help="That model, if it is not where the adapters say.")] = None,
) -> int:
    from ludic.cli.checkpoint import export_command

    return export_command(checkpoint, out, dtype=dtype, merge=merge, base=base)


workers = typer.Typer(
    no_args_is_help=True,
    help="One process of a run with actors. `ludic train place.actors=2` starts them itself; on other machines you start them, "
    "with the run's folder on a shared file system.",
)
app.add_typer(workers, name="worker")
_Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of the run.")]


@workers.command(
    "actor", help="Sample for the trainer of a run until it is done. Several may, on any machine that has the folder."
)
def actor(
    run: _Run,
    name: Annotated[
        str | None, typer.Option(help="Name of this actor, of no other one. Default: machine and process id.")
    ] = None,
) -> int:
    from ludic.runs.actors.worker import run_actor_process

    return run_actor_process(run, name=name)


@workers.command("server", help="Serve the policy of a run until its trainer is done; the trainer gives it every version.")
def server(
    run: _Run,
    name: Annotated[str, typer.Option(help="Name of this server: server0, server1 and so on.")],
    host: Annotated[str, typer.Option(help="The address of this machine at which trainer and actors reach it.")] = "127.0.0.1",
) -> int:
    from ludic.runs.servers import run_server_process

    return run_server_process(run, name=name, host=host)


@workers.command(
    "trainer", help="Train a run in this process or rank, from its newest checkpoint; its actors are started elsewhere."
)
def trainer(run: _Run) -> int:
    from ludic.runs.command import RunCommand
    from ludic.runs.directory import DIRECTORIES, RunDirectory, is_run

    name = RunDirectory(run).read_progress().command if is_run(run) else RunDirectory.command
    return RunCommand(DIRECTORIES.get(name, RunDirectory), resume=run, is_placed=True).execute()


def main() -> None:
    """The entry point of the `ludic` script.

    Sets how long waiting threads of torch spin before they sleep, unless the environment sets it: a
    few microseconds. libgomp's default is milliseconds, which made a step of a small model seven
    times slower on a machine with busy cores. Not spinning at all makes it 1.5 times slower on an
    idle one.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    if find_rank() is None:
        app(prog_name="ludic")
        return
    from ludic.runs.on_ranks import ended_as_rank

    with ended_as_rank():
        app(prog_name="ludic")


if __name__ == "__main__":
    main()
