"""Arrays of token ids, masks and log-probabilities for fields that are lists when they are read,
and means that are 0 for an empty input."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ludic import _core


class Column(np.ndarray):
    """[N] numbers of a field that `ludic.types.lists_when_read` knows. Make it with `int_column` or
    `float_column`."""

    is_list_when_read = True
    memory: _Memory | None = None
    """What `append_ids` may continue."""


class _Memory:
    """Room for ids, of which the first `used` are set: `grows` times what was needed."""

    def __init__(self, first: Column, end: int, grows: int = 1) -> None:
        self.ids, self.used, self.grows = np.empty(grows * end, np.int32), len(first), grows
        self.ids[: self.used] = first


def int_column(values: Any) -> Column:
    """[N] token ids as int32; a `Column` as it is. Raises DataTypeError for anything but a sequence
    of whole numbers, DataError for an id that 32 bits cannot hold."""
    return values if type(values) is Column else _core.read_ids(values).view(Column)


def append_ids(ids: Column, more: Sequence[int] | NDArray[np.int32]) -> Column:
    """[N + M] ids, to read alone. Turns that continue each other share memory: what this function
    returned is continued in place. What was continued already, or is no whole turn, is copied.

    >>> first = append_ids(int_column([]), [5, 6])
    >>> second = append_ids(first, [7])
    >>> [np.shares_memory(second, append_ids(second, [token])) for token in (8, 9)]
    [True, False]
    """
    memory, end = ids.memory, len(ids) + len(more)
    if memory is None or memory.used != len(ids):
        memory = _Memory(ids, end)  # often the only turn
    elif end > len(memory.ids):
        memory = _Memory(ids, end, grows=min(2 * memory.grows, 4))
    memory.ids[memory.used : end] = more
    memory.used = end
    longer = memory.ids[:end].view(Column)
    longer.memory, longer.flags.writeable = memory, False
    return longer


def join_ids(prompt: Any, completion: Any) -> Column:
    """[P + C] ids as int32; without a copy if they are the two parts of one `Column`."""
    prompt, completion = int_column(prompt), int_column(completion)
    whole, at = completion.base, len(prompt)
    is_base = type(whole) is Column and whole is prompt.base and len(whole) == at + len(completion)
    if (
        is_base
        and prompt.strides == completion.strides
        and (_address(prompt), _address(completion)) == (_address(whole), _address(whole[at:]))
    ):
        return whole
    return np.concatenate([prompt, completion]).view(Column)


def _address(values: NDArray[Any]) -> int:
    return int(values.__array_interface__["data"][0])


def float_column(values: Any) -> Column:
    """[N] log-probabilities as float32 if that changes none of them, else as float64: read as a
    list, they are the numbers that were given. Raises DataTypeError for anything but a sequence of
    numbers."""
    return values if type(values) is Column else _core.read_floats(values).view(Column)


LOGP_TOLERANCE = 1e-3
"""How far above 0 a log-probability may be because of rounding."""
LARGEST = float(np.finfo(np.float32).max)
"""The largest number of the core's columns, in which all that is trained is stored."""


def find_token_fault(ids: Any, logps: Any = None, vocab_size: int | None = None) -> str | None:
    """Why a model of `vocab_size` embeddings cannot be trained on the ids [T], of which some have
    the log-probabilities `logps` [A] under their sampler; None if nothing is wrong. Raises
    DataError for a value that is no id."""
    column = np.asarray(int_column(ids))
    if len(column) and int(column.view(np.uint32).max()) >= (2**31 if vocab_size is None else vocab_size):
        wrong = int(column.min() if column.min() < 0 else column.max())
        return f"the token id {wrong}, but the policy's vocabulary has {vocab_size or 'no id below 0'}"
    values = np.asarray(() if logps is None else float_column(logps))
    if not len(values) or -LARGEST <= values.min() <= values.max() <= LOGP_TOLERANCE:
        return None
    if len(infinite := values[~(np.abs(values) <= LARGEST)]):
        return f"the log-probability {infinite[0]}; it must be finite: check the sampler's weights and number format"
    return (
        f"the log-probability {values.max():g}; it must be at most 0: a vLLM server needs --logprobs-mode processed_logprobs or "
        "raw_logprobs, so that it does not return logits"
    )


def mask_column(num_zeros: int, num_ones: int) -> Column:
    """[`num_zeros` + `num_ones`] uint8: first the zeros, then the ones. Read-only: all masks are
    windows of one array."""
    half = 1 << max(14, num_zeros.bit_length(), num_ones.bit_length())
    return _zeros_and_ones(half)[half - num_zeros : half + num_ones].view(Column)


@cache
def _zeros_and_ones(half: int) -> Column:
    """[2 * `half`] as many zeros as ones."""
    mask = np.repeat(np.array([0, 1], np.uint8), half)
    mask.flags.writeable = False
    return mask.view(Column)


def mean_or_zero(values: Sequence[float]) -> float:
    """Mean of the numbers; 0.0 if there are none."""
    return float(sum(values)) / len(values) if values else 0.0


def array_mean_or_zero(values: NDArray[Any]) -> float:
    """Mean of an array of numbers or flags [N]; 0.0 for N = 0."""
    return float(values.mean()) if len(values) else 0.0
