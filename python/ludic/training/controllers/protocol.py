"""What a controller sees, and what it must have. A controller changes the coefficients of an
algorithm once a training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ludic.training.coefficients import Coefficient
from ludic.training.types import CandidateGroups

SumOverRanks = Callable[[Sequence[float]], Sequence[float]]
"""The sum of each number over the ranks."""


@dataclass(frozen=True, eq=False)
class Observation:
    """One training step, seen after its optimizer steps. The numbers are over all ranks."""

    step: int
    """Number of training steps before this one."""
    lr_factor: float = 1.0
    """Factor of the learning-rate schedule that the step used."""
    warmup_steps: int = 0
    """Warm-up steps of that schedule."""
    entropy: float | None = None
    """Mean entropy of the groups' weights, in nats. None if unknown."""
    kl: float | None = None
    """KL between policy and reference: `reference/kl`, or `reference/sequence_kl` where the loss
    penalises that. None if unknown."""
    groups: CandidateGroups | None = None
    """The groups of this rank. None if the algorithm has none."""
    sum_over_ranks: SumOverRanks = tuple
    """Adds what was summed over `groups` to the sums of the other ranks, all of which must call it.
    The default is for one rank."""


class Controller(Protocol):
    """Sets coefficients from what the steps showed. It must compute the same on all ranks."""

    @property
    def name(self) -> str:
        """Under which a checkpoint has its state."""
        ...

    @property
    def coefficients(self) -> Mapping[str, Coefficient]:
        """What it sets, by name."""
        ...

    @property
    def reads_kl(self) -> bool:
        """Whether it needs the log-probabilities of a reference."""
        ...

    def update(self, seen: Observation) -> dict[str, float]:
        """Set the coefficients for the next step. Returns statistics of the update."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next updates depend on, as JSON."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        ...
