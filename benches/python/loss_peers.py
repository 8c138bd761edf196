"""Compares the losses of `ludic.rollouts.training.rl_losses` with the code of TRL and verl: values
and gradients on random batches, in float64.

    python -m benches.python.loss_peers --python .venv-peers/bin/python

TRL and verl are not dependencies; they need an environment of their own:

    uv venv .venv-peers
    uv pip install --python .venv-peers/bin/python --no-deps verl==0.9.1
    uv pip install --python .venv-peers/bin/python -c constraints.txt trl==1.16.0 \\
        tensordict omegaconf hydra-core ray codetiming orjson

This process draws the batches and computes ludic's side. A second process, with that interpreter,
runs this file with `--peer-work` and computes the other side with `GRPOTrainer._compute_loss` and
`verl.trainer.ppo.core_algos`; it does not import ludic.

A batch is [B, T]: rows of different lengths, prompts of different lengths, gaps in the action mask.
Its numbers are exact in float32, so that casts change nothing. In the last two lines one row has no
action token. verl leaves such a row out of a mean over rows, TRL and ludic count it; so ludic's
loss is multiplied by B / (B - 1) before it is compared with verl's.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

B, T, V = 4, 9, 13
CLIPS = [(0.2, 0.2, None), (0.2, 0.28, None), (0.1, 0.3, 1.5)]
AGGREGATIONS = ["token", "sequence", "constant"]
LIMIT = 1e-6
Case = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=".venv-peers/bin/python", help="interpreter of an environment with TRL and verl")
    parser.add_argument("--batches", type=int, default=50)
    parser.add_argument("--record", type=Path, help="write what the peers compute on the first two batches to this file")
    parser.add_argument("--peer-work", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer_work is not None:
        compute_peers(args.peer_work)
        return 0
    if not Path(args.python).exists():
        parser.error(f"--python {args.python} does not exist; make it with\n\n{__doc__.split('own:')[1].split('This')[0]}")
    with tempfile.TemporaryDirectory() as folder:
        theirs = ask_peers(Path(folder), args.python, args.batches)
    differences = compare(theirs, args.batches)
    if args.record is not None:
        args.record.write_text(json.dumps(digest(theirs), indent=0) + "\n")
    print(format_table(differences, args.batches))
    worst = max(difference for per_peer in differences.values() for difference in per_peer.values())
    return 0 if worst <= LIMIT else 1


def all_cases() -> list[Case]:
    """What is compared. Both libraries compute every case, but for the entropy bonus, which TRL
    always takes as a mean over tokens."""
    plain = [
        {"loss": "ppo", "aggregation": how, "low": low, "high": high, "dual": dual, "advantages": shape}
        for how in AGGREGATIONS
        for low, high, dual in CLIPS
        for shape in ("[B]", "[B, T]")
    ]
    penalties = [{**case, "kl": 0.3} for case in plain if case["dual"] is None and case["high"] > case["low"]]
    bonus = [{**case, "kl": 0.0, "entropy": 0.1} for case in penalties]
    ratio_per_row = [
        {"loss": "gspo", "aggregation": "sequence", "low": low, "high": high, "dual": None, "advantages": "[B]"}
        for low, high in ((3e-4, 4e-4), (0.2, 0.28))
    ]
    grpo = [{"loss": "grpo", "aggregation": "sequence", "advantages": shape} for shape in ("[B]", "[B, T]")]
    empty_row = [{**case, "empty_row": True} for case in plain if case["dual"] is not None]
    defaults = {"kl": 0.0, "entropy": 0.0, "empty_row": False}
    return [{**defaults, **case} for case in (*plain, *penalties, *bonus, *ratio_per_row, *grpo, *empty_row)]


def name_of(case: Case) -> str:
    """The row of the table that a case belongs to."""
    if case["loss"] == "grpo":
        return "`grpo_loss`"
    if case["loss"] == "gspo":
        return "`ppo_loss`, a ratio per row (GSPO)"
    if case["empty_row"]:
        return (
            f"`ppo_loss`, {'mean over tokens' if case['aggregation'] == 'token' else 'means over rows'}, one row without actions"
        )
    if case["kl"] or case["entropy"]:
        return f"`ppo_loss`, {case['aggregation']}, {'KL penalty' if case['kl'] else 'entropy bonus'}"
    clip = "dual clip" if case["dual"] else "symmetric" if case["low"] == case["high"] else "asymmetric"
    return f"`ppo_loss`, {case['aggregation']}, {clip}"


def draw_batch(seed: int) -> dict[str, Tensor]:
    """A batch of float64 tensors whose values are exact in float32; every row has an action."""
    draw = random.Random(seed)

    def normal(*shape: int) -> Tensor:
        return torch.tensor([draw.gauss(0, 1) for _ in range(math.prod(shape))], dtype=torch.float64).reshape(shape)

    mask = torch.zeros(B, T, dtype=torch.float64)
    for row in mask:
        prompt, length = draw.randint(1, 3), draw.randint(4, T)
        row[prompt:length] = torch.tensor([1.0, *(float(draw.random() < 0.8) for _ in range(prompt + 1, length))])
    labels = torch.tensor([[draw.randrange(V) for _ in range(T)] for _ in range(B)])
    logits = _round(normal(B, T, V))
    logp = torch.nn.functional.pad(logits[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:, None])[..., 0], (1, 0))
    floats = {"old": logp + 0.5 * normal(B, T), "ref": logp + 0.3 * normal(B, T), "[B]": normal(B), "[B, T]": normal(B, T)}
    return {"labels": labels, "logits": logits, "mask": mask, **{name: _round(values) for name, values in floats.items()}}


def _round(values: Tensor) -> Tensor:
    return values.float().double()


def batch_of(case: Case, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch, or with `empty_row` one whose first row has no action token."""
    return {**batch, "mask": batch["mask"] * (torch.arange(B) > 0)[:, None]} if case["empty_row"] else batch


# ---- ludic


def compute_own(case: Case, batch: dict[str, Tensor], logits: Tensor) -> Tensor:
    from ludic.rollouts.training.rl_losses import grpo_loss, ppo_loss

    arguments = logits, batch["labels"], batch["mask"], batch[case["advantages"]]
    if case["loss"] == "grpo":
        return grpo_loss(*arguments)
    old = batch["old"]
    if case["loss"] == "gspo":  # the means over the action tokens
        mask = batch["mask"][:, 1:]
        old = (old[:, 1:] * mask).sum(1) / mask.sum(1)
    loss: Tensor = ppo_loss(
        *arguments,
        old,
        clip_low=case["low"],
        clip_high=case["high"],
        dual_clip=case["dual"],
        aggregation=case["aggregation"],
        ref_log_probs=batch["ref"],
        kl_coef=case["kl"],
        entropy_coef=case["entropy"],
    )
    return loss


def ask_peers(work: Path, python: str, batches: int) -> dict[str, Tensor]:
    """What the peers compute: `PEER CASE SEED value` and `... gradient`."""
    save_file({f"{seed} {name}": v for seed in range(batches) for name, v in draw_batch(seed).items()}, work / "batches")
    (work / "cases.json").write_text(json.dumps(all_cases()))
    subprocess.run([python, __file__, "--peer-work", str(work)], check=True)
    return load_file(work / "peers")


def compare(theirs: dict[str, Tensor], batches: int) -> dict[str, dict[str, float]]:
    """The largest difference by row of the table and peer: |own - theirs| / max(1, |theirs|), over
    the value and the elements of the gradient of all batches."""
    differences: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for number, case in enumerate(all_cases()):
        for seed in range(batches):
            own = value_and_gradient(compute_own, case, draw_batch(seed))
            for peer in PEERS:
                for part, values in own.items():
                    expected = theirs.get(f"{peer} {number} {seed} {part}")
                    if expected is None:
                        continue
                    scale = max(1.0, float(expected.abs().max()))
                    difference = values * rows_of_peer(case, peer) - expected
                    row = differences[name_of(case)]
                    row[peer] = max(row[peer], float(difference.abs().max()) / scale)
    return differences


def digest(values: dict[str, Tensor]) -> dict[str, float]:
    """One number for each tensor of the first two batches: the sum of its elements times 1, 1/2,
    1/3 and so on, so that each counts differently."""
    kept = {name: each.reshape(-1) for name, each in values.items() if int(name.split(" ")[2]) < 2}
    return {name: float((each / torch.arange(1, len(each) + 1)).sum()) for name, each in sorted(kept.items())}


def rows_of_peer(case: Case, peer: str) -> float:
    """Rows that ludic's mean has over those that the peer's has."""
    return B / (B - 1) if case["empty_row"] and peer == "verl" and case["aggregation"] != "token" else 1.0


def value_and_gradient(compute: Any, case: Case, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    logits = batch["logits"].clone().requires_grad_()
    value = compute(case, batch_of(case, batch), logits)
    return {"value": value.detach().clone(), "gradient": torch.autograd.grad(value, logits)[0]}


def format_table(differences: dict[str, dict[str, float]], batches: int) -> str:
    lines = [f"{batches} batches of [{B}, {T}], vocabulary {V}, float64", "", f"| loss | {' | '.join(PEERS)} |", "|---|---|---|"]
    for name, row in differences.items():
        cells = [f"{row[peer]:.1e}" if peer in row else "other definition" for peer in PEERS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


# ---- the peers: nothing below imports ludic


def compute_peers(work: Path) -> None:
    """Compute all cases of `work` with TRL and verl."""
    batches: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for key, values in load_file(work / "batches").items():
        seed, name = key.split(" ", 1)
        batches[int(seed)][name] = values
    results = {}
    for number, case in enumerate(json.loads((work / "cases.json").read_text())):
        for seed, batch in batches.items():
            for peer, compute in PEERS.items():
                if peer == "TRL" and case["entropy"] and case["aggregation"] != "token":
                    continue
                pair = value_and_gradient(compute, case, batch)
                if peer == "TRL" and case["loss"] == "grpo":
                    del pair["value"]  # -A at a ratio of 1: the same gradient, another value
                results |= {f"{peer} {number} {seed} {part}": values for part, values in pair.items()}
    save_file(results, work / "peers")


def compute_trl(case: Case, batch: dict[str, Tensor], logits: Tensor) -> Tensor:
    """`GRPOTrainer._compute_loss` with the attributes that it reads, and logits instead of a
    model."""
    from trl import GRPOTrainer
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    ids = batch["labels"][:, 1:]
    advantages = batch[case["advantages"]]
    clip = {"low": 0.2, "high": 0.2, "dual": None, **case}
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            selective_log_softmax(logits[:, :-1], ids),
            entropy_from_logits(logits[:, :-1]),
            None,
        ),
        args=SimpleNamespace(delta=clip["dual"], use_bias_correction_kl=False, steps_per_generation=1),
        loss_type={"token": "dapo", "sequence": "grpo", "constant": "dr_grpo"}[case["aggregation"]],
        importance_sampling_level="sequence" if case["loss"] == "gspo" else "token",
        epsilon_low=clip["low"],
        epsilon_high=clip["high"],
        beta=case["kl"],
        entropy_coef=case["entropy"],
        _entropy_bonus_enabled=case["entropy"] != 0,
        use_adaptive_entropy=False,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=1,  # a sum over the tokens
        accelerator=SimpleNamespace(
            num_processes=1, sync_gradients=True, gather=lambda values: values, reduce=lambda values, reduction: values
        ),
        _metrics={"train": defaultdict(list)},
    )
    inputs = {
        "prompt_ids": batch["labels"][:, :1],
        "prompt_mask": torch.ones_like(batch["labels"][:, :1]),
        "completion_ids": ids,
        "completion_mask": batch["mask"][:, 1:],
        "advantages": advantages if advantages.ndim == 1 else advantages[:, 1:],
        "old_per_token_logps": None if case["loss"] == "grpo" else batch["old"][:, 1:],
        "ref_per_token_logps": batch["ref"][:, 1:],
        "num_items_in_batch": batch["mask"][:, 1:].sum(),
    }
    loss: Tensor = GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss


def compute_verl(case: Case, batch: dict[str, Tensor], logits: Tensor) -> Tensor:
    """The policy loss, entropy and KL term of `verl.trainer.ppo.core_algos`, added up as
    `verl.workers.utils.losses.ppo_loss` does."""
    from verl.trainer.ppo.core_algos import agg_loss, compute_entropy_loss, get_policy_loss_fn, kl_penalty
    from verl.utils.torch_functional import logprobs_from_logits
    from verl.workers.config import ActorConfig

    clip = {"low": 0.2, "high": 0.2, "dual": None, **case}
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=clip["low"],
        clip_ratio_high=clip["high"],
        clip_ratio_c=clip["dual"] or 1e9,  # on at 3 by default
    )
    how = {"token": "token-mean", "sequence": "seq-mean-token-mean", "constant": "seq-mean-token-sum"}[case["aggregation"]]
    mask, advantages = batch["mask"][:, 1:], batch[case["advantages"]]
    advantages = advantages[:, None].expand_as(mask) if advantages.ndim == 1 else advantages[:, 1:]
    logp = logprobs_from_logits(logits[:, :-1], batch["labels"][:, 1:])
    kind = {"ppo": "vanilla", "gspo": "gspo", "grpo": "gpg"}[case["loss"]]
    loss: Tensor = get_policy_loss_fn(kind)(batch["old"][:, 1:], logp, advantages, mask, how, config)[0]
    if case["entropy"]:
        loss = loss - case["entropy"] * compute_entropy_loss(logits[:, :-1], mask, how)
    if case["kl"]:
        loss = loss + case["kl"] * agg_loss(kl_penalty(logp, batch["ref"][:, 1:], "low_var_kl"), mask, how)
    return loss


PEERS = {"TRL": compute_trl, "verl": compute_verl}


if __name__ == "__main__":
    sys.exit(main())
