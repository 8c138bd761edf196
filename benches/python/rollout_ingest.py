"""From finished rollouts to the core's table: the samples of their steps, and reading them. Traces
of lists, as another client's, against traces of arrays, as those of ludic's engines."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from benches.python.contest import Contender, Contest
from benches.python.samples import list_items

from ludic import _core
from ludic.training.rollouts.to_samples import sample_from_step
from ludic.training.types import SAWItem
from ludic.types import Rollout, Step, TokenTrace, stored

Trace = Callable[[list[int], list[int], list[float], str], TokenTrace]


def contests(samples: int = 1000) -> Iterator[Contest]:
    drawn = [_columns(item) for item in list_items(samples)]
    tokens = sum(len(prompt) + len(completion) for prompt, completion, _ in drawn)
    lists, arrays = _rollouts(drawn, TokenTrace), _rollouts(drawn, TokenTrace.from_arrays)
    of_lists, of_arrays = _samples(lists), _samples(arrays)
    title = f"{samples} rollouts, {tokens} tokens"

    def entry(name: str, run: Callable[[], Any], check: Callable[[Any, Any], None] | None = None) -> Contender:
        return Contender(name, run, check, cold=True)

    yield Contest(
        f"Traces of {title}",
        tokens,
        "token",
        [
            entry("lists, checked", lambda: _rollouts(drawn, TokenTrace)),
            entry("**arrays of lists**", lambda: _rollouts(drawn, TokenTrace.from_arrays)),
        ],
    )
    yield Contest(
        f"Ingest of {title}",
        tokens,
        "token",
        [
            entry("traces of lists", lambda: _ingest(lists)),
            entry("**traces of arrays**", lambda: _ingest(arrays), _assert_same),
        ],
    )
    yield Contest(
        f"The same, {title}, by part",
        tokens,
        "token",
        [
            entry("samples of lists", lambda: _samples(lists)),
            entry("**samples of arrays**", lambda: _samples(arrays)),
            entry("`from_items` of lists", lambda: _core.SampleTable.from_items(of_lists)),
            entry("**`from_items` of arrays**", lambda: _core.SampleTable.from_items(of_arrays)),
        ],
    )
    assert all(isinstance(stored(rollout.steps[0].trace, "prompt_token_ids"), np.ndarray) for rollout in arrays)


def _columns(item: SAWItem) -> tuple[list[int], list[int], list[float]]:
    assert item.actor_logps is not None
    begin = item.action_mask.index(1)
    return item.input_ids[:begin], item.input_ids[begin:], item.actor_logps.token_logps


def _rollouts(drawn: list[tuple[list[int], list[int], list[float]]], trace: Trace) -> list[Rollout]:
    def step(columns: tuple[list[int], list[int], list[float]]) -> Step:
        return Step(0, "", "", None, 1.0, False, True, {}, trace(*columns, "stop"))

    ids = map(str, itertools.count())
    return [Rollout(name, [step(columns)]) for name, columns in zip(ids, drawn, strict=False)]


def _samples(rollouts: list[Rollout]) -> list[SAWItem]:
    return [sample_from_step(rollout, step, 0.5) for rollout in rollouts for step in rollout.steps]


def _ingest(rollouts: list[Rollout]) -> _core.SampleTable:
    return _core.SampleTable.from_items(_samples(rollouts))


def _assert_same(got: _core.SampleTable, want: _core.SampleTable) -> None:
    assert got.to_bytes() == want.to_bytes()
