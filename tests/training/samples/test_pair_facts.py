"""The fields of a preference sample and the errors of invalid ones."""

import numpy as np
import pytest

from ludic.errors import DataError, DataKeyError
from ludic.training.samples.preference import check_label, meta_value, same_tokens
from ludic.training.types import SAWItem


def sample(ids, **meta):
    return SAWItem(ids, [1] * len(ids), [1] * len(ids), 1.0, meta)


@pytest.mark.parametrize("label", [0, 1.0, np.float32(0.5), np.int64(1)])
def test_a_label_is_a_number_between_0_and_1(label):
    assert check_label(label, "row 3") == float(label)


@pytest.mark.parametrize("label", [-0.1, 1.5, float("nan"), "1", None])
def test_an_invalid_label_is_refused_and_named(label):
    with pytest.raises(DataError, match=r"label of row 3 .*at least 0 and at most 1"):
        check_label(label, "row 3")


def test_a_missing_key_names_the_sample_and_its_keys():
    assert meta_value(sample([1], pair_id="a"), 0, "pair_id") == "a"
    with pytest.raises(DataKeyError, match=r"sample 4 has no 'role' .*'pair_id'"):
        meta_value(sample([1], pair_id="a"), 4, "role")


def test_samples_are_compared_by_token_ids_in_lists_and_arrays():
    assert same_tokens(sample([1, 2]), sample(np.array([1, 2], dtype=np.int32)))
    assert not same_tokens(sample([1, 2]), sample([1, 3]))
    assert not same_tokens(sample([1, 2]), sample([1, 2, 3]))
