"""Records that hold arrays: whoever reads them sees lists, and they train on the same numbers."""

import copy
import json
import pickle
from dataclasses import asdict, dataclass, replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st

from ludic import _core
from ludic.columns import Column, append_ids, array_mean_or_zero, float_column, int_column, join_ids, mask_column, mean_or_zero
from ludic.errors import DataError, DataTypeError
from ludic.files.json_values import encode_lines
from ludic.inference.request import ReturnSpec
from ludic.training.batching.packing import truncate_and_flag
from ludic.training.batching.sample_codec import decode_batch, encode_batch
from ludic.training.rollouts.log import rollout_record
from ludic.training.rollouts.to_samples import sample_from_step
from ludic.training.types import ActorTokenLogps, SampleAttachments, SAWBatch, SAWItem
from ludic.types import ChatResponse, Rollout, Step, TokenTrace, read_list, stored

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=5)
FIELDS = ("prompt_token_ids", "completion_token_ids", "completion_logprobs")


@st.composite
def traces(draw):
    completion = draw(IDS)
    logp = draw(st.sampled_from([st.floats(-50, 0, width=32), st.floats(-50, 0)]))
    logps = draw(st.none() | st.lists(logp, min_size=len(completion), max_size=len(completion)))
    return TokenTrace(draw(IDS), completion, logps, draw(st.sampled_from([None, "stop"])))


def as_arrays(trace):
    return TokenTrace.from_arrays(*(getattr(trace, name) for name in (*FIELDS, "finish_reason")))


def step_of(trace):
    return Step(0, "", "", None, 1.0, False, True, {}, trace, ts_ns=7)


def sample(trace, weight=1.0):
    return sample_from_step(Rollout("r", []), step_of(trace), weight)


def columns_of(item):
    of_item = [stored(item, name) for name in ("input_ids", "attention_mask", "action_mask")]
    return of_item + ([] if item.actor_logps is None else [stored(item.actor_logps, "token_logps")])


@given(traces())
def test_a_trace_of_arrays_is_read_as_the_trace_of_lists(trace):
    assert as_arrays(trace) == trace
    assert trace == as_arrays(trace)
    assert as_arrays(trace) == as_arrays(trace)
    arrays = as_arrays(trace)
    assert repr(arrays) == repr(trace)
    assert type(stored(arrays, "prompt_token_ids")) is Column
    assert as_arrays(trace).to_dict() == trace.to_dict()
    absent = {"images": (), "routes": None}  # JSON of text does not have these keys
    assert {**as_arrays(trace).to_dict(), **absent} == asdict(as_arrays(trace))
    assert json.dumps(as_arrays(trace).to_dict()) == json.dumps(trace.to_dict())
    for name in FIELDS:
        theirs, ours = getattr(trace, name), getattr(as_arrays(trace), name)
        assert (type(ours), ours, bool(ours)) == (type(theirs), theirs, bool(theirs))
        assert [*map(type, ours or [])] == [*map(type, theirs or [])]
        assert read_list(as_arrays(trace), name) == theirs
    copies = (replace, copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each)))
    for make_copy in copies:
        assert make_copy(as_arrays(trace)) == trace


@given(traces())
def test_a_rollout_of_arrays_is_written_as_that_of_lists_bit_for_bit(trace):
    arrays, lists = (Rollout("r", [step_of(each)]) for each in (as_arrays(trace), trace))
    assert list(encode_lines([rollout_record(arrays)])) == list(encode_lines([rollout_record(lists)]))
    assert type(stored(arrays.steps[0].trace, "prompt_token_ids")) is Column  # writing reads no list


@given(traces(), st.booleans(), st.booleans())
def test_a_response_hands_its_arrays_on(trace, wants_ids, wants_logps):
    spec = ReturnSpec(return_token_ids=wants_ids, return_chosen_logprobs=wants_logps)
    arrays, lists = (spec.make_response("text", each) for each in (as_arrays(trace), trace))
    of_arrays = arrays.to_trace()
    assert (of_arrays is None) == (not wants_ids)
    if of_arrays is not None:
        assert [type(stored(of_arrays, name)) for name in FIELDS[:2]] == [Column, Column]
    assert of_arrays == lists.to_trace()
    assert arrays == lists


@given(traces(), st.floats(-5, 5, width=32), st.sets(st.sampled_from(FIELDS)))
def test_a_sample_of_arrays_has_the_numbers_of_the_sample_of_lists(trace, weight, read_before):
    """The core's table, from which everything is trained, has the same bytes, whichever fields
    were read as lists before."""
    arrays = as_arrays(trace)
    for name in read_before:
        getattr(arrays, name)
    ours, theirs = sample(arrays, weight), sample(trace, weight)
    if trace.prompt_token_ids or trace.completion_token_ids:  # the core refuses a sample without tokens
        table, other = (_core.SampleTable.from_items([each]) for each in (ours, theirs))
        assert table.to_bytes() == other.to_bytes()
    assert ours == theirs
    assert ours.actor_logps == theirs.actor_logps


def seal(record, names):
    """Make every element of the record's arrays an error to read."""

    def refuse(self, *_):
        raise AssertionError("a number of Python was read")

    for name in names:
        column = stored(record, name)
        if column is not None:
            record.__dict__[name] = column.view(type("Sealed", (Column,), dict.fromkeys(["__iter__", "tolist", "item"], refuse)))


@pytest.mark.parametrize("logps", [None, [-0.5, -0.25]])
def test_a_rollout_is_ingested_without_a_number_of_python(logps):
    trace = as_arrays(TokenTrace([5, 6], [7, 2], logps))
    item = sample(trace)
    seal(item, ["input_ids", "attention_mask", "action_mask"])
    if logps is not None:
        seal(item.actor_logps, ["token_logps"])
    table = _core.SampleTable.from_items([item])
    assert (table.lengths.tolist(), table.action_counts.tolist()) == ([4], [2])
    assert [column.dtype for column in columns_of(item)] == ["i4", "u1", "u1", "f4"][: 3 + (logps is not None)]
    with pytest.raises(AssertionError, match="was read"):
        stored(item, "input_ids").tolist()
    assert {type(stored(trace, name)) for name in FIELDS} <= {Column, type(None)}


def test_what_is_changed_in_a_list_that_was_read_is_trained():
    item = sample(as_arrays(TokenTrace([5, 6], [7, 2], [-0.5, -0.25])))
    item.action_mask[3] = 0
    item.actor_logps.token_logps.pop()
    item.input_ids = item.input_ids[:3] + [9]
    table = _core.SampleTable.from_items([item])
    columns = table.collate(np.arange(1), 0)
    assert columns["input_ids"].tolist() == [[5, 6, 7, 9]]
    assert columns["action_mask"].tolist() == [[0, 0, 1, 0]]
    assert columns["actor_logps"].tolist() == [[0, 0, -0.5, 0]]


def test_a_mask_of_300_ones_sums_to_300():
    """The sum of a uint8 array in Python is 300 - 256 = 44."""
    item = sample(as_arrays(TokenTrace([5], list(range(300)))))
    assert (sum(item.action_mask), sum(item.attention_mask)) == (300, 301)


@given(traces(), st.integers(1, 6))
def test_truncation_and_a_checkpoint_keep_arrays(trace, length):
    if not trace.prompt_token_ids and not trace.completion_token_ids:
        return
    ours, theirs = (truncate_and_flag(sample(each), length) for each in (as_arrays(trace), trace))
    batch = decode_batch(*encode_batch(SAWBatch([ours], {}), is_exact=True))
    for item in (batch.items[0], ours):
        assert {type(column) for column in columns_of(item)} == {Column}
        assert item == theirs


def test_arrays_of_a_user_stay_arrays_in_a_checkpoint():
    mask = np.ones(2, np.uint8)
    item = SAWItem(np.array([5, 6]), mask, mask, 1.0, {}, SampleAttachments(ActorTokenLogps(np.array([-0.5, -1.0]))))
    batch = decode_batch(*encode_batch(SAWBatch([item], {}), is_exact=True))
    assert {type(column) for column in columns_of(batch.items[0])} == {np.ndarray}
    assert type(batch.items[0].input_ids) is np.ndarray


@given(st.lists(st.floats(allow_nan=False)))
def test_a_column_of_floats_is_32_bits_wide_only_if_that_changes_nothing(values):
    """In float32, 1 + 2^-23 is a number and 1 + 2^-24 is not; 1e300 would be infinite."""
    column = float_column(values)
    assert column.tolist() == values
    with np.errstate(over="ignore"):
        exact = all(float(np.float32(value)) == value for value in values)
    assert column.dtype == (np.float32 if exact else np.float64)


@given(st.integers(0, 40_000), st.integers(0, 40_000))
def test_a_mask_has_zeros_and_then_ones(num_zeros, num_ones):
    mask = mask_column(num_zeros, num_ones)
    assert mask.tolist() == [0] * num_zeros + [1] * num_ones
    assert not mask.flags.writeable


def test_examples_of_widths():
    assert float_column([1 + 2**-23]).dtype == np.float32
    assert float_column([1 + 2**-24]).dtype == np.float64
    assert float_column([1e300]).tolist() == [1e300]
    assert float_column(np.array([-0.1], np.float32)).dtype == np.float32
    assert mask_column(2, 1).tolist() == [0, 0, 1]


@pytest.mark.parametrize(("ids", "error"), [([2**31], DataError), ([-(2**31) - 1], DataError), ([2**70], DataError)])
def test_ids_that_32_bits_cannot_hold_are_refused(ids, error):
    with pytest.raises(error, match="bits"):
        int_column(ids)
    if abs(ids[0]) < 2**63:
        with pytest.raises(error, match="must fit in 32 bits"):
            int_column(np.array(ids, np.int64))


@pytest.mark.parametrize("values", [[0.5], ["a"], [[1]], 3])
def test_ids_of_other_types_are_refused(values):
    with pytest.raises(DataTypeError, match="token ids"):
        int_column(values)


@pytest.mark.parametrize("values", [["a"], [[0.5]], None])
def test_log_probabilities_of_other_types_are_refused(values):
    with pytest.raises(DataTypeError, match="log-probabilities"):
        float_column(values)


def test_log_probabilities_of_another_number_of_tokens_are_refused():
    with pytest.raises(DataError, match="1 values for 2 tokens"):
        TokenTrace.from_arrays(np.array([1]), np.array([2, 3]), np.array([-0.5]))


@pytest.mark.parametrize("changes", [{"completion_token_ids": [7, 3]}, {"finish_reason": None}, {"completion_logprobs": None}])
def test_traces_that_differ_are_not_equal(changes):
    trace = TokenTrace([5, 6], [7, 2], [-0.5, -0.25], "stop")
    assert as_arrays(trace) != replace(trace, **changes)
    assert as_arrays(trace) != as_arrays(replace(trace, **changes))


def test_an_encoder_that_reads_the_dictionary_is_given_asdict():
    trace = as_arrays(TokenTrace([5], [7], [-0.5], "stop"))
    with pytest.raises(TypeError, match="Column"):
        msgspec.json.encode(trace)
    assert msgspec.json.decode(msgspec.json.encode(asdict(trace)), type=TokenTrace) == trace


def test_data_classes_behave_as_without_columns():
    @dataclass
    class Tagged(SAWItem):
        tag: str = ""

    assert Tagged([1], [1], [1], 1.0, tag="a").input_ids == [1]
    assert Tagged(int_column([1]), [1], [1], 1.0).input_ids == [1]
    with pytest.raises(TypeError, match="input_ids"):
        SAWItem()
    with pytest.raises(AttributeError, match="input_ids"):
        SAWItem.input_ids  # noqa: B018
    assert ChatResponse.prompt_token_ids is None
    with pytest.raises(AttributeError):
        TokenTrace([1], [2]).prompt_token_ids = [3]
    with pytest.raises(TypeError, match="unhashable"):
        hash(as_arrays(TokenTrace([1], [2])))
    item = SAWItem([1], [1], [1], 1.0)
    del item.input_ids
    with pytest.raises(AttributeError, match="input_ids"):
        item.input_ids  # noqa: B018


def test_the_mean_of_an_empty_list_is_zero():
    assert mean_or_zero([]) == array_mean_or_zero(np.zeros(0)) == 0.0


def test_the_mean_of_numbers_or_booleans_is_a_float():
    assert mean_or_zero([1, 2]) == 1.5
    assert mean_or_zero([True, False, False, False]) == 0.25
    assert array_mean_or_zero(np.array([True, True, False, False])) == 0.5
    assert type(mean_or_zero([1])) is type(array_mean_or_zero(np.ones(1))) is float


@given(st.lists(st.tuples(st.integers(0, 20), IDS), max_size=12))
def test_turns_that_continue_each_other_are_their_ids_and_share_memory(turns):
    """A tree of turns: each continues an earlier one, or nothing."""
    made, wanted = [int_column([])], [[]]
    for which, ids in turns:
        earlier = which % len(made)
        made.append(append_ids(made[earlier], ids))
        wanted.append(wanted[earlier] + ids)
    assert [each.tolist() for each in made] == wanted
    line = [append_ids(int_column([]), [1, 2])]
    for number in range(3):
        line.append(append_ids(line[-1], [number]))
    assert all(np.shares_memory(each, line[1]) for each in line[1:])


@given(IDS, IDS, st.integers(0, 5), st.integers(0, 5))
def test_the_parts_of_one_column_are_joined_without_a_copy(prompt, completion, at, end):
    whole = append_ids(append_ids(int_column([]), prompt), completion)
    for left, right in [(prompt, completion), (int_column(prompt), int_column(completion)), (whole[:at], whole[end:])]:
        assert join_ids(left, right).tolist() == [*left, *right]
    assert join_ids(whole[: len(prompt)], whole[len(prompt) :]) is whole
    assert not whole.flags.writeable
    assert join_ids(whole[:4:2], whole[2:]).tolist() == [*whole[:4:2], *whole[2:]]
