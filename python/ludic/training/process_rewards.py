"""Rewards of places in an answer, such as the ends of its steps, and the credit of each token.

A step of a rollout has them in `info["process_rewards"]`, as a list of [first token, last token,
reward]; tokens are counted in the step's completion. Its reward includes their sum.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, zip_longest
from typing import Any, Literal

import numpy as np

from ludic.errors import DataError, check_value
from ludic.training.credit_assignment import TokenWeights, check_group_size, group_positions
from ludic.types import Rollout, Step, answers_of, read_list, stored


def locate(rollout: Rollout, rewards: Iterable[tuple[Any, float]], tokenizer: Any = None) -> list[tuple[Step, list[Any]]]:
    """Of each (place, reward) its step and [first token, last token, reward]. A place is a position
    in the tokens of all answers of the episode, or the characters (start, end) of the only answer.
    Raises DataError for one outside."""
    answers, located = answers_of(rollout), []
    tokens = [(step, token) for step in answers for token in range(_num_tokens(step))]
    text, ids = answers[0].action, read_list(answers[0].trace, "completion_token_ids")
    for place, reward in rewards:
        first = last = place
        if isinstance(place, tuple) and (tokenizer is None or len(answers) > 1):
            raise DataError(f"a reward of the characters {place}, which need one answer and RewardFunctions(tokenizer=...),")
        if isinstance(place, tuple):
            first = find_token(tokenizer, ids, text, place[0]) + 1 if place[0] else 0
            first, last = min(first, find_token(tokenizer, ids, text, place[0] + 1)), find_token(tokenizer, ids, text, place[1])
            first = first if 0 <= place[0] < place[1] <= len(text) else -1
        if not 0 <= first <= last < len(tokens):
            rule = f"a position in {len(tokens)} completion_ids, or (start, end) in {len(text)} characters that they decode to"
            raise DataError(f"a reward at {place}, which must be {rule},")
        located.append((tokens[last][0], [tokens[first][1], tokens[last][1], reward]))
    return located


def find_token(tokenizer: Any, ids: Sequence[int], text: str, length: int) -> int:
    """The token with which `text[:length]` is complete: the shortest sequence of sampled tokens
    whose text begins so; nothing is tokenised again. `len(ids)` if there is none."""
    return bisect_left(range(len(ids)), True, key=lambda token: _decode(tokenizer, ids[: token + 1]).startswith(text[:length]))


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def find_step_ends(ids: Sequence[int], step_end: str | int, tokenizer: Any) -> list[int]:
    """Positions of the tokens that end the steps of an answer: those that complete the text
    `step_end`, or that have this id, unless no text follows; and the last token."""
    text = _decode(tokenizer, ids)
    if isinstance(step_end, int):
        ends = [position for position, token in enumerate(ids) if token == step_end]
    else:
        found = re.finditer(f"(?:{re.escape(step_end)})+", text)
        ends = [find_token(tokenizer, ids, text, each.end()) for each in found]
    return [*(end for end in ends if _decode(tokenizer, ids[end + 1 :]).strip()), max(len(ids) - 1, 0)]


@dataclass
class ProcessReward:
    """Credit of each token from rewards of places in an answer: process supervision of DeepSeekMath
    (arXiv:2402.03300, section 4.1.3).

    1. `normalize`: a reward becomes (reward - mean) / (population standard deviation + 1e-8).
       `group` compares all rewards of a group, as the paper does; `index` the j-th rewards of its
       rollouts, as MT-GRPO does with two turns (arXiv:2505.11821); `none` changes nothing.
    2. `mode`: with `returns`, token t has the sum of gamma^(u - t) * reward over the places of the
       rollout that end at a token u >= t. With gamma 1 it is the paper's advantage. With `as_is`, a
       reward is divided equally over the tokens of its place.

    What a step's reward has beyond its places is a reward of the whole step: without places, a
    group of single answers has the credit of a normalised `GroupNormalizedReturn`.

    Example: places [[0, 1, 1.0], [2, 3, -0.5]] of four tokens, not normalised. Returns are
    [0.5, 0.5, -0.5, -0.5]; as they are, [0.5, 0.5, -0.25, -0.25].
    """

    group_size: int
    mode: Literal["returns", "as_is"] = "returns"
    gamma: float = 1.0
    normalize: Literal["group", "index", "none"] = "group"

    def __post_init__(self) -> None:
        check_group_size(self.group_size)
        check_value("mode", self.mode, choices=("returns", "as_is"))
        check_value("normalize", self.normalize, choices=("group", "index", "none"))
        check_value("gamma", self.gamma, "1 does not discount", least=0, most=1)

    def compute(self, rollouts: Sequence[Rollout]) -> TokenWeights:
        """A float for a step whose tokens all have the same credit, otherwise an array [A]. Raises
        DataError for a step without a token trace."""
        weights: TokenWeights = {}
        for members in group_positions(rollouts, self.group_size, allow_partial=False):
            group = [rollouts[member] for member in members]
            is_whole = any(abs(_rest(step)) > 1e-9 for rollout in group for step in rollout.steps)
            rewards = [_read_rewards(rollout, is_whole=is_whole) for rollout in group]
            classes = {"group": [chain(*rewards)], "index": zip_longest(*rewards), "none": ()}[self.normalize]
            for compared in classes:
                own = [reward for reward in compared if reward is not None]
                values = np.array([value for *_, value in own])
                for reward in own:
                    reward[-1] = float((reward[-1] - values.mean()) / (values.std() + 1e-8)) if np.ptp(values) else 0.0
            for rollout, own in zip(group, rewards, strict=True):
                weights |= self._credit(rollout, own)
        return weights

    def _credit(self, rollout: Rollout, rewards: Sequence[Sequence[Any]]) -> TokenWeights:
        credit = np.zeros(sum(map(_num_tokens, rollout.steps)))
        for first, last, value in rewards:
            start = last if self.mode == "returns" else first
            credit[start : last + 1] += value / (last + 1 - start)
        if self.mode == "returns":
            credit = np.array([*accumulate(credit[::-1], lambda later, now: now + self.gamma * later)][::-1])
        weights: TokenWeights = {}
        for step in rollout.steps:
            own, credit = np.split(credit, [_num_tokens(step)])
            weights[rollout.id, step.index] = own if np.ptp(own) else float(own[0])
        return weights


def _read_rewards(rollout: Rollout, *, is_whole: bool) -> list[list[Any]]:
    """Rewards of whole steps, then of places, with tokens counted from the first of the rollout.
    `is_whole`: some step of its group is rewarded as a whole, so that the others are by 0."""
    whole, placed, start = [], [], 0
    for step in rollout.steps:
        if is_whole and not (step.info.get("intermediate_call") and abs(_rest(step)) < 1e-9):
            whole.append([start, start + _num_tokens(step) - 1, _rest(step)])
        placed += [[start + first, start + last, reward] for first, last, reward in step.info.get("process_rewards", ())]
        start += _num_tokens(step)
    return whole + placed


def _rest(step: Step) -> float:
    return step.reward - sum(reward for *_, reward in step.info.get("process_rewards", ()))


def _num_tokens(step: Step) -> int:
    """Its sampled tokens; 1 if there are none, so that its reward has a place."""
    if step.trace is None:
        raise DataError(f"step {step.index} has no token trace; sample with ReturnSpec.for_rl()")
    return max(1, len(stored(step.trace, "completion_token_ids")))
