"""Post-training of language models: reinforcement learning, reward modelling and supervised
fine-tuning.

>>> from ludic import GRPO
>>> GRPO("path/to/model", reward, rows, steps=100).train()
"""

from typing import TYPE_CHECKING, Any

from ludic.importing import install_finder

if TYPE_CHECKING:
    from ludic.trainers import DPO, GRPO, PPO, SFT, Judge, RewardModel

__all__ = ["DPO", "GRPO", "PPO", "SFT", "Judge", "RewardModel"]
__version__ = "0.1.0"
"""The version in Cargo.toml. The extension refuses to be imported by another one."""

install_finder()


def __getattr__(name: str) -> Any:
    """Import an object when it is first read: the servers of a run import this package too."""
    if name not in __all__:
        raise AttributeError(f"module 'ludic' has no attribute {name!r}")
    from ludic import trainers

    return getattr(trainers, name)
