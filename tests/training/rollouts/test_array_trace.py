"""Traces of arrays: whoever reads them sees lists, and their samples train on the same numbers."""

import copy
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from ludic import _core
from ludic.errors import DataError
from ludic.training.rollouts.array_trace import ArrayTrace
from ludic.training.rollouts.to_samples import sample_from_step
from ludic.types import Rollout, Step, TokenTrace

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=5)


@st.composite
def traces(draw):
    completion = draw(IDS)
    logp = draw(st.sampled_from([st.floats(-50, 0, width=32), st.floats(-50, 0)]))
    logps = draw(st.none() | st.lists(logp, min_size=len(completion), max_size=len(completion)))
    return TokenTrace(draw(IDS), completion, logps, draw(st.sampled_from([None, "stop"])))


def as_arrays(trace):
    logps = None if trace.completion_logprobs is None else np.array(trace.completion_logprobs)
    return ArrayTrace(np.array(trace.prompt_token_ids), np.array(trace.completion_token_ids), logps, trace.finish_reason)


@given(traces())
def test_a_trace_of_arrays_is_read_as_the_trace_of_lists(trace):
    arrays = as_arrays(trace)
    assert arrays == trace
    assert trace == arrays
    assert arrays == as_arrays(trace)
    assert arrays.to_dict() == trace.to_dict()
    assert {type(token) for token in arrays.prompt_token_ids + arrays.completion_token_ids} <= {int}
    assert {type(logp) for logp in arrays.completion_logprobs or []} <= {float}
    assert repr(arrays) == f"Array{trace!r}".replace("ArrayTokenTrace", "ArrayTrace")
    assert type(arrays.to_lists()) is TokenTrace
    for copied in (arrays.to_lists(), replace(arrays), copy.deepcopy(arrays), TokenTrace.from_dict(arrays.to_dict())):
        assert copied == trace


@given(traces(), st.floats(-5, 5, width=32))
def test_a_sample_of_arrays_has_the_numbers_of_the_sample_of_lists(trace, weight):
    """The core's table, from which everything is trained, has the same bytes."""

    def sample(of):
        return sample_from_step(Rollout("r", []), Step(0, "", "", None, 1.0, False, True, {}, of), weight)

    lists, arrays = sample(trace), sample(as_arrays(trace))
    assert (lists.input_ids, lists.meta) == (arrays.input_ids.tolist(), arrays.meta)
    assert (lists.attention_mask, lists.action_mask) == (arrays.attention_mask.tolist(), arrays.action_mask.tolist())
    if lists.input_ids:  # the core refuses a sample without tokens
        table, other = (_core.SampleTable.from_items([each]) for each in (lists, arrays))
        assert table.to_bytes() == other.to_bytes()


@pytest.mark.parametrize("logps", [None, [-0.5, -0.25]])
def test_a_sample_of_arrays_is_ingested_without_a_number_of_python(logps):
    """Neither the sample nor the table asks an array for a list or for one of its elements."""

    class Sealed(np.ndarray):
        def refuse(self, *_):
            raise AssertionError("a number of Python was read")

        __iter__ = __getitem__ = tolist = item = refuse

    trace = as_arrays(TokenTrace([5, 6], [7, 2], logps))
    for name in ("prompt", "completion", "logps"):
        column = getattr(trace, name)
        trace.__dict__[name] = None if column is None else column.view(Sealed)
    item = sample_from_step(Rollout("r", []), Step(0, "", "", None, 1.0, False, True, {}, trace), 1.0)
    columns = [item.input_ids, item.attention_mask, item.action_mask]
    columns += [] if logps is None else [item.actor_logps.token_logps]
    assert all(isinstance(column, np.ndarray) for column in columns)
    assert _core.SampleTable.from_items([item]).lengths.tolist() == [4]
    with pytest.raises(AssertionError, match="was read"):
        trace.completion_token_ids  # noqa: B018


def test_an_element_of_an_array_of_log_probabilities_is_a_float():
    trace = as_arrays(TokenTrace([1], [2], [-0.1]))
    assert isinstance(trace.logps[0], float)
    assert trace.logps[0] == -0.1


@pytest.mark.parametrize("changes", [{"completion": [7, 3]}, {"finish_reason": None}, {"completion_logprobs": None}])
def test_traces_that_differ_are_not_equal(changes):
    fields = {"prompt": [5, 6], "completion": [7, 2], "completion_logprobs": [-0.5, -0.25], "finish_reason": "stop"}
    one, other = (ArrayTrace(*each.values()) for each in (fields, fields | changes))
    assert one != other
    assert other != one
    assert one != TokenTrace(*(fields | changes).values())
    assert one != "text"


def test_log_probabilities_of_another_number_of_tokens_are_refused():
    with pytest.raises(DataError, match="1 log-probabilities for 2 tokens"):
        ArrayTrace(np.array([1]), np.array([2, 3]), np.array([-0.5]))
