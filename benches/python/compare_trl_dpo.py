"""Compares the value, the gradient and the metrics of ludic's DPO loss with those of TRL's
DPOTrainer, on the same tokens, model and reference.

    PYTHONPATH=python .venv-trl/bin/python -m benches.python.compare_trl_dpo

TRL is not a dependency: it needs an environment of its own (`pip install trl==1.16.0 -r
pyproject.toml -c constraints.txt`), into which this imports ludic from the source tree. The batch
is TRL's own; ludic packs its samples into micro-batches of pairs. Differences are the largest over
the elements, each relative to the largest element of TRL's, or to 1 if that is smaller. TRL's
`sigmoid` takes no label smoothing; its `robust` does. Both compute in float32: the last two columns
are the differences of each one's value and gradient from the equation, row by row in float64.
"""

from __future__ import annotations

import argparse
import copy
import random
import tempfile
from collections.abc import Iterator, Mapping
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
]
METRICS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected")


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
        logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    model.zero_grad()
    items = list(read_items(batch))
    exact_value, exact = exact_step(make_model(seed).double(), make_model(seed + 1000).double(), items, settings)
    value, stats, micro_batches = run_ludic(model, reference, items, settings)
    assert micro_batches > 1
    ours = gradients(model)
    metrics = max(relative(stats[f"train/{name}"], logged[name]) for name in METRICS)
    return (
        relative(value, expected.item()),
        largest_difference(ours, theirs),
        metrics,
        max(relative(value, exact_value), largest_difference(ours, exact)),
        max(relative(expected.item(), exact_value), largest_difference(theirs, exact)),
    )


def relative(value: float, other: float) -> float:
    return abs(value - other) / max(1.0, abs(other))


def largest_difference(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> float:
    """Relative to the largest element of the others, or to 1 if that is smaller."""
    scale = max(1.0, *(gradient.abs().max().item() for gradient in others.values()))
    return max((some[name] - others[name]).abs().max().item() for name in others) / scale


def exact_step(model: Any, reference: Any, items: list[Any], settings: Mapping[str, Any]) -> tuple[float, dict[str, Tensor]]:
    """The value and the gradient of the equation, each row by itself in float64, with nothing
    of ludic or TRL."""

    def log_ratio(item: Any) -> Tensor:
        ids, mask = torch.tensor([item.input_ids]), torch.tensor(item.action_mask)[1:].bool()
        policy, fixed = (
            one(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[mask, 0].sum() for one in (model, reference)
        )
        normalize = settings["loss_type"] == "ipo" or settings.get("length_normalize", False)
        return (policy - fixed.detach()) / (mask.sum() if normalize else 1)

    beta, eps = settings["beta"], settings.get("label_smoothing", 0.0)
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


def prepare_trl(folder: str, model: Any, reference: Any, settings: Mapping[str, Any], seed: int) -> tuple[Any, dict[str, Tensor]]:
    """TRL's trainer, and one of its batches."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    from ludic.models.byte_tokenizer import make_byte_tokenizer

    loss_type = "sigmoid_norm" if settings.get("length_normalize") else settings["loss_type"]
    config = DPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=PAIRS,
        beta=settings["beta"],
        loss_type=[loss_type],
        label_smoothing=settings.get("label_smoothing", 0.0),
        report_to=[],
        disable_tqdm=True,
    )
    tokenizer = make_byte_tokenizer()
    data = Dataset.from_list(list(draw_rows(seed)))
    trainer = DPOTrainer(
        model=model, ref_model=copy.deepcopy(reference), args=config, train_dataset=data, processing_class=tokenizer
    )
    return trainer, dict(next(iter(trainer.get_train_dataloader())))


def draw_rows(seed: int) -> Iterator[dict[str, str]]:
    draw = random.Random(seed)
    for number in range(PAIRS):
        chosen, rejected = ("".join(draw.choices("0123456789", k=draw.randint(1, 20))) for _ in range(2))
        yield {"prompt": f"{number}{draw.choice(['high', 'low'])}>", "chosen": chosen, "rejected": rejected + "x"}


def read_items(batch: Mapping[str, Tensor]) -> Iterator[Any]:
    """TRL's rows, all chosen ones and then all rejected ones, as ludic's samples."""
    from ludic.training import SAWItem

    half = len(batch["input_ids"]) // 2
    for row in range(2 * half):
        kept = batch["attention_mask"][row].bool()
        ids, mask = (batch[name][row][kept].tolist() for name in ("input_ids", "completion_mask"))
        meta = {"pair_id": row % half, "role": "chosen" if row < half else "rejected", "label": 1.0}
        yield SAWItem(ids, [1] * len(ids), mask, 1.0, meta)


def run_ludic(model: Any, reference: Any, items: list[Any], settings: Mapping[str, Any]) -> tuple[float, dict[str, float], int]:
    """One step with learning rate 0: its loss, statistics and number of micro-batches. The gradient
    stays in the model."""
    from ludic.training import DPOTrainer, DPOTrainerConfig, FrozenModel, make_dpo

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
    trainer = KeepsGradient(
        model=model,
        algo=make_dpo(**settings),
        batch_source=Source(),
        pairs=items,
        cfg=cfg,
        reference=FrozenModel(reference, cfg),
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
