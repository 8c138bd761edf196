"""Known algorithms by name: each function builds the credit assigner, the loss and the
preprocessing of one.

`correction` is for samples of another engine or an older policy: an object of `loss.correction`, or
its name (truncated, masked, icepop).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ludic.training.algorithm import RLAlgorithm
from ludic.training.presets.clipped_weights import make_cispo, make_scalerl
from ludic.training.presets.group_relative import make_dapo, make_dr_grpo, make_gmpo, make_grpo, make_gspo, make_sapo
from ludic.training.presets.policy_gradient import make_reinforce, make_reinforce_baseline, make_reinforce_plus_plus, make_rloo
from ludic.training.presets.reward_models import make_bradley_terry, make_grpo_with_rm, make_scalerl_with_rm
from ludic.training.presets.supervised import make_sft

__all__ = [
    "REGISTRY",
    "Preset",
    "make_bradley_terry",
    "make_cispo",
    "make_dapo",
    "make_dr_grpo",
    "make_gmpo",
    "make_grpo",
    "make_grpo_with_rm",
    "make_gspo",
    "make_reinforce",
    "make_reinforce_baseline",
    "make_reinforce_plus_plus",
    "make_rloo",
    "make_sapo",
    "make_scalerl",
    "make_scalerl_with_rm",
    "make_sft",
]


@dataclass(frozen=True)
class Preset:
    """An algorithm of reinforcement that a recipe can name."""

    make: Callable[..., RLAlgorithm]
    paper: str
    """Where it comes from: an arXiv id, or author and year."""


REGISTRY: dict[str, Preset] = {
    "cispo": Preset(make_cispo, "arXiv:2506.13585"),
    "dapo": Preset(make_dapo, "arXiv:2503.14476"),
    "dr_grpo": Preset(make_dr_grpo, "arXiv:2503.20783"),
    "gmpo": Preset(make_gmpo, "arXiv:2507.20673"),
    "grpo": Preset(make_grpo, "arXiv:2402.03300"),
    "gspo": Preset(make_gspo, "arXiv:2507.18071"),
    "reinforce": Preset(make_reinforce, "Williams 1992"),
    "reinforce_baseline": Preset(make_reinforce_baseline, "Williams 1992"),
    "reinforce_plus_plus": Preset(make_reinforce_plus_plus, "arXiv:2501.03262"),
    "rloo": Preset(make_rloo, "arXiv:2402.14740"),
    "sapo": Preset(make_sapo, "arXiv:2511.20347"),
    "scalerl": Preset(make_scalerl, "arXiv:2510.13786"),
}
"""What `ludic train algorithm=NAME` can name. `make_sft` and `make_bradley_terry` have commands
of their own (`ludic sft`, `ludic train-rm`); what the `_with_rm` presets do is `reward_model=`
there, with its `mode`."""
