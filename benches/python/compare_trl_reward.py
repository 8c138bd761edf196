"""Trains a reward model of the built-in preferences with ludic's RMTrainer and with TRL's
RewardTrainer, from the same initial weights on the same pairs, with the same batch size and steps.

    python -m benches.python.compare_trl_reward --trl-python .venv-trl/bin/python --seeds 50 52

TRL is not a dependency: it needs an environment of its own (`pip install trl==1.16.0 -c
constraints.txt`). Each side trains on one thread in a process of its own; the two take turns. Both
models get the same evaluation. Seconds and memory are those of the training call, without imports
and reading. Tokens are counted by the same forward hook on both sides.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BATCH, RATE, WARMUP, FLOOR, DECAY, BETAS = 64, 3e-3, 20, 0.05, 0.01, (0.9, 0.95)
MAX_LENGTH = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", default=".venv-trl/bin/python", help="interpreter of an environment with TRL")
    parser.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "LAST"), default=(50, 52))
    parser.add_argument(
        "--settings", nargs="*", default=[], metavar="KEY=VALUE", help="settings of the pairs and the network, for ludic train-rm"
    )
    parser.add_argument("--side", choices=("ludic", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side is not None:
        prepare = {"ludic": prepare_ludic, "trl": prepare_trl}[args.side]
        metrics = measure_training(prepare, args.work / args.side, args.seeds[0])
        (args.work / f"{args.side}.json").write_text(json.dumps(metrics))
        return
    print(f"| seed | | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 2)}")
    for seed in range(args.seeds[0], args.seeds[1] + 1):
        with tempfile.TemporaryDirectory() as folder:
            for side, metrics in compare(Path(folder), seed, args).items():
                print(f"| {seed} | {side} | {' | '.join(cell(metrics) for cell in COLUMNS.values())} |", flush=True)


COLUMNS: dict[str, Callable[[dict[str, float]], str]] = {
    "held-out accuracy": lambda metrics: f"{metrics['eval_pairwise_accuracy']:.4f}",
    "ECE": lambda metrics: f"{metrics['eval_ece']:.4f}",
    "seconds: wall / CPU": lambda metrics: f"{metrics['seconds']:.1f} / {metrics['cpu_s']:.1f}",
    "pairs per second: wall / CPU": lambda metrics: (
        f"{metrics['pairs'] / metrics['seconds']:.0f} / {metrics['pairs'] / metrics['cpu_s']:.0f}"
    ),
    "tokens computed": lambda metrics: f"{metrics['computed']:,.0f}",
    "of these padding": lambda metrics: f"{1 - metrics['real'] / metrics['computed']:.1%}",
    "peak memory: whole / of training": lambda metrics: f"{metrics['peak_mb']:,.0f} / {metrics['growth_mb']:,.0f} MB",
}


def compare(work: Path, seed: int, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Train with both from one model on one file of pairs. Returns the metrics of each."""
    start = [f"seed={seed}", f"output={work}", "name=start", "steps=0", "threads=1", *args.settings]
    subprocess.run([sys.executable, "-m", "ludic.cli", "train-rm", "--json", *start], check=True, stdout=subprocess.DEVNULL)
    results = {}
    for side in ("ludic", "trl") if seed % 2 == 0 else ("trl", "ludic"):
        python = sys.executable if side == "ludic" else args.trl_python
        command = [python, __file__, "--side", side, "--work", str(work), "--seeds", str(seed), str(seed)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        results[side] = {**json.loads((work / f"{side}.json").read_text()), **evaluate(work, work / side)}
    return results


def evaluate(work: Path, model: Path) -> dict[str, float]:
    """The `eval_` metrics of a model on the held-out pairs, computed by ludic."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from ludic.training.config import TrainerConfig
    from ludic.training.evaluators.held_out import PreferenceEvaluator
    from ludic.training.samples.preference import load_preference_items

    tokenizer = AutoTokenizer.from_pretrained(work / "start" / "model")
    items = load_preference_items(str(work / "start" / "heldout.jsonl"), tokenizer)
    cfg = TrainerConfig(model_device="cpu", max_seq_len=MAX_LENGTH, micro_token_budget=4096)
    loaded = AutoModelForSequenceClassification.from_pretrained(model)
    return {f"eval_{name}": value for name, value in PreferenceEvaluator(loaded, items, cfg).measure().items()}


def measure_training(prepare: Callable[..., Callable[[], Any]], out: Path, seed: int) -> dict[str, float]:
    """Train one side and save its model to `out`. Returns seconds, tokens and memory."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    work = out.parent
    torch.set_num_threads(1)
    model = AutoModelForSequenceClassification.from_pretrained(work / "start" / "model")
    # TRL appends "<eos>" as text. Without this setting the byte tokenizer would split it into
    # bytes.
    tokenizer = AutoTokenizer.from_pretrained(work / "start" / "model", split_special_tokens=False)
    tokens = {"real": 0, "computed": 0}

    def count(_model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            tokens["real"] += int(kwargs["attention_mask"].sum())
            tokens["computed"] += kwargs["attention_mask"].numel()

    model.register_forward_pre_hook(count, with_kwargs=True)
    pairs = sum(1 for _ in (work / "start" / "data.jsonl").open())
    train = prepare(work, model, tokenizer, pairs, seed)
    memory_before, started, cpu = _peak_mb(), time.perf_counter(), time.process_time()
    train()
    seconds, cpu_s, peak = time.perf_counter() - started, time.process_time() - cpu, _peak_mb()
    model.save_pretrained(out)
    return {"seconds": seconds, "cpu_s": cpu_s, "pairs": pairs, "peak_mb": peak, "growth_mb": peak - memory_before, **tokens}


def prepare_ludic(work: Path, model: Any, tokenizer: Any, pairs: int, seed: int) -> Callable[[], None]:
    """A call that trains with RMTrainer: Bradley-Terry, one pass over the pairs."""
    from ludic.training import RMTrainer, RMTrainerConfig, make_bradley_terry
    from ludic.training.batching.pair_batches import preference_batches
    from ludic.training.samples.preference import load_preference_items

    items = load_preference_items(str(work / "start" / "data.jsonl"), tokenizer)
    cfg = RMTrainerConfig(
        model_device="cpu",
        lr=RATE,
        betas=BETAS,
        weight_decay=DECAY,
        lr_scheduler_type="cosine",
        warmup_steps=WARMUP,
        lr_min_ratio=FLOOR,
        max_seq_len=MAX_LENGTH,
        micro_token_budget=4096,
        overhead_tokens=64,
        sync_every_steps=0,
        pad_token_id=tokenizer.pad_token_id,
    )
    source = preference_batches(items, batch_size=BATCH, seed=seed)
    trainer = RMTrainer(model=model, algo=make_bradley_terry(), batch_source=source, cfg=cfg)
    return lambda: trainer.train_sync(-(-pairs // BATCH))


def prepare_trl(work: Path, model: Any, tokenizer: Any, pairs: int, seed: int) -> Callable[[], Any]:
    """A call that trains with RewardTrainer: Bradley-Terry, the same optimizer and schedule. It
    pads each batch to its longest response."""
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer

    rows = [json.loads(line) for line in (work / "start" / "data.jsonl").open()]
    data = Dataset.from_list([{name: row[name] for name in ("prompt", "chosen", "rejected")} for row in rows])
    config = RewardConfig(
        output_dir=str(work / "trl-output"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=seed,
        num_train_epochs=1,
        per_device_train_batch_size=BATCH,
        learning_rate=RATE,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        weight_decay=DECAY,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": FLOOR},
        warmup_steps=WARMUP,
        max_grad_norm=1.0,
        max_length=MAX_LENGTH,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = RewardTrainer(model=model, args=config, train_dataset=data, processing_class=tokenizer)
    return trainer.train


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
