"""A collation oracle in plain Python, and strategies for samples of every kind that the core
accepts."""

from __future__ import annotations

import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from ludic.training.types import ActorTokenLogps, SampleAttachments, SAWItem

PAD = 299


def int_forms() -> list[Callable[[list[int]], Any]]:
    """Constructors that store the same integers as a list, a tuple, or an array of some layout."""
    return [
        list,
        tuple,
        lambda values: np.array(values, np.int64),
        lambda values: np.array(values, np.int32),
        lambda values: np.array(values, np.uint16),
        lambda values: np.repeat(np.array(values, np.int64), 2)[::2],
        lambda values: np.array(values[::-1], np.int32)[::-1],
        lambda values: array.array("q", values),
        lambda values: [np.int64(value) for value in values],
    ]


def mask_forms() -> list[Callable[[list[int]], Any]]:
    return [
        *int_forms(),
        bytes,
        bytearray,
        lambda values: np.array(values, bool),
        lambda values: np.array(values, np.uint8),
        lambda values: [bool(value) for value in values],
    ]


def float_forms() -> list[Callable[[list[float]], Any]]:
    return [
        list,
        lambda values: np.array(values, np.float32),
        lambda values: np.array(values, np.float64),
        lambda values: np.repeat(np.array(values, np.float64), 3)[::3],
    ]


@st.composite
def item(draw: st.DrawFn, with_logps: bool, plain: bool = False) -> SAWItem:
    """A sample with a random sequence type for each field; lists only if `plain`."""
    action = draw(
        st.lists(st.integers(0, 1), min_size=1, max_size=40)
        | st.integers(1, 40).map(lambda n: [0] * (n // 4) + [1] * (n - n // 4))
    )
    ids = draw(st.lists(st.integers(0, 298), min_size=len(action), max_size=len(action)))
    logps = [draw(st.floats(-20, 0, width=32)) for _ in range(sum(action))]
    form = (lambda forms: list) if plain else (lambda forms: draw(st.sampled_from(forms)))
    attachments = SampleAttachments(ActorTokenLogps(form(float_forms())(logps))) if with_logps else SampleAttachments()
    return SAWItem(
        input_ids=form(int_forms())(ids),
        attention_mask=form(mask_forms())([1] * len(ids)),
        action_mask=form(mask_forms())(action),
        weight=draw(st.floats(-3, 3, width=32)),
        attachments=attachments,
    )


def items(min_size: int = 0, plain: bool = False) -> st.SearchStrategy[list[SAWItem]]:
    return st.booleans().flatmap(lambda logps: st.lists(item(logps, plain), min_size=min_size, max_size=8))


def truncate_right(sample: SAWItem, max_seq_len: int) -> SAWItem:
    """The sample as plain lists, truncated on the right."""
    action = [int(bit) for bit in sample.action_mask][:max_seq_len]
    logps = sample.actor_logps
    token_logps = None if logps is None else ActorTokenLogps([float(logp) for logp in logps.token_logps][: sum(action)])
    return SAWItem(
        input_ids=[int(token) for token in sample.input_ids][:max_seq_len],
        attention_mask=[int(bit) for bit in sample.attention_mask][:max_seq_len],
        action_mask=action,
        weight=sample.weight,
        attachments=SampleAttachments(token_logps),
    )


def aligned_logps(sample: SAWItem) -> list[float]:
    """One value per token: the log-probability of an action token, 0 elsewhere."""
    assert sample.actor_logps is not None
    remaining = iter(sample.actor_logps.token_logps)
    return [next(remaining) if bit else 0.0 for bit in sample.action_mask]


def collate(samples: Sequence[SAWItem], pad: int = PAD) -> dict[str, Any]:
    """The documented padded layout of plain samples, as nested lists."""
    longest = max(len(sample.input_ids) for sample in samples)

    def padded(values: Sequence[Any], filler: Any) -> list[Any]:
        return [*values, *[filler] * (longest - len(values))]

    batch = {
        "input_ids": [padded(sample.input_ids, pad) for sample in samples],
        "attention_mask": [padded(sample.attention_mask, 0) for sample in samples],
        "action_mask": [padded([float(bit) for bit in sample.action_mask], 0.0) for sample in samples],
        "weight": [sample.weight for sample in samples],
    }
    if samples[0].actor_logps is not None:
        batch["actor_logps"] = [padded(aligned_logps(sample), 0.0) for sample in samples]
    return batch
