"""Preprocessing of batches, and what presets build."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from loss_batches import Bigram, padded, rows

from ludic.errors import ConfigError, ConfigTypeError, DataError, DataTypeError
from ludic.training.algorithm import (
    RLAlgorithm,
    compose_preprocess,
    drop_zero_weight_samples,
    filter_zero_variance_groups,
    validate_actor_logps,
)
from ludic.training.credit_assignment import ConstantCredit
from ludic.training.loss import MaskedCausalLMCrossEntropyLoss
from ludic.training.types import ActorTokenLogps, SampleAttachments, SAWBatch, SAWItem


def item(weight=1.0, group=None, logps=(-0.5, -0.25), mask=(0, 1, 1)):
    meta = {} if group is None else {"request_meta": {"group_id": group}}
    attached = SampleAttachments(None if logps is None else ActorTokenLogps(list(logps)))
    return SAWItem([5] * len(mask), [1] * len(mask), list(mask), weight, meta, attached)


def test_samples_with_one_log_probability_for_each_action_pass():
    batch = SAWBatch([item(), item(logps=(), mask=(0, 0))])
    assert validate_actor_logps(batch) is batch


def test_missing_log_probabilities_are_listed():
    with pytest.raises(DataError, match=r"^2 of 4 samples \(1, 3\) .*actor_logps; .*ReturnSpec\.for_rl\(\)"):
        validate_actor_logps(SAWBatch([item(), item(logps=None), item(), item(logps=None)]))
    with pytest.raises(DataError, match=r"^255 of 255 samples \(0, 1, 2 .*252 more\) .*actor_logps"):
        validate_actor_logps(SAWBatch([item(logps=None)] * 255))


def test_the_error_of_a_wrong_number_of_log_probabilities_names_the_sample():
    with pytest.raises(ValueError, match="sample 1: 1 values for 2"):
        validate_actor_logps(SAWBatch([item(), item(logps=(-0.5,))]))


def test_the_length_is_checked_before_the_type():
    wrong = item()
    object.__setattr__(wrong.attachments.actor_logps, "token_logps", ["a"])
    with pytest.raises(DataError, match="length mismatch"):
        validate_actor_logps(SAWBatch([wrong]))
    object.__setattr__(wrong.attachments.actor_logps, "token_logps", ["a", "b"])
    with pytest.raises(DataTypeError, match=r"must be a List\[float\]"):
        validate_actor_logps(SAWBatch([wrong]))


def test_float_arrays_are_accepted_as_log_probabilities():
    array = item()
    array.attachments = SampleAttachments(ActorTokenLogps(np.array([-0.5, -0.25], dtype=np.float32)))
    batch = SAWBatch([array])
    assert validate_actor_logps(batch) is batch


def test_weights_within_eps_of_zero_are_dropped():
    batch = SAWBatch([item(0.0), item(1e-4), item(-1e-4), item(1.1e-4), item(-2.0)])
    assert [kept.weight for kept in drop_zero_weight_samples(batch).items] == [1.1e-4, -2.0]
    with pytest.raises(ConfigError, match=r"eps must be >= 0, got -1\.0"):
        drop_zero_weight_samples(batch, eps=-1.0)


def test_groups_without_variance_are_dropped_and_the_order_stays():
    batch = SAWBatch([item(1.0, "a"), item(3.0, "b"), item(1.0, "a"), item(2.0), item(-3.0, "b"), item(0.0, "single")])
    filtered = filter_zero_variance_groups(batch)
    assert [i.weight for i in filtered.items] == [3.0, 2.0, -3.0, 0.0]
    assert filtered.meta["zvp_filter_frac"] == pytest.approx(1 / 3)  # a of a, b, single


def test_group_variance_uses_the_sample_standard_deviation():
    # Weights 0 and d: the sample standard deviation is d / sqrt(2).
    eps = 1e-3
    just_over = SAWBatch([item(0.0, "g"), item(eps * math.sqrt(2) * 1.01, "g")])
    just_under = SAWBatch([item(0.0, "g"), item(eps * math.sqrt(2) * 0.99, "g")])
    assert len(filter_zero_variance_groups(just_over, eps=eps).items) == 2
    assert len(filter_zero_variance_groups(just_under, eps=eps).items) == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 1)), max_size=20))
def test_groups_that_pass_the_filter_have_variance(weights_and_groups):
    batch = filter_zero_variance_groups(SAWBatch([item(float(w), g) for g, w in weights_and_groups]))
    groups = {}
    for sample in batch.items:
        groups.setdefault(sample.meta["request_meta"]["group_id"], []).append(sample.weight)
    assert all(len(weights) == 1 or len(set(weights)) > 1 for weights in groups.values())


def test_preprocessing_runs_from_left_to_right():
    calls = []
    fns = [lambda batch, n=n: calls.append(n) or batch for n in range(3)]
    compose_preprocess(*fns)(SAWBatch([]))
    assert calls == [0, 1, 2]


def test_logits_are_reduced_in_float32_by_default():
    model, batch = Bigram().bfloat16(), padded(rows(3, seed=1))
    algorithm = RLAlgorithm("sft", ConstantCredit(), MaskedCausalLMCrossEntropyLoss())
    wide, _ = algorithm.compute_loss(model, batch)
    narrow, _ = algorithm.compute_loss(model, batch, cast_logits_to_fp32=False)
    exact, _ = algorithm.compute_loss(model.double(), batch)
    assert wide.dtype == torch.float32
    assert abs(wide - exact) < 1e-5 < abs(narrow - exact)


@pytest.mark.parametrize(("given", "kind"), [(torch.tensor(1.0), "Tensor"), (None, "NoneType"), ((torch.tensor(1.0),), "tuple")])
def test_the_error_of_a_loss_without_statistics_says_what_to_return(given, kind):
    class Bare:
        def compute(self, logits, batch):
            return given

    with pytest.raises(ConfigTypeError, match=rf"Bare returned {kind}; .*loss .*statistics"):
        RLAlgorithm("bare", ConstantCredit(), Bare()).compute_loss(Bigram(), padded(rows(2, seed=1)))
