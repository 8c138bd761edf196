"""Compares the value, the gradient and the metrics of ludic's losses of preferences with
TRL's DPOTrainer, KTOTrainer, CPOTrainer and ORPOTrainer, on the same tokens, model and reference.

    PYTHONPATH=python .venv-trl/bin/python -m benches.python.compare_trl_dpo

TRL is not a dependency: it needs an environment of its own (`pip install trl==1.16.0 -r
pyproject.toml -c constraints.txt`), into which this imports ludic from the source tree. The batch
is TRL's own; ludic packs its samples into micro-batches of pairs. Differences are the largest over
the elements, each relative to the largest element of TRL's, or to 1 if that is smaller. TRL's
`sigmoid` takes no label smoothing; its `robust` does. The rows of KTO are single answers, and its
KL divergence is compared too, with the metrics. Both compute in float32: the last two columns are
the differences of each one's value and gradient from the equation, row by row in float64.
"""

from __future__ import annotations

import argparse
import copy
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from benches.python.random_models import make_qwen2
from torch import Tensor

PAIRS, BUDGET = 24, 128
CASES = [
    ("sigmoid", {"loss_type": "sigmoid", "beta": 0.1}),
    ("sigmoid, beta 1", {"loss_type": "sigmoid", "beta": 1.0}),
    ("ipo", {"loss_type": "ipo", "beta": 0.1}),
    ("ipo, beta 0.5", {"loss_type": "ipo", "beta": 0.5}),
    ("robust, eps 0.1", {"loss_type": "robust", "beta": 0.1, "label_smoothing": 0.1}),
    ("sigmoid by length", {"loss_type": "sigmoid", "beta": 2.0, "length_normalize": True}),
    ("kto", {"loss_type": "kto", "beta": 0.1}),
    ("kto, weights 1.5 and 0.5", {"loss_type": "kto", "beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.5}),
    ("cpo", {"loss_type": "cpo", "beta": 0.1, "cpo_alpha": 1.0}),
    ("cpo, eps 0.1", {"loss_type": "cpo", "beta": 0.3, "cpo_alpha": 0.5, "label_smoothing": 0.1}),
    ("simpo", {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.5, "cpo_alpha": 0.0}),
    ("simpo, alpha 0.3", {"loss_type": "simpo", "beta": 2.5, "simpo_gamma": 1.0, "cpo_alpha": 0.3}),
    ("orpo", {"loss_type": "orpo", "beta": 0.1}),
    ("orpo, beta 1", {"loss_type": "orpo", "beta": 1.0}),
]
REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
METRICS = {"dpo": (*REWARDS, "logps/chosen", "logps/rejected"), "kto": (*REWARDS[:2], "logps/chosen", "logps/rejected", "kl")}
"""Of the others REWARDS: their log-probabilities are means in TRL."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "LAST"), default=(0, 4))
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| loss | value | gradient | metrics | ludic and float64 | TRL and float64 |\n|---|---|---|---|---|---|")
    for name, settings in CASES:
        worst = np.zeros(5)
        for seed in range(options.seeds[0], options.seeds[1] + 1):
            worst = np.maximum(worst, compare(settings, seed))
        print(f"| {name} | {' | '.join(f'{difference:.1e}' for difference in worst)} |", flush=True)


def compare(settings: Mapping[str, Any], seed: int) -> tuple[float, ...]:
    """The differences of value, gradient and metrics, and of each side from float64."""
    model, reference = make_model(seed), make_model(seed + 1000)
    with tempfile.TemporaryDirectory() as folder:
        trainer, batch = prepare_trl(folder, model, reference, settings, seed)
        expected = trainer.compute_loss(model, batch)
        expected.backward()
        theirs = gradients(model)
        logged = {
            name: values[-1] for name, values in (getattr(trainer, "_metrics", None) or trainer._stored_metrics)["train"].items()
        }
    model.zero_grad()
    items = list(read_items(batch))
    exact_value, exact = exact_step(make_model(seed).double(), make_model(seed + 1000).double(), items, settings)
    value, stats, micro_batches = run_ludic(model, reference, items, settings)
    assert micro_batches > 1
    ours = gradients(model)
    metrics = max(relative(stats[f"train/{name}"], logged[name]) for name in METRICS.get(preset_of(settings), REWARDS))
    return (
        relative(value, expected.item()),
        largest_difference(ours, theirs),
        metrics,
        max(relative(value, exact_value), largest_difference(ours, exact)),
        max(relative(expected.item(), exact_value), largest_difference(theirs, exact)),
    )


def preset_of(settings: Mapping[str, Any]) -> str:
    """The trainer of TRL: dpo, or the loss's own."""
    return settings["loss_type"] if settings["loss_type"] in ("kto", "cpo", "simpo", "orpo") else "dpo"


def relative(value: float, other: float) -> float:
    return abs(value - other) / max(1.0, abs(other))


def largest_difference(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> float:
    """Relative to the largest element of the others, or to 1 if that is smaller."""
    scale = max(1.0, *(gradient.abs().max().item() for gradient in others.values()))
    return max((some[name] - others[name]).abs().max().item() for name in others) / scale


def exact_step(model: Any, reference: Any, items: list[Any], settings: Mapping[str, Any]) -> tuple[float, dict[str, Tensor]]:
    """The value and the gradient of the equation, each row by itself in float64, with nothing
    of ludic or TRL."""

    def logps(item: Any, one: Any) -> Tensor:
        ids = torch.tensor([item.input_ids])
        return one(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]

    def log_ratio(item: Any) -> Tensor:
        mask = torch.tensor(item.action_mask)[1:].bool()
        policy, fixed = (logps(item, one)[mask].sum() for one in (model, reference))
        normalize = settings["loss_type"] == "ipo" or settings.get("length_normalize", False)
        return (policy - fixed.detach()) / (mask.sum() if normalize else 1)

    beta, eps = settings["beta"], settings.get("label_smoothing", 0.0)
    if preset_of(settings) != "dpo":
        loss = (
            exact_kto(items, log_ratio, settings) if settings["loss_type"] == "kto" else exact_free(items, model, logps, settings)
        )
        loss.backward()
        return loss.item(), gradients(model)
    half, value = len(items) // 2, 0.0
    for chosen, rejected in zip(items[:half], items[half:], strict=True):
        h = log_ratio(chosen) - log_ratio(rejected)
        if settings["loss_type"] == "ipo":
            loss = (h - 1 / (2 * beta)) ** 2
        else:
            right, wrong = (torch.log1p(torch.exp(-sign * beta * h)) for sign in (1, -1))
            loss = ((1 - eps) * right - eps * wrong) / (1 - 2 * eps)
        (loss / half).backward()
        value += loss.item() / half
    return value, gradients(model)


def exact_kto(items: list[Any], log_ratio: Callable[[Any], Tensor], settings: Mapping[str, Any]) -> Tensor:
    from ludic.training import SAWItem

    pairs = zip(items, [items[-1], *items[:-1]], strict=True)
    ratios = []
    for own, other in pairs:
        a, b = own.action_mask.index(1), other.action_mask.index(1)
        ids, mask = own.input_ids[:a] + other.input_ids[b:], own.action_mask[:a] + other.action_mask[b:]
        ratios.append(log_ratio(SAWItem(ids, [1] * len(ids), mask, 1.0, {})).detach())
    kl, losses = max(0.0, sum(float(ratio) for ratio in ratios) / len(ratios)), []
    for item in items:
        wanted = item.meta["role"] == "chosen"
        weight = settings.get("desirable_weight" if wanted else "undesirable_weight", 1.0)
        losses.append(weight * (1 - torch.sigmoid(settings["beta"] * (log_ratio(item) - kl) * (1 if wanted else -1))))
    return torch.stack(losses).mean()


def exact_free(items: list[Any], model: Any, logps: Callable[[Any, Any], Tensor], settings: Mapping[str, Any]) -> Tensor:
    beta, eps, gamma, half = (
        settings["beta"],
        settings.get("label_smoothing", 0.0),
        settings.get("simpo_gamma", 0.0),
        len(items) // 2,
    )
    orpo, losses, nll = settings["loss_type"] == "orpo", [], []
    for chosen, rejected in zip(items[:half], items[half:], strict=True):
        each = [logps(item, model)[torch.tensor(item.action_mask)[1:].bool()] for item in (chosen, rejected)]
        nll.append(-(logps(chosen, model) if orpo else each[0]))
        c, r = (one.sum() if settings["loss_type"] == "cpo" else one.mean() for one in each)
        if orpo:
            losses.append(beta * torch.log1p(torch.exp(-(c - r - torch.log(1 - c.exp()) + torch.log(1 - r.exp())))))
        else:
            z = beta * (c - r) - gamma
            losses.append((1 - eps) * torch.log1p(torch.exp(-z)) + eps * torch.log1p(torch.exp(z)))
    return torch.stack(losses).mean() + (1.0 if orpo else settings["cpo_alpha"]) * torch.cat(nll).mean()


def prepare_trl(folder: str, model: Any, reference: Any, settings: Mapping[str, Any], seed: int) -> tuple[Any, dict[str, Tensor]]:
    """TRL's trainer, and one of its batches."""
    import trl
    from datasets import Dataset
    from trl.experimental import cpo, orpo

    from ludic.models.byte_tokenizer import make_byte_tokenizer

    preset = preset_of(settings)
    own = {name: value for name, value in settings.items() if name not in ("loss_type", "length_normalize")}
    if preset == "dpo":
        own["loss_type"] = ["sigmoid_norm" if settings.get("length_normalize") else settings["loss_type"]]
    if preset == "simpo":
        own["loss_type"] = "simpo"
    make_config, make_trainer = {
        "dpo": (trl.DPOConfig, trl.DPOTrainer),
        "kto": (trl.KTOConfig, trl.KTOTrainer),
        "orpo": (orpo.ORPOConfig, orpo.ORPOTrainer),
    }.get(preset, (cpo.CPOConfig, cpo.CPOTrainer))
    config = make_config(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=PAIRS,
        report_to=[],
        disable_tqdm=True,
        **own,
    )
    data = Dataset.from_list(list(draw_rows(seed)))
    if preset == "kto":
        kinds = random.Random(seed).choices(("chosen", "chosen", "rejected"), k=PAIRS)
        data = Dataset.from_list(
            [
                {"prompt": row["prompt"], "completion": row[kind], "label": kind == "chosen"}
                for row, kind in zip(data, kinds, strict=True)
            ]
        )
    with_reference = {"ref_model": copy.deepcopy(reference)} if preset in ("dpo", "kto") else {}
    tokenizer = make_byte_tokenizer()
    trainer = make_trainer(model=model, args=config, train_dataset=data, processing_class=tokenizer, **with_reference)
    return trainer, dict(next(iter(trainer.get_train_dataloader())))


def draw_rows(seed: int) -> Iterator[dict[str, str]]:
    draw = random.Random(seed)
    for number in range(PAIRS):
        chosen, rejected = ("".join(draw.choices("0123456789", k=draw.randint(1, 20))) for _ in range(2))
        yield {"prompt": f"{number}{draw.choice(['high', 'low'])}>", "chosen": chosen, "rejected": rejected + "x"}


def read_items(batch: Mapping[str, Tensor]) -> Iterator[Any]:
    """TRL's rows as ludic's samples: of pairs all chosen ones and then all rejected ones."""
    from ludic.training import SAWItem

    def make(prefix: str, row: int, role: str, pair: int) -> Any:
        kept = batch[f"{prefix}attention_mask"][row].bool()
        ids = batch[f"{prefix}input_ids"][row][kept].tolist()
        masked = batch[f"{prefix}labels"][row] != -100 if f"{prefix}labels" in batch else batch["completion_mask"][row]
        return SAWItem(ids, [1] * len(ids), masked[kept].int().tolist(), 1.0, {"pair_id": pair, "role": role, "label": 1.0})

    if "label" in batch:
        for row, wanted in enumerate(batch["label"]):
            yield make("", row, "chosen" if wanted else "rejected", row)
    elif "chosen_input_ids" in batch:
        for role in ("chosen", "rejected"):
            yield from (make(f"{role}_", row, role, row) for row in range(len(batch["chosen_input_ids"])))
    else:
        half = len(batch["input_ids"]) // 2
        for row in range(2 * half):
            yield make("", row, "chosen" if row < half else "rejected", row % half)


def run_ludic(model: Any, reference: Any, items: list[Any], settings: Mapping[str, Any]) -> tuple[float, dict[str, float], int]:
    """One step with learning rate 0: its loss, statistics and number of micro-batches. The gradient
    stays in the model."""
    from ludic.training import DPOTrainer, DPOTrainerConfig, FrozenModel, make_dpo, make_kto

    class Source:
        async def next_batch(self) -> Any:
            from ludic.training import SAWBatch

            return SAWBatch(items)

    class KeepsGradient(DPOTrainer):
        def initialize_optimizer(self) -> torch.optim.Optimizer:
            optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
            optimizer.register_step_pre_hook(lambda *_: kept.update(gradients(self.model)))
            return optimizer

    kept: dict[str, Tensor] = {}
    cfg = DPOTrainerConfig(
        model_device="cpu", max_seq_len=64, micro_token_budget=BUDGET, max_grad_norm=None, sync_every_steps=0, lr=0.0
    )
    own = {name: value for name, value in settings.items() if settings["loss_type"] != "kto" or name != "loss_type"}
    algorithm = make_kto(**own) if settings["loss_type"] == "kto" else make_dpo(**own)
    trainer = KeepsGradient(
        model=model,
        algo=algorithm,
        batch_source=Source(),
        pairs=items,
        cfg=cfg,
        reference=FrozenModel(reference, cfg) if algorithm.reads_reference else None,
    )
    stats = trainer.train_step_sync()
    for name, parameter in model.named_parameters():
        parameter.grad = kept[name]
    return stats["train/loss"], stats, int(stats["perf/micro_batches"])


def make_model(seed: int) -> Any:
    from ludic.models.byte_tokenizer import VOCAB_SIZE

    sizes = {"width": 32, "inner": 64, "layers": 2, "heads": 2, "key_value_heads": 1, "max_position_embeddings": 128}
    return make_qwen2(VOCAB_SIZE, **sizes, seed=seed, tie_word_embeddings=True, initializer_range=0.1)


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


if __name__ == "__main__":
    main()
