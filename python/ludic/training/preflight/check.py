"""Checks before the first step whether trainer and sampler compute the same distribution.

The sampled log-probabilities of the first samples are compared with the trainer's, for the same
tokens and at `TrainerConfig.temperature`. If they differ, every ratio of the run would be wrong,
and nothing else would show it: the loss decreases anyway. `causes` then finds the cause.

Both engines compute in finite precision. At the same weights the mean absolute difference is about
1e-6 to 1e-5 nats in float32. In bfloat16 it is below 0.01 where logits are small, and more where
they are large: one of 30 is rounded to a multiple of 1/8 (0.035 nats with SmolLM2-135M). With a
wrong temperature, template or set of weights it is a few tenths.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ludic.errors import MismatchError, check_value
from ludic.inference.request import SamplingParams
from ludic.training import ranks
from ludic.training.backend.protocol import TrainingBackend
from ludic.training.config import TrainerConfig
from ludic.training.preflight.causes import Cause, CauseFinder, find_cause
from ludic.training.preflight.comparison import Comparison, compare
from ludic.training.types import SAWItem

logger = logging.getLogger(__name__)

WORST_SHOWN = 8
MOST_TOKENS = 2048
"""Padded tokens that are compared, so that a large model on a CPU begins soon."""
MAX_DIFFERENCE, MAX_ROUNDING = 0.02, 0.1
"""The default thresholds, in nats: in float32, and in coarser types."""
MIN_DIFFERENCE = 1e-3
"""Mean difference, in nats, above which causes are tried. A smaller one needs no explanation."""
MIN_REDUCTION = 4.0
"""If the difference is below the threshold, a cause is reported only if it reduces the
difference by this factor."""


@dataclass(frozen=True)
class WorstToken:
    """A token with a large difference between the log-probabilities of trainer and sampler."""

    sample: str
    position: int
    """Index among the sample's compared action tokens."""
    token_id: int
    text: str
    sampler_logp: float
    trainer_logp: float


@dataclass
class PreflightReport:
    """The result of a comparison."""

    mean: float
    """Mean absolute difference of log-probabilities, in nats."""
    max: float
    num_tokens: int
    num_samples: int
    threshold: float
    tried: dict[str, float] = field(default_factory=dict)
    """Mean difference under each cause that was tried, by name."""
    cause: Cause | None = None
    """The likely cause; None if trainer and sampler agree."""
    worst: list[WorstToken] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        return self.cause is None

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers, for a summary."""
        named = {} if self.cause is None else {"cause": self.cause.name}
        return {"mean": self.mean, "max": self.max, "num_tokens": self.num_tokens, "num_samples": self.num_samples, **named}

    def table(self) -> str:
        """Return cause, remedy, the causes that were tried, and the worst tokens, as text."""
        assert self.cause is not None
        lines = [
            f"the trainer and the sampler disagree before the first step: the mean difference of log-probabilities is {self.mean:.4g} "
            f"nats over {self.num_tokens} tokens of {self.num_samples} samples (largest {self.max:.4g}, threshold {self.threshold:g})",
            f"likely cause: {self.cause.description}",
            f"remedy: {self.cause.remedy}",
            "",
            f"{'if so':<58} mean difference",
            f"{'as configured':<58} {self.mean:.6f}",
            *(f"{name:<58} {mean:.6f}" for name, mean in self.tried.items()),
            "",
            f"{'sample':<24} {'at':>4} {'id':>7}  {'token':<14} {'sampler':>9} {'trainer':>9}",
            *(
                f"{w.sample[:24]:<24} {w.position:>4} {w.token_id:>7}  {w.text[:14]:<14} {w.sampler_logp:>9.4f} {w.trainer_logp:>9.4f}"
                for w in self.worst
            ),
        ]
        return "\n".join(lines)


@dataclass
class Preflight:
    """Compares the first samples of a run with the trainer, and raises if they disagree.

    >>> preflight = Preflight(sampling=inference.sampling, tokenizer=tokenizer)
    >>> trainer = Trainer(..., preflight=preflight)

    `sampling`, `tokenizer` and `client` only help to name the cause. With several ranks, each rank
    compares its own samples, all ranks raise if one does, and causes that need another forward pass
    are not tried.
    """

    sampling: SamplingParams | None = None
    """The sampling settings of the samples."""
    tokenizer: Any | None = None
    """The policy's tokenizer. With it, prompts are also compared with its chat template; leave it
    out if the prompts of the agents include tools."""
    client: Any | None = None
    """The sampler. If it has `complete_tokens`, it is asked to continue token ids, without template
    or text."""
    threshold: float = MAX_DIFFERENCE
    """Largest mean absolute difference, in nats, that counts as agreement."""
    num_samples: int = 32
    """Maximum number of samples to compare; with padding they also have at most 2,048 tokens, or
    the tokens of the longest sample."""
    on_report: Callable[[PreflightReport], None] | None = None
    """Called with the result, whether trainer and sampler agree or not."""
    report: PreflightReport | None = field(default=None, init=False)
    """The result of the last comparison."""

    def __post_init__(self) -> None:
        check_value("threshold", self.threshold, "a difference of log-probabilities, in nats", above=0)
        check_value("num_samples", self.num_samples, least=1)

    async def __call__(self, backend: TrainingBackend, cfg: TrainerConfig, items: Sequence[SAWItem]) -> PreflightReport | None:
        """Compare and return the report; None if no sample has sampled log-probabilities. Raises
        MismatchError, with the report as `report`, if trainer and sampler disagree."""
        selected = _select_samples(items, self.num_samples, cfg.micro_token_budget)
        if not selected:
            logger.warning("no sample has the sampler's log-probabilities; the trainer cannot be compared with the sampler")
            return None
        comparison = await compare(backend, cfg, selected)
        report = self.report = PreflightReport(
            mean=comparison.mean,
            max=comparison.max,
            num_tokens=comparison.num_tokens,
            num_samples=len(comparison.items),
            threshold=self.threshold,
            worst=[self._worst_token(comparison, *place) for place in comparison.worst(WORST_SHOWN)],
        )
        finder = CauseFinder(backend, cfg, self.sampling, self.tokenizer, self.client)
        cause = await find_cause(finder, comparison, self.threshold, report.tried) if comparison.mean > MIN_DIFFERENCE else None
        if cause is not None and report.mean <= self.threshold:  # then it has to explain nearly all of the difference
            explained = report.tried.get(cause.name)
            cause = cause if explained is not None and explained * MIN_REDUCTION < report.mean else None
        report.cause = cause or finder.check_prompts(comparison)
        if self.on_report is not None:
            self.on_report(report)
        stop = ranks.max_over_ranks([float(report.cause is not None)], cfg.model_device)[0]
        if report.cause is not None:
            raise MismatchError(report.table(), report=report)
        if stop:
            raise MismatchError("the samples of another rank disagree with the trainer; its error has the table", report=report)
        return report

    def _worst_token(self, comparison: Comparison, sample: int, position: int) -> WorstToken:
        item = comparison.items[sample]
        token_id = int(np.asarray(item.input_ids)[comparison.positions[sample][position]])
        text = "" if self.tokenizer is None else repr(self.tokenizer.decode([token_id]))
        name = f"{item.meta.get('rollout_id', sample)}/{item.meta.get('step_index', 0)}"
        return WorstToken(
            name,
            position,
            token_id,
            text,
            float(comparison.sampler_logps[sample][position]),
            float(comparison.trainer_logps[sample][position]),
        )


def _select_samples(items: Sequence[SAWItem], count: int, budget: int) -> list[SAWItem]:
    """Select the longest sample and up to `count - 1` others, at regular intervals in the batch,
    that fit into one micro-batch. Padded, they have at most `MOST_TOKENS` tokens, or those of the
    longest sample.

    Example: 7 usable samples and count 3 give a stride of 7 // 3 = 2: the longest sample and those
    of 0, 2 and 4 that still fit.
    """
    usable = [item for item in items if item.actor_logps is not None and 1 < len(item.input_ids) <= budget]
    if not usable:
        return []
    longest = max(usable, key=lambda item: len(item.input_ids))
    width = len(longest.input_ids)
    most = min(count, max(1, min(budget, MOST_TOKENS) // width))
    others = [item for item in usable[:: max(1, len(usable) // count)] if item is not longest]
    return [longest, *others[: most - 1]]
