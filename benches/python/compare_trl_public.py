"""SmolLM2-135M-Instruct learns sums with ludic and with TRL's GRPOTrainer, from the same weights on
the same problems in the same order, for the same number of answers.

    make smollm2 && .venv/bin/pip install '.[reasoning-gym]'
    python -m benches.python.compare_trl_public --trl-python .venv-trl/bin/python --output FOLDER
    python -m benches.python.compare_trl_public --output FOLDER --show --save comparison-public

The problems are `sums` of `public_models`, as one user message each; both sides call one reward
function: 1 if the last number of the text is the answer. A step is 8 problems x 8 answers of at
most 16 tokens and one optimizer step with a constant learning rate of 1e-5. Each side runs in a
process of its own, which is measured from the start of training to its end; memory is the peak of
that process, its libraries included, and for ludic the held-out measurement before training too.
ludic's held-out measurement is made of both models. A side that has finished in FOLDER is not
repeated.

TRL needs an environment of its own (`pip install trl==1.16.0 -c constraints.txt`), whose process
imports only TRL. It runs in float32, without gradient checkpointing, with `--rows` rows in a pass.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benches.python.public_models import SUM_SETTINGS, last_number
from benches.python.sampling_speed import read_status
from benches.python.trl_grpo import grpo_config

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "target" / "models" / "smollm2"
PROMPTS, GROUP, ANSWER, HELD_OUT = 8, 8, 16, 100
SIDES = {"ludic": "ludic", "trl": "TRL"}


def make_rows(count: int) -> list[dict[str, Any]]:
    """`count` different problems. The first HELD_OUT are held out."""
    import reasoning_gym  # type: ignore[import-untyped, unused-ignore]

    problems = reasoning_gym.create_dataset("chain_sum", seed=0, size=4 * count, **SUM_SETTINGS)
    answers = {problem["question"]: problem["answer"] for problem in problems}
    return [
        {"prompt": [{"role": "user", "content": question}], "answer": answer}
        for question, answer in list(answers.items())[:count]
    ]


@contextmanager
def measured(result: dict[str, Any]) -> Iterator[None]:
    start, begin = time.perf_counter(), time.process_time()
    yield
    result["seconds"], result["processor_seconds"] = time.perf_counter() - start, time.process_time() - begin
    result["peak_bytes"] = read_status("VmHWM")


def train_with_ludic(folder: Path, options: argparse.Namespace, result: dict[str, Any]) -> None:
    """`ludic.GRPO`. Writes order.json: the rows of the problems that it drew, in order."""
    from ludic.training.trainer import Trainer

    drawn: list[dict[str, Any]] = []
    train = Trainer.train

    async def timed(self: Trainer, *args: Any, **keywords: Any) -> None:
        with measured(result):
            await train(self, *args, **keywords)

    def reward(prompts: list[Any], completions: list[Any], answer: list[str], is_eval: bool = False) -> list[float]:
        if not is_eval:
            drawn.extend({"prompt": prompt, "answer": right} for prompt, right in zip(prompts, answer, strict=True))
        return last_number(completions, answer)

    Trainer.train = timed  # type: ignore[method-assign]
    summary = make_grpo(MODEL, reward, folder, options, steps=options.steps, name="ludic").train()
    result.update({key: summary[key] for key in ("before", "after", "intervals")})
    steps = [json.loads(line) for line in (folder / "ludic" / "metrics.jsonl").read_text().splitlines()]
    result["rewards"] = [step["train/avg_sampled_reward"] for step in steps if "train/avg_sampled_reward" in step]
    assert len(drawn) == options.steps * PROMPTS * GROUP
    assert all(row == drawn[index - index % GROUP] for index, row in enumerate(drawn))  # whole groups, in order
    (folder / "order.json").write_text(json.dumps(drawn[::GROUP]))


def make_grpo(model: Path, reward: Any, folder: Path, options: argparse.Namespace, **settings: Any) -> Any:
    from ludic import GRPO

    rows = make_rows(HELD_OUT + PROMPTS * options.steps)
    return GRPO(
        model,
        reward,
        rows[HELD_OUT:],
        eval_dataset=rows[:HELD_OUT],
        output=str(folder),
        seed=options.seed,
        threads=options.threads,
        rollout={"prompts": PROMPTS, "group_size": GROUP, "max_new_tokens": ANSWER, "temperature": 1.0},
        evaluation={"prompts": HELD_OUT, "samples_per_prompt": 2},
        algorithm_args={"clip_eps_low": 0.2, "clip_eps_high": 0.28, "normalizer": "tokens"},
        trainer={"lr": 1e-5, "lr_scheduler_type": None, "warmup_steps": 0, "minibatches_per_batch": 1},
        **settings,
    )


def train_with_trl(folder: Path, options: argparse.Namespace, result: dict[str, Any]) -> None:
    import torch
    from datasets import Dataset  # type: ignore[import-untyped, unused-ignore]
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOTrainer  # type: ignore[import-not-found, unused-ignore]

    torch.set_num_threads(options.threads)
    config = grpo_config(
        folder,
        group=GROUP,
        answer=ANSWER,
        seed=options.seed,
        max_steps=options.steps,
        per_device_train_batch_size=options.rows,
        gradient_accumulation_steps=PROMPTS * GROUP // options.rows,
        top_k=0,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
    )
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
        reward_funcs=last_number,
        args=config,
        train_dataset=Dataset.from_list(json.loads((folder / "order.json").read_text())),
        processing_class=tokenizer,
    )
    with measured(result):
        trainer.train()
    result["rewards"] = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    trainer.model.save_pretrained(folder / "trl" / "model")
    tokenizer.save_pretrained(folder / "trl" / "model")


def measure_trl(folder: Path, options: argparse.Namespace, result: dict[str, Any]) -> None:
    """The held-out rates of the model that TRL trained, by what measures ludic's."""
    summary = make_grpo(folder / "trl" / "model", last_number, folder, options, steps=0, name="trl-measured").train()
    trained = json.loads((folder / "trl.json").read_text())
    rates = {"after": summary["before"], "intervals": {"after": summary["intervals"]["before"]}}
    result.update({**trained, **rates})


def run_side(side: str, seed: int, options: argparse.Namespace) -> None:
    """Train one side in a process of its own, and write FOLDER/SIDE.json."""
    python = options.trl_python if side == "trl" else sys.executable
    words = [f"--{name}={getattr(options, name)}" for name in ("output", "steps", "threads", "rows")]
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    command = [str(python), "-m", "benches.python.compare_trl_public", "--side", side, "--seed", str(seed), *words]
    subprocess.run(command, check=True, env=environment, stdout=sys.stderr)


TRAIN = {"ludic": train_with_ludic, "trl": train_with_trl, "trl-measured": measure_trl}


def main() -> None:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # for both sides: waiting threads soon sleep
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", type=Path, default=Path(".venv-trl/bin/python"), help="interpreter with TRL")
    parser.add_argument("--output", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, default=8, help="per_device_train_batch_size of TRL")
    parser.add_argument("--show", action="store_true", help="run nothing")
    parser.add_argument("--save", metavar="NAME", help="write benches/results/NAME.json and docs/NAME.png")
    parser.add_argument("--side", choices=TRAIN, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        folder, result = options.output / str(options.seed), {}
        TRAIN[options.side](folder, options, result)
        (folder / f"{options.side}.json").write_text(json.dumps({"load": os.getloadavg()[0], **result}))
        return
    for seed in [] if options.show else options.seeds:
        folder = options.output / str(seed)
        folder.mkdir(parents=True, exist_ok=True)
        for side in TRAIN:
            if not (folder / f"{side}.json").is_file():
                run_side(side, seed, options)
    results = read(options.output)
    print(format_table(results))
    if options.save:
        results_folder = ROOT / "benches" / "results"
        results_folder.mkdir(exist_ok=True)
        (results_folder / f"{options.save}.json").write_text(json.dumps(results, indent=1) + "\n")
        plot(results, ROOT / "docs" / f"{options.save}.png")


def read(output: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Seed -> side -> what was measured of it, of the seeds that both sides have finished."""
    seeds = sorted(path.parent for path in output.glob("*/trl-measured.json"))
    files = {"ludic": "ludic.json", "trl": "trl-measured.json"}
    return {folder.name: {side: json.loads((folder / file).read_text()) for side, file in files.items()} for folder in seeds}


def format_table(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    lines = [
        "| | seed | sampled after | greedy after | processor seconds of a step | peak memory, GB |",
        "|---|---|---|---|---|---|",
    ]
    for side, name in SIDES.items():
        for seed, sides in results.items():
            result = sides[side]
            step = result["processor_seconds"] / len(result["rewards"])
            rates = []
            for rate in ("sampled_reward", "greedy_accuracy"):
                low, high = result["intervals"]["after"][rate]
                rates.append(f"{result['after'][rate]:.3f} ({low:.2f} to {high:.2f})")
            lines.append(f"| {name} | {seed} | {' | '.join(rates)} | {step:.1f} | {result['peak_bytes'] / 1e9:.1f} |")
    return "\n".join(lines)


def plot(results: dict[str, dict[str, dict[str, Any]]], path: Path) -> None:
    """The mean reward of each step against answers and against processor seconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_answers, by_seconds) = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, constrained_layout=True)
    for number, (side, name) in enumerate(SIDES.items()):
        for seed, sides in results.items():
            rewards = sides[side]["rewards"]
            step = sides[side]["processor_seconds"] / len(rewards)
            style = {"color": f"C{number}", "alpha": 0.7, "label": name if seed == next(iter(results)) else None}
            by_answers.plot([PROMPTS * GROUP * (i + 1) for i in range(len(rewards))], rewards, **style)
            by_seconds.plot([step * (i + 1) for i in range(len(rewards))], rewards, **style)
    by_answers.set(xlabel="sampled answers", ylabel="reward of the sampled answers", ylim=(0, 1))
    by_seconds.set(xlabel="processor seconds", xscale="log")
    by_answers.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
