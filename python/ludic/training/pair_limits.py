"""What a micro-batch must have room for if it is made of whole pairs."""

from __future__ import annotations

from ludic.errors import BudgetError
from ludic.training.config import TrainerConfig


def check_pair_budget(cfg: TrainerConfig) -> None:
    """Raise `BudgetError` unless two rows of `max_seq_len` tokens fit into the budget."""
    if cfg.micro_token_budget < 2 * cfg.max_seq_len:
        raise BudgetError(
            f"micro_token_budget ({cfg.micro_token_budget}) must be >= 2 * max_seq_len ({cfg.max_seq_len}): a pair has two rows; "
            "raise the budget or lower max_seq_len"
        )
