"""One GRPO step of a model of 100 million parameters, with ludic and with TRL's GRPOTrainer, from
the same initial weights on the same prompts: samples per second, memory and seconds by phase.

    python -m benches.python.compare_trl_large --trl-python .venv-trl/bin/python --out docs

The model is that of `sampling_speed`: a Qwen2 with random weights, vocabulary 32,000, float32. Its
embeddings are shifted so that one token, which ends an answer, has a probability of about 1 in 64
everywhere. Prompts have 256 tokens, answers at most 128 and about 55 in the mean; each step has
`--prompts` prompts x 8 answers and one optimizer step. The reward is the length of the answer as a
share of 128, which the model raises by ending later: in a few steps, if all is right. Learning
rate, AdamW, clipping, the mean over tokens and the scale of the rewards are the same.

Each side runs in a process of its own and is measured from the start of training to its end; memory
is the peak of the process, the model's loading and the libraries included. TRL needs an environment
of its own (`pip install trl==1.16.0 -c constraints.txt`); that process imports only TRL. The script
writes comparison-large.json and comparison-large.png, and prints the tables of
benches/results/trl.md.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from benches.python.random_models import END_IDS, VOCABULARY, load_large_model, plain_words, save_large_model
from benches.python.sampling_speed import ANSWER, read_status
from benches.python.trl_grpo import grpo_config

PROMPT, GROUP, MICRO_ROWS = 256, 8, 8
SHIFT, END_LOGIT = 4.0, 6.4
"""Of the embeddings, and how far the end token's logit is above the others' mean: the probability
is about 1 in 63, since exp(6.4) / 32,000 / exp(0.55^2 / 2) = 0.0162 of the others'."""
SIDES = {"ludic": "ludic", "trl": "TRL", "trl-checkpointing": "TRL, gradient checkpointing"}
PHASES = ("sampling", "reward", "forward_backward", "optimizer", "other")


class Clock:
    """Wall and processor seconds of a side, by phase."""

    def __init__(self) -> None:
        self.phases = dict.fromkeys(PHASES, 0.0)
        self.seconds = self.processor_seconds = 0.0

    @contextmanager
    def whole(self) -> Iterator[None]:
        start, begin = time.perf_counter(), time.process_time()
        yield
        self.seconds, self.processor_seconds = time.perf_counter() - start, time.process_time() - begin

    @contextmanager
    def phase(self, name: str, *, within: str | None = None) -> Iterator[None]:
        """Add to `name`, and take it from the phase that this one is a part of."""
        start = time.perf_counter()
        yield
        spent = time.perf_counter() - start
        self.phases[name] += spent
        if within is not None:
            self.phases[within] -= spent

    def wrap(self, owner: Any, method: str, name: str, *, within: str | None = None) -> None:
        """Time each call of a method of an object or a class."""
        inner = getattr(owner, method)

        @functools.wraps(inner)
        def timed(*args: Any, **keywords: Any) -> Any:
            with self.phase(name, within=within):
                return inner(*args, **keywords)

        setattr(owner, method, timed)


class Judge:
    """The reward, which notes what it saw: it is the same object's method for both sides."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.prompts: list[str] = []
        self.rewards: list[float] = []

    def judge(self, prompts: list[str], completion_ids: list[list[int]]) -> list[float]:
        with self.clock.phase("reward", within="sampling"):
            rewards = [len(ids) / ANSWER for ids in completion_ids]
        self.prompts += list(dict.fromkeys(prompts))
        self.rewards.append(sum(rewards) / len(rewards))
        return rewards


def make_ending_model(folder: Path) -> None:
    """Save the model and its tokenizer. Every embedding is shifted in one direction u, so that the
    last hidden state has about the same part of it everywhere; the end token's more than others',
    which adds a constant to its logit."""
    import torch

    save_large_model(folder)
    model, _ = load_large_model(folder)
    embeddings = model.get_input_embeddings().weight.data
    direction = torch.randn(embeddings.shape[1], generator=torch.Generator().manual_seed(0))
    direction /= direction.norm()
    embeddings += SHIFT * direction
    tokens = torch.randint(VOCABULARY, (4, PROMPT), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        part = (model.base_model(tokens).last_hidden_state[:, PROMPT // 2 :] @ direction).mean()
    embeddings[END_IDS[0]] += END_LOGIT / part * direction
    model.generation_config.eos_token_id = END_IDS[0]
    model.save_pretrained(folder)


def draw_rows(steps: int, prompts: int) -> list[dict[str, str]]:
    """The prompts of all steps, and one that is held out."""
    random, words = Random(0), plain_words()
    return [{"prompt": " ".join(random.choices(words, k=PROMPT))} for _ in range(steps * prompts + 1)]


def train_with_ludic(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """`ludic.GRPO`, with the settings of a user who knows that the prompts are long."""
    from ludic import GRPO
    from ludic.training.trainer import Trainer

    clock = Clock()
    judge = Judge(clock)

    def length(prompts: list[str], completion_ids: list[list[int]], is_eval: bool = False) -> list[float]:
        return [0.0] * len(completion_ids) if is_eval else judge.judge(prompts, completion_ids)

    train = Trainer.train

    async def timed(self: Trainer, *args: Any, **keywords: Any) -> None:
        with clock.whole():
            await train(self, *args, **keywords)

    Trainer.train = timed  # type: ignore[method-assign]
    rows = json.loads((folder / "rows.json").read_text())
    trainer = GRPO(
        folder / "model",
        length,
        rows[:-1],
        eval_dataset=rows[-1:],
        tokenizer=str(folder / "model" / "tokenizer"),
        name="ludic",
        output=str(folder),
        steps=options["steps"],
        seed=options["seed"],
        threads=options["threads"],
        rollout={"prompts": options["prompts"], "group_size": GROUP, "temperature": 1.0},
        evaluation={"prompts": 1, "samples_per_prompt": 1},
        algorithm_args={"clip_eps_low": 0.2, "clip_eps_high": 0.28, "normalizer": "tokens"},
        trainer={
            "lr": options["lr"],
            "lr_scheduler_type": None,
            "warmup_steps": 0,
            "max_seq_len": PROMPT + ANSWER,
            "micro_token_budget": options["budget"],
            "minibatches_per_batch": 1,
            "prefix_sharing": "auto",
            "logits": options["logits"],
        },
        **{"task.args.max_new_tokens": ANSWER},
    )
    trainer.train()
    for line in (folder / "ludic" / "metrics.jsonl").read_text().splitlines():
        logged = json.loads(line)
        for name, key in (("sampling", "rollout"), ("forward_backward", "forward_backward"), ("optimizer", "optimizer")):
            clock.phases[name] += logged.get(f"perf/{key}_s", 0.0)
    return collect(clock, judge)


def train_with_trl(folder: Path, options: dict[str, Any], *, checkpointing: bool = False) -> dict[str, Any]:
    """`GRPOTrainer` with 8 rows a pass, its default, and as many passes as make the same batch."""
    import torch
    from datasets import Dataset  # type: ignore[import-untyped, unused-ignore]
    from trl import GRPOTrainer  # type: ignore[import-not-found, unused-ignore]

    torch.set_num_threads(options["threads"])
    clock = Clock()
    judge = Judge(clock)

    def length(prompts: list[str], completion_ids: list[list[int]], **_: object) -> list[float]:
        return judge.judge(prompts, completion_ids)

    rows = json.loads((folder / "order.json").read_text())
    model, tokenizer = load_large_model(folder / "model")
    passes = options["prompts"] * GROUP // MICRO_ROWS
    config = grpo_config(
        folder,
        group=GROUP,
        answer=ANSWER,
        seed=options["seed"],
        max_steps=options["steps"],
        per_device_train_batch_size=MICRO_ROWS,
        gradient_accumulation_steps=passes,
        top_k=0,
        learning_rate=options["lr"],
        lr_scheduler_type="constant",
        gradient_checkpointing=checkpointing,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=length,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    # A training step contains the sampling of its batch, and sampling the reward.
    clock.wrap(trainer, "training_step", "forward_backward")
    clock.wrap(trainer, "_prepare_inputs", "sampling", within="forward_backward")
    clock.wrap(trainer.accelerator, "clip_grad_norm_", "optimizer")
    clock.wrap(torch.optim.AdamW, "step", "optimizer")
    with clock.whole():
        trainer.train()
    return collect(clock, judge)


def collect(clock: Clock, judge: Judge) -> dict[str, Any]:
    clock.phases["other"] = clock.seconds - sum(clock.phases[name] for name in PHASES if name != "other")
    return {
        "seconds": clock.seconds,
        "processor_seconds": clock.processor_seconds,
        "phases": clock.phases,
        "peak_bytes": read_status("VmHWM"),
        "rewards": judge.rewards,
        "prompts": judge.prompts,
    }


TRAIN: dict[str, Callable[[Path, dict[str, Any]], dict[str, Any]]] = {
    "ludic": train_with_ludic,
    "trl": train_with_trl,
    "trl-checkpointing": functools.partial(train_with_trl, checkpointing=True),
}


def main() -> None:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # for both sides: waiting threads soon sleep
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", type=Path, default=Path(".venv-trl/bin/python"), help="interpreter with TRL")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=2, help="prompts of a step, each with 8 answers")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--budget", type=int, default=1024, help="micro_token_budget of ludic")
    parser.add_argument("--logits", default="auto", choices=("auto", "full", "chunked"), help="that of ludic")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sides", nargs="*", choices=SIDES, default=["ludic", "trl"], help="ludic comes first")
    parser.add_argument("--out", type=Path, default=Path("docs"))
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side is not None:
        result = TRAIN[args.side](args.folder, vars(args))
        (args.folder / f"{args.side}.json").write_text(json.dumps(result))
        return
    results = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_ending_model(folder / "model")
        rows = draw_rows(args.steps, args.prompts)
        (folder / "rows.json").write_text(json.dumps(rows))
        (folder / "order.json").write_text(json.dumps(rows[:-1]))
        for side in args.sides:
            results[side] = run_side(side, folder, args)
            order = [{"prompt": prompt} for prompt in results[side].pop("prompts")]
            (folder / "order.json").write_text(json.dumps(order))  # of ludic, which draws its own
    report(results, args)


def run_side(side: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Train one side in a process of its own, with its interpreter."""
    python = sys.executable if side == "ludic" else args.trl_python
    names = ("steps", "prompts", "lr", "budget", "logits", "seed", "threads")
    words = [f"--{name}={getattr(args, name)}" for name in names]
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    command = [python, "-m", "benches.python.compare_trl_large", "--side", side, "--folder", folder, *words]
    subprocess.run([str(word) for word in command], check=True, env=environment, stdout=sys.stderr)
    result: dict[str, Any] = json.loads((folder / f"{side}.json").read_text())
    return result


def report(results: dict[str, dict[str, Any]], args: argparse.Namespace) -> None:
    """Write the results and the curves to `args.out`, and print the tables."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "comparison-large.json").write_text(json.dumps(results, indent=1) + "\n")
    figure, axes = pyplot.subplots(figsize=(7, 3.5))
    for side, result in results.items():
        axes.plot(range(1, len(result["rewards"]) + 1), result["rewards"], marker="o", label=SIDES[side])
    axes.set(xlabel=f"step of {args.prompts} prompts x {GROUP} answers", ylabel="mean reward")
    axes.legend()
    figure.tight_layout()
    figure.savefig(args.out / "comparison-large.png", dpi=120)
    print(format_tables(results, args.steps * args.prompts * GROUP))


def format_tables(results: dict[str, dict[str, Any]], samples: int) -> str:
    lines = ["| | samples per second | processor seconds | peak memory, GB | tokens of an answer |", "|---|---|---|---|---|"]
    for side, result in results.items():
        length = ANSWER * sum(result["rewards"]) / len(result["rewards"])
        lines.append(
            f"| {SIDES[side]} | {samples / result['seconds']:.2f} | {result['processor_seconds']:.0f} | "
            f"{result['peak_bytes'] / 1e9:.2f} | {length:.1f} |"
        )
    names = " | ".join(name.replace("_", " ") for name in PHASES)
    lines += ["", f"| seconds | all | {names} |", "|---" * (2 + len(PHASES)) + "|"]
    for side, result in results.items():
        phases = " | ".join(f"{result['phases'][name]:.1f}" for name in PHASES)
        lines.append(f"| {SIDES[side]} | {result['seconds']:.1f} | {phases} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
