"""The registry of algorithms: name -> preset. The command line, its help, the facades and
docs/algorithms.md follow this list. Importing this module does not import torch.

To add an algorithm, write a `make_` function in this package and add it here and to the stubs
`presets/__init__.pyi` and `training/__init__.pyi`. Tests compare the stubs and the page with this
list.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ludic.training.algorithm import RLAlgorithm

Kind = Literal["reinforcement", "with_reward_model", "supervised", "reward_model", "preference"]
"""Where it is used. `reinforcement`: `ludic train algorithm=NAME`. `with_reward_model`: in Python
only; on the command line use `reward_model=` and its `mode`. `supervised`: `ludic sft`.
`reward_model`: `ludic train-rm`. `preference`: `ludic dpo`."""


@dataclass(frozen=True)
class Preset:
    """An algorithm: the function that builds it, and its source."""

    home: str
    """`module:function`; the module is relative to `ludic.training.presets`."""
    paper: str
    """An arXiv id, or author and year; empty for cross entropy."""
    kind: Kind = "reinforcement"

    @property
    def module(self) -> str:
        """The full name of the module."""
        return f"{__package__}.{self.home.partition(':')[0]}"

    @property
    def function(self) -> str:
        """The name of the function, such as `make_grpo`."""
        return self.home.partition(":")[2]

    @property
    def make(self) -> Callable[..., RLAlgorithm]:
        """The function. Accessing it imports torch."""
        make: Callable[..., RLAlgorithm] = getattr(import_module(self.module), self.function)
        return make


PRESETS: dict[str, Preset] = {
    "bradley_terry": Preset("reward_models:make_bradley_terry", "Bradley and Terry 1952", "reward_model"),
    "cispo": Preset("cispo:make_cispo", "arXiv:2506.13585"),
    "dapo": Preset("group_relative:make_dapo", "arXiv:2503.14476"),
    "dpo": Preset("reward_models:make_dpo", "arXiv:2305.18290", "preference"),
    "dr_grpo": Preset("group_relative:make_dr_grpo", "arXiv:2503.20783"),
    "gmpo": Preset("group_relative:make_gmpo", "arXiv:2507.20673"),
    "grpo": Preset("group_relative:make_grpo", "arXiv:2402.03300"),
    "grpo_rm": Preset("reward_models:make_grpo_with_rm", "arXiv:2402.03300", "with_reward_model"),
    "gspo": Preset("group_relative:make_gspo", "arXiv:2507.18071"),
    "kto": Preset("reward_models:make_kto", "arXiv:2402.01306", "preference"),
    "maxent_grpo": Preset("maxent:make_maxent_grpo", "d'Aliberti 2026"),
    "pass_at_k": Preset("group_relative:make_pass_at_k", "arXiv:2508.10751"),
    "opd": Preset("distillation:make_opd", "Thinking Machines 2025"),
    "ppo": Preset("policy_gradient:make_ppo", "arXiv:1707.06347"),
    "reinforce": Preset("policy_gradient:make_reinforce", "Williams 1992"),
    "reinforce_baseline": Preset("policy_gradient:make_reinforce_baseline", "Williams 1992"),
    "reinforce_plus_plus": Preset("policy_gradient:make_reinforce_plus_plus", "arXiv:2501.03262"),
    "remax": Preset("policy_gradient:make_remax", "arXiv:2310.10505"),
    "rloo": Preset("policy_gradient:make_rloo", "arXiv:2402.14740"),
    "sapo": Preset("group_relative:make_sapo", "arXiv:2511.20347"),
    "scalerl": Preset("cispo:make_scalerl", "arXiv:2510.13786"),
    "scalerl_rm": Preset("reward_models:make_scalerl_with_rm", "arXiv:2510.13786", "with_reward_model"),
    "sft": Preset("policy_gradient:make_sft", "", "supervised"),
}
"""Name of the algorithm -> preset."""

REGISTRY: dict[str, Preset] = {name: preset for name, preset in PRESETS.items() if preset.kind == "reinforcement"}
"""The presets that `ludic train algorithm=NAME` accepts."""
