"""Folders as runs leave them, with any content, for what reads them."""

import json
from pathlib import Path
from typing import Any

from ludic.training.rollouts.log import append_rollouts
from ludic.types import Rollout, Step, TokenTrace

SETTINGS = "recipe: sort\nname: {name}\noutput: runs\nalgorithm: {algorithm}\nmodel: null\nsteps: 4\ntrainer:\n  lr: {lr}\n"


def make_run(folder: Path, *, command: str = "train", algorithm: str = "grpo", lr: float | str = 0.1, **progress: Any) -> Path:
    """A finished run with two steps in metrics.jsonl, and held-out rates."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(SETTINGS.format(name=json.dumps(folder.name), algorithm=algorithm, lr=lr))
    phase = {"train": "reinforce", "sft": "sft", "train-rm": "rm", "dpo": "dpo"}[command]
    state = {"phase": "done", "command": command, "steps": 4, "seconds": {"wall": 61.5}, **progress}
    (folder / "progress.json").write_text(json.dumps(state))
    lines = [
        {"step": step, "phase": phase, "train/loss": 1.0 / step, "train/avg_sampled_reward": step / 4} for step in (1, 2, 3, 4)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = {
        "status": "finished",
        "algorithm": algorithm,
        "before": {"sampled_reward": 0.25},
        "after": {"sampled_reward": 0.75},
        "intervals": {"before": {"sampled_reward": [0.2, 0.3]}, "after": {"sampled_reward": [0.7, 0.8]}},
        "heldout": {"problems": 10, "answers": 40},
        "solved_at": 1.0,
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def make_rollout(
    number: int, *, prompt: str = "2+2=", answer: str = "4", reward: float = 1.0, finish: str = "stop", group: str | None = None
) -> Rollout:
    """An episode of one turn with a token for each character of the answer, of log-probability
    -0.5."""
    trace = TokenTrace([7], [ord(letter) % 1000 for letter in answer], [-0.5] * len(answer), finish)
    step = Step(0, prompt, answer, None, reward, False, True, {"finish_reason": finish}, trace)
    request = {} if group is None else {"group_id": group}
    meta = {"problem_id": f"p{number}", "policy_version": number, "engine": {"credit": [reward - 0.5]}, "request_meta": request}
    return Rollout(f"r{number}", [step], meta)


def log_rollouts(run: Path, rollouts: list[Rollout]) -> None:
    append_rollouts(run / "rollouts.jsonl", rollouts)
