"""Synthetic preferences with a known truth: `high>` prefers the string of digits with the larger
mean, `low>` the one with the smaller mean.

The preferred response is drawn from the Bradley-Terry model of the two qualities, so the best
possible accuracy of a reward model on a set of pairs is known exactly.

R. A. Bradley, M. E. Terry (1952), Rank analysis of incomplete block designs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import TypedDict

from ludic.errors import check_value

_SPLIT_SEED = 20_000  # of the held-out pairs, which are the same in every run
_SIGN = {"high>": 1.0, "low>": -1.0}


class Preference(TypedDict):
    """One labelled pair. Example: `{"prompt": "high>", "chosen": "98097", "rejected": "1203",
    "probability": 0.999}`."""

    prompt: str
    chosen: str
    rejected: str
    probability: float
    """Probability that `chosen` is preferred; below 0.5 if the worse response was drawn."""


@dataclass(frozen=True)
class DigitPreferences:
    """A source of preference pairs. Stateless: every draw comes from the caller's `rng`.

    >>> pairs = [task.draw(rng) for _ in range(10_000)]
    >>> bayes_accuracy(task.heldout())
    """

    min_digits: int = 4
    max_digits: int = 12
    """Digits of a response, drawn uniformly."""
    temperature: float = 0.5
    """The difference in quality at which the preference has probability sigmoid(1) = 73 %."""
    num_heldout: int | None = None
    """Pairs kept for evaluation. None means 5,000, or fewer for few digits. The standard error of
    an accuracy on 5,000 is 0.5 points."""

    def __post_init__(self) -> None:
        check_value("min_digits", self.min_digits, f"max_digits is {self.max_digits}", least=1, most=self.max_digits)
        check_value("temperature", self.temperature, above=0, below=math.inf)
        check_value("num_heldout", self.num_heldout, "raise max_digits for more", least=1, most=self._spare, optional=True)

    def quality(self, prompt: str, response: str) -> float:
        """The latent quality: the mean digit of the response, negated for `low>`."""
        return _SIGN[prompt] * sum(map(int, response)) / len(response)

    def judge(self, prompt: str, response: str) -> float | None:
        """The quality of any text minus the quality of random digits: at random 0, at best 4.5.
        None unless it is `min_digits` to `max_digits` digits."""
        is_response = response.isascii() and response.isdigit() and self.min_digits <= len(response) <= self.max_digits
        return self.quality(prompt, response) - _SIGN[prompt] * 4.5 if is_response else None

    def probability(self, prompt: str, first: str, second: str) -> float:
        """Probability that `first` is preferred: sigmoid((quality of first - quality of second) /
        temperature)."""
        logit = (self.quality(prompt, first) - self.quality(prompt, second)) / self.temperature
        return 1 / (1 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit))

    def draw(self, rng: Random) -> Preference:
        """A pair to train on; neither response is held out with this prompt."""
        while True:
            pair = self._any_pair(rng)
            if not self._responses(pair) & self._heldout_responses:
                return pair

    def heldout(self) -> Sequence[Preference]:
        """The pairs kept for evaluation: the same in every run, for any seed."""
        return self._heldout

    @property
    def _spare(self) -> int:
        """The maximum of held-out pairs: they use at most a tenth of the longest responses."""
        return max(1, 10**self.max_digits // 20)

    def _any_pair(self, rng: Random) -> Preference:
        prompt = rng.choice(list(_SIGN))
        first, second = self._response(rng), self._response(rng)
        while self.quality(prompt, first) == self.quality(prompt, second):  # no reward model can distinguish them
            second = self._response(rng)
        probability = self.probability(prompt, first, second)
        if rng.random() < probability:
            return Preference(prompt=prompt, chosen=first, rejected=second, probability=probability)
        return Preference(prompt=prompt, chosen=second, rejected=first, probability=1 - probability)

    def _response(self, rng: Random) -> str:
        return "".join(rng.choices("0123456789", k=rng.randint(self.min_digits, self.max_digits)))

    @staticmethod
    def _responses(pair: Preference) -> set[str]:
        return {pair["prompt"] + pair["chosen"], pair["prompt"] + pair["rejected"]}

    @cached_property
    def _heldout(self) -> tuple[Preference, ...]:
        rng, count = Random(_SPLIT_SEED), self.num_heldout or min(5_000, self._spare)
        return tuple(self._any_pair(rng) for _ in range(count))

    @cached_property
    def _heldout_responses(self) -> frozenset[str]:
        return frozenset(response for pair in self._heldout for response in self._responses(pair))


def bayes_accuracy(pairs: Iterable[Preference]) -> float:
    """The expected accuracy on these pairs of the best possible model, the generator's own quality,
    over random labels: the mean of max(p, 1 - p)."""
    largest = [max(pair["probability"], 1 - pair["probability"]) for pair in pairs]
    return sum(largest) / len(largest)


def drawn_accuracy(pairs: Iterable[Preference]) -> float:
    """The accuracy of the generator's own quality on the drawn labels: the share of pairs in
    which the better response was chosen."""
    right = [pair["probability"] > 0.5 for pair in pairs]
    return sum(right) / len(right)
