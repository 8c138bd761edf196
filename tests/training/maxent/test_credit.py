"""`ListwiseCredit`: weights of whole candidates, whatever their rows and their order."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st
from maxent_example import BETA, CENTRED, TAU, TEMPERED, W_BY_TOKENS, W_SHARED, B, N, R, U, W

from ludic.errors import ConfigError, DataError
from ludic.training.coefficients import Coefficient
from ludic.training.maxent import ListwiseCredit
from ludic.training.types import Candidates

EXAMPLE = Candidates(
    utility=U,
    group=np.repeat([0, 1], 4),
    rollout=np.arange(8),
    token_count=N,
    reference_logp=R * N,
    behaviour_logp=B * N,
)


def make(**changes):
    return ListwiseCredit(**{"group_size": 4, "tau": TAU, "beta": BETA, "sampler_exponent": 0.0, **changes})


def close(left, right, atol=1e-8):
    np.testing.assert_allclose(left, right, atol=atol, rtol=0)


def test_the_worked_example():
    weighed = make().weigh(EXAMPLE)
    close(weighed.weights, CENTRED)
    close(make(scale="tempered").weigh(EXAMPLE).weights, TEMPERED)
    close(make(baseline="none").weigh(EXAMPLE).weights / 4, W)
    close(make(sampler_exponent=0.5, baseline="none").weigh(EXAMPLE).weights / 4, W_SHARED)
    close(make(length_normalize_reference=False, baseline="none").weigh(EXAMPLE).weights / 4, W_BY_TOKENS)
    assert weighed.stats["weight_entropy"] == pytest.approx(0.94954635, abs=1e-8)
    assert weighed.stats["weight_entropy_max"] == pytest.approx(0.96391859, abs=1e-8)
    assert weighed.stats["weight_entropy_min"] == pytest.approx(0.93517411, abs=1e-8)
    assert weighed.stats["frac_zero_signal"] == 0.0
    assert weighed.stats["advantage_entropy_mean"] == pytest.approx(0.0, abs=1e-12)
    close(weighed.columns["listwise_weight"], W)
    close(weighed.columns["row_share"], np.ones(8))
    assert weighed.columns["candidate_tokens"].tolist() == N.tolist()
    assert weighed.groups is not None
    close(weighed.groups.reference_logp, R)
    close(weighed.groups.behaviour_logp, B)
    assert len(weighed.groups) == 2


@st.composite
def candidates_of_turns(draw):
    """Ragged groups of rollouts with 1 to 3 rows, and the same with one row each."""
    utility, group, rollout, tokens, reference, behaviour = [], [], [], [], [], []
    whole = []
    number = 0
    for index, size in enumerate(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))):
        for _ in range(size):
            u = draw(st.sampled_from([0.0, 0.5, 1.0]))
            rows = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
            r = [-count * draw(st.floats(0.1, 2)) for count in rows]
            b = [-count * draw(st.floats(0.1, 2)) for count in rows]
            for count, ri, bi in zip(rows, r, b, strict=True):
                for column, value in zip(
                    (utility, group, rollout, tokens, reference, behaviour), (u, index, number, count, ri, bi), strict=True
                ):
                    column.append(value)
            whole.append((u, index, number, sum(rows), sum(r), sum(b)))
            number += 1
    split = Candidates(*(np.array(c) for c in (utility, group, rollout, tokens, reference, behaviour)))
    return split, Candidates(*(np.array(c) for c in zip(*whole, strict=True)))


@given(candidates_of_turns(), st.sampled_from(["weights", "tempered"]), st.booleans(), st.floats(0, 2))
def test_several_rows_of_a_rollout_are_one_candidate(drawn, scale, normalised, exponent):
    split, whole = drawn
    credit = make(
        scale=scale, allow_partial=True, length_normalize_reference=normalised, sampler_exponent=exponent, q_epsilon=1e-4
    )
    of_rows, of_candidates = credit.weigh(split), credit.weigh(whole)
    close(of_rows.weights, of_candidates.weights[split.rollout], atol=1e-10)
    assert of_rows.stats == pytest.approx(of_candidates.stats, abs=1e-10)
    # the shares of a candidate's rows add up to the mean number of rows of a candidate
    shares = np.bincount(split.rollout, weights=of_rows.columns["row_share"])
    close(shares, np.full(len(shares), len(split.utility) / len(shares)), atol=1e-10)


@given(candidates_of_turns(), st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(drawn, random):
    rows, _ = drawn
    order = list(range(len(rows.utility)))
    random.shuffle(order)
    fields = ("utility", "group", "rollout", "token_count", "reference_logp", "behaviour_logp")
    shuffled = Candidates(*(getattr(rows, name)[order] for name in fields))
    credit = make(allow_partial=True, sampler_exponent=1.0)
    close(credit.weigh(shuffled).weights, credit.weigh(rows).weights[order], atol=1e-10)


@given(candidates_of_turns())
def test_the_surrogate_weights_of_a_group_add_up_to_nothing_and_equal_groups_have_none(drawn):
    _, whole = drawn
    credit = make(allow_partial=True, beta=0.0)
    weights = credit.weigh(whole).weights
    close(np.bincount(whole.group, weights=weights), np.zeros(whole.group.max() + 1), atol=1e-10)
    flat = replace(whole, utility=np.full(len(whole.utility), 0.3))
    weighed = credit.weigh(flat)
    assert not weighed.weights.any()  # exactly
    assert weighed.stats["frac_zero_signal"] == 1.0


def test_for_a_large_tau_the_tempered_credit_is_the_advantage_of_dr_grpo():
    """Also of ragged groups."""
    ragged = Candidates(np.array([1.0, 0, 0, 1, 0.5]), np.array([0, 0, 0, 1, 1]), np.arange(5), np.full(5, 3))
    credit = make(tau=1e6, beta=0.0, scale="tempered", q_epsilon=1e-12, allow_partial=True)
    close(credit.weigh(ragged).weights, [2 / 3, -1 / 3, -1 / 3, 0.25, -0.25], atol=1e-5)


def test_two_ranks_weigh_as_one():
    """The means of a rank's own groups are not those of all: ratios and statistics use the sums.

    First each rank says what it would send, then each gets what a reduction of both returns.
    """
    credit = make(allow_partial=True)
    parts = [np.array([0, 1, 2]), np.arange(4, 8)]

    def rows_of(rows, reduce=lambda values, operation: values):
        columns = (U[rows], EXAMPLE.group[rows], rows, N[rows], (R * N)[rows])
        return Candidates(
            *columns,
            sum_over_ranks=lambda values: reduce(values, np.add),
            max_over_ranks=lambda values: reduce(values, np.maximum),
        )

    sent: list[list[list[float]]] = []
    for rows in parts:
        sent.append([])
        credit.weigh(rows_of(rows, lambda values, _: sent[-1].append(values) or values))
    together = credit.weigh(rows_of(np.concatenate(parts)))
    expected = np.split(together.weights, [3])
    for rows, weights in zip(parts, expected, strict=True):
        pairs = zip(*sent, strict=True)
        alone = credit.weigh(rows_of(rows, lambda _, operation, pairs=pairs: operation(*next(pairs)).tolist()))
        close(alone.weights, weights, atol=1e-12)
        assert alone.stats == pytest.approx(together.stats, abs=1e-12)


def test_coefficients_are_read_at_each_batch():
    tau = Coefficient(0.3)
    credit = make(tau=tau)
    before = credit.weigh(EXAMPLE).stats
    tau.set(2.0)
    after = credit.weigh(EXAMPLE).stats
    assert (before["tau"], after["tau"]) == (0.3, 2.0)
    assert after["weight_entropy"] > before["weight_entropy"]


def test_the_reference_is_read_only_if_beta_may_be_above_zero():
    assert make().reads_reference
    assert make(beta=Coefficient(0.0)).reads_reference
    assert not make(beta=0.0).reads_reference
    make(beta=0.0).weigh(replace(EXAMPLE, reference_logp=None))
    with pytest.raises(DataError, match="reference"):
        make().weigh(replace(EXAMPLE, reference_logp=None))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"group_size": 1}, "at least 2"),
        ({"tau": 0.0, "beta": 0.0}, "both 0"),
        ({"q_epsilon": 0.25}, "q_epsilon"),
        ({"baseline": "mean"}, "baseline"),
        ({"scale": "std"}, "scale"),
        ({"sampler_exponent": -1.0}, "sampler_exponent"),
    ],
)
def test_wrong_settings_are_config_errors(changes, words):
    with pytest.raises(ConfigError, match=words):
        make(**changes)


def test_wrong_batches_are_data_errors():
    with pytest.raises(DataError, match="Group size mismatch"):
        make(group_size=5).weigh(EXAMPLE)
    with pytest.raises(DataError, match="Group size mismatch"):
        make(group_size=3, allow_partial=True).weigh(EXAMPLE)
    with pytest.raises(DataError, match="different utilities"):
        make(group_size=4, allow_partial=True).weigh(replace(EXAMPLE, rollout=np.array([0, 0, 1, 2, 3, 4, 5, 6])))
    with pytest.raises(DataError, match="sampler_exponent"):
        make(sampler_exponent=1.0).weigh(replace(EXAMPLE, behaviour_logp=None))
