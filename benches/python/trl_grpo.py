"""The settings of TRL's GRPOTrainer that benchmarks compare with. Imports only TRL."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def grpo_config(folder: Path, *, group: int, answer: int, **settings: Any) -> Any:
    """GRPO in float32 on a CPU as ludic's, with `group` answers of at most `answer` tokens to a
    prompt: a mean over tokens (`dapo`), the same clip range, temperature and optimizer. Every
    step is logged and nothing is saved. `settings` are others of `GRPOConfig`, or replace these."""
    from trl import GRPOConfig  # type: ignore[import-not-found, unused-ignore]

    common: dict[str, Any] = {
        "output_dir": str(folder / "trl"),
        "use_cpu": True,
        "bf16": False,
        "num_generations": group,
        "max_completion_length": answer,
        "temperature": 1.0,
        "adam_beta2": 0.99,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "beta": 0.0,
        "loss_type": "dapo",
        "shuffle_dataset": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "gradient_checkpointing": False,
    }
    return GRPOConfig(**common | settings)
