"""`DPOTrainerConfig`: all settings of `DPOTrainer`, checked in the constructor."""

from __future__ import annotations

from ludic.errors import ConfigError
from ludic.training.config import TrainerConfig, config_dataclass
from ludic.training.pair_limits import check_pair_budget


@config_dataclass
class DPOTrainerConfig(TrainerConfig):
    """Settings of `DPOTrainer`: those of `TrainerConfig`, with a budget that has room for a pair.

    >>> cfg = DPOTrainerConfig(lr=1e-6, max_seq_len=1024, micro_token_budget=8192)
    """

    def validate(self) -> None:
        """Raise `ConfigError` for an invalid value or combination."""
        super().validate()
        check_pair_budget(self)
        if self.packing == "padding_free":
            raise ConfigError("packing=padding_free has no rows of pairs, and DPO compares two; use optimal or greedy")
