"""Importance weights for samples of another engine: values by hand, their effect on the gradient,
and independence of the split."""

import math

import pytest
import torch
from hypothesis import given, strategies as st
from loss_batches import Bigram, packed, padded, rows, two_token_batch
from tests.training.loss.test_partition import partitions, totals_of

from ludic.errors import ConfigError, DataKeyError
from ludic.training.algorithm import RLAlgorithm
from ludic.training.credit_assignment import ConstantCredit
from ludic.training.loss import (
    DPPO,
    M2PO,
    CISPOLoss,
    ClippedSurrogateLoss,
    IcePop,
    KPop,
    MaskedImportanceSampling,
    ReinforceLoss,
    TokenClippedSurrogateLoss,
    TruncatedImportanceSampling,
    resolve_correction,
)
from ludic.training.loss.batch import LOG_RATIO_BOUND
from ludic.training.loss.context import SharedContext

LOG_RATIOS = torch.tensor([[0.1, 0.5, 1.0, 1.9, 2.1, 6.0]]).log()
MASK = torch.ones(1, 6)


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (TruncatedImportanceSampling(cap=2.0), [0.1, 0.5, 1.0, 1.9, 2.0, 2.0]),
        (MaskedImportanceSampling(cap=2.0), [0.1, 0.5, 1.0, 1.9, 0.0, 0.0]),
        (IcePop(low=0.5, high=5.0), [0.0, 0.5, 1.0, 1.9, 2.1, 0.0]),
        # 0.1 * 0.5 * 1 * 1.9 * 2.1 * 6 = 1.197
        (TruncatedImportanceSampling(cap=2.0, level="sequence"), [1.197] * 6),
        (TruncatedImportanceSampling(cap=1.1, level="sequence"), [1.1] * 6),
        (MaskedImportanceSampling(cap=1.1, level="sequence"), [0.0] * 6),
    ],
)
def test_weights_follow_the_formula(correction, expected):
    torch.testing.assert_close(correction.weights(LOG_RATIOS, MASK), torch.tensor([expected]), rtol=1e-5, atol=1e-6)


def weights_at(correction, ratios, advantages, *, vocabulary=2):
    """Weights of tokens that have the probability 1 / `vocabulary` in the trainer."""
    logits, batch = two_token_batch(ratios, advantages, vocabulary)
    return SharedContext(logits, batch, correction=correction).correction_weight[:, 0].tolist()


def test_kpop_drops_by_the_binary_kl_in_both_directions():
    # The trainer has p = 0.5, and the sampler q = p / w. KL(p, q) and KL(q, p) in nats:
    # w = 1.25, q = 0.4:    0.0204, 0.0201
    # w = 5, q = 0.1:       0.5 log 5 + 0.5 log(5/9) = 0.511
    # w = 0.6, q = 0.8333:  0.294, 0.243
    assert weights_at(KPop(), [1.25, 5.0, 0.6], [1.0] * 3) == pytest.approx([1.25, 0.0, 0.0])
    assert weights_at(KPop(0.25), [0.6], [1.0]) == [0.0]  # one direction is enough
    assert weights_at(KPop(0.3), [0.6], [1.0]) == pytest.approx([0.6])
    # p = 0.001, q = 0.0002: 0.001 log 5 - 0.999 * 0.0008 = 0.0008
    assert weights_at(KPop(), [5.0], [1.0], vocabulary=1000) == pytest.approx([5.0], rel=1e-4)


def test_dppo_drops_what_moves_on_from_the_sampler():
    ratios, advantages = [5.0, 5.0, 0.6, 0.6, 1.25, 5.0], [1.0, -1.0, 1.0, -1.0, 1.0, 0.0]
    # |p - q| = 0.4 for w = 5, 0.333 for 0.6, 0.1 for 1.25; the KL of q from p: 0.368, 0.243, 0.0201
    expected = [0.0, 5.0, 0.6, 0.0, 1.25, 5.0]
    assert weights_at(DPPO(), ratios, advantages) == pytest.approx(expected)
    assert weights_at(DPPO(0.05, "kl"), ratios, advantages) == pytest.approx(expected)
    assert weights_at(DPPO(0.35), ratios, advantages) == pytest.approx([0.0, 5.0, 0.6, 0.6, 1.25, 5.0])
    assert weights_at(DPPO(0.3, "kl"), ratios, advantages) == pytest.approx([0.0, 5.0, 0.6, 0.6, 1.25, 5.0])


@pytest.mark.parametrize(
    ("log_ratio", "threshold", "bound"),
    [
        ([0.1, -0.2, 0.5], 0.04, 0.5),  # means of the smallest squares: 0.01, 0.025, 0.1
        ([0.1, -0.2, 0.5], 0.02, 0.2),
        ([0.1, -0.2, 0.5], 0.005, 0.1),  # all are dropped
        ([0.1, -0.2, 0.5], 0.11, math.inf),
        ([-0.5, 0.1, 0.5], 0.15, 0.5),  # 0.01, 0.13, 0.17: of two equal ones both are dropped
        ([], 0.04, math.inf),
    ],
)
def test_m2po_keeps_the_smallest_log_ratios_up_to_a_mean_square(log_ratio, threshold, bound):
    assert M2PO(threshold).bound(torch.tensor(log_ratio)) == pytest.approx(bound)


def test_m2po_drops_from_the_bound_of_the_step_on():
    logits, batch = two_token_batch([1.25, 0.5, 2.0, 3.0], [1.0] * 4)
    batch[LOG_RATIO_BOUND] = torch.full((4,), 0.6931)  # just below log 2
    weights = SharedContext(logits, batch, correction=M2PO()).correction_weight[:, 0]
    assert weights.tolist() == pytest.approx([1.25, 0.0, 0.0, 0.0])
    del batch[LOG_RATIO_BOUND]
    with pytest.raises(DataKeyError, match="no log_ratio_bound; train with Trainer"):
        _ = SharedContext(logits, batch, correction=M2PO()).correction_weight


@pytest.mark.parametrize("wrong", [lambda: KPop(0.0), lambda: M2PO(math.inf), lambda: DPPO(0.0)])
def test_a_threshold_is_a_finite_number_above_0(wrong):
    with pytest.raises(ConfigError, match="threshold"):
        wrong()


@pytest.mark.parametrize("correction", [KPop(), DPPO(), DPPO(divergence="kl"), M2PO()])
@pytest.mark.parametrize("sampled", [0.0, -1e-9, -800.0])
def test_extreme_probabilities_give_finite_weights(correction, sampled):
    logits, batch = two_token_batch([1.0, 1.0], [1.0, -1.0])
    batch |= {"actor_logps": torch.full((2, 2), sampled), LOG_RATIO_BOUND: torch.full((2,), 5.0)}
    with torch.no_grad():
        logits[:, :, 0] = 1000.0  # probability 1
    assert SharedContext(logits, batch, correction=correction).correction_weight.isfinite().all()


def test_an_enormous_ratio_gives_a_finite_weight():
    far = torch.tensor([[800.0, -800.0]])
    assert TruncatedImportanceSampling().weights(far, MASK[:, :2]).tolist() == [[2.0, 0.0]]
    assert MaskedImportanceSampling().weights(far, MASK[:, :2]).tolist() == [[0.0, 0.0]]
    assert IcePop().weights(far, MASK[:, :2]).tolist() == [[0.0, 0.0]]


def algorithm(loss, correction):
    return RLAlgorithm("test", ConstantCredit(), loss, correction=correction)


def gradient(loss, correction, parts, collate, totals=None):
    model = Bigram()
    for part in parts:
        value, _ = algorithm(loss, correction).compute_loss(model, collate(part), totals=totals)
        value.backward()
    return model.table.grad


@pytest.mark.parametrize("ratio", [0.3, 1.5, 4.0])
def test_the_gradient_is_the_on_policy_gradient_times_the_weight(ratio):
    """Policy gradient with ratio 1 against the trainer's policy, times min(w, 2), where w =
    pi_trainer / pi_sampler = `ratio`."""
    logits, batch = two_token_batch([ratio], [1.5])
    shared = SharedContext(logits, batch, correction=TruncatedImportanceSampling(cap=2.0))
    TokenClippedSurrogateLoss(clip_eps_low=0.2, clip_eps_high=0.2).compute(logits, batch, shared=shared)[0].backward()
    # d/dx of -A log softmax(x)[0] at x = 0 over two tokens is -A (1 - 1/2, -1/2)
    weight = min(ratio, 2.0)
    expected = torch.tensor([-1.5 * weight * 0.5, 1.5 * weight * 0.5])
    torch.testing.assert_close(logits.grad[0, 0], expected)
    assert shared.ratio[0, 0].item() == pytest.approx(1.0)  # nothing is clipped, however far apart the engines are


def test_ratios_are_relative_to_the_policy_at_the_start_of_the_step():
    """The sampler had 1/8, the trainer 1/4 at the start of the step and 1/2 now: ratio 2, clipped
    at 1.2; weight 2."""
    logits, batch = two_token_batch([4.0], [1.0])
    batch["proximal_logps"] = torch.tensor([[0.0, math.log(0.25)]])
    shared = SharedContext(logits, batch, correction=TruncatedImportanceSampling(cap=3.0))
    loss, stats = TokenClippedSurrogateLoss(clip_eps_low=0.2, clip_eps_high=0.2).compute(logits, batch, shared=shared)
    assert shared.ratio.item() == pytest.approx(2.0)
    assert shared.correction_weight.item() == pytest.approx(2.0)
    assert loss.item() == pytest.approx(-1.2)
    assert stats["clip_frac"].item() == 1.0
    # the same by sequence
    whole = SharedContext(logits, batch, correction=TruncatedImportanceSampling(cap=3.0))
    assert ReinforceLoss().compute(logits, batch, shared=whole)[1]["ratio_mean"].item() == pytest.approx(2.0)


LOSSES = {
    "grpo": TokenClippedSurrogateLoss(normalizer="tokens"),
    "gspo": ClippedSurrogateLoss(0.2, 0.3, length_normalize=True),
    "cispo": CISPOLoss(),
    "reinforce": ReinforceLoss(length_normalize=True),
}
CORRECTIONS = {
    "truncated": TruncatedImportanceSampling(),
    "truncated by sequence": TruncatedImportanceSampling(level="sequence"),
    "masked": MaskedImportanceSampling(),
    "masked by sequence": MaskedImportanceSampling(cap=4.0, level="sequence"),
    "icepop": IcePop(),
    "kpop": KPop(),
    "dppo": DPPO(),
    "m2po": M2PO(),
}


def with_proximal(collate, has_proximal):
    """Batches that also have the trainer's log-probabilities at the start of the step."""

    def collated(part):
        batch = collate(part)
        batch[LOG_RATIO_BOUND] = torch.ones(len(part))
        if has_proximal:
            batch["proximal_logps"] = (batch["actor_logps"] * 0.7 - 0.3) * batch["action_mask"]
        return batch

    return collated


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("name", LOSSES)
@given(partition=partitions(), layout=st.sampled_from(["padded", "padding-free"]), has_proximal=st.booleans())
def test_the_gradient_does_not_depend_on_the_split(name, correction, partition, layout, has_proximal):
    samples, parts = partition
    arguments = LOSSES[name], CORRECTIONS[correction]
    whole = gradient(*arguments, [samples], with_proximal(padded, has_proximal))
    collate = with_proximal(packed if layout == "padding-free" else padded, has_proximal)
    split = gradient(*arguments, parts, collate, totals_of(samples))
    torch.testing.assert_close(split, whole, rtol=0, atol=1e-6 * max(1.0, whole.abs().max().item()))


def test_a_correction_changes_the_gradient_but_not_the_policy_statistics():
    batch = padded(rows(8, seed=4))
    plain, corrected = (gradient(CISPOLoss(), c, [rows(8, seed=4)], padded) for c in (None, IcePop()))
    assert (plain - corrected).abs().max() > 1e-3
    stats = [algorithm(CISPOLoss(), c).compute_loss(Bigram(), batch)[1] for c in (None, IcePop())]
    assert stats[0]["logp_mean"] == stats[1]["logp_mean"]
    assert stats[0]["mismatch/abs_sum"] == stats[1]["mismatch/abs_sum"]


def test_a_loss_that_reads_the_logits_itself_cannot_be_corrected():
    class Own:
        def compute(self, logits, batch):
            return logits.sum(), {}

    with pytest.raises(ConfigError, match="must read `shared` for a correction"):
        algorithm(Own(), IcePop())


@pytest.mark.parametrize("wrong", [{"cap": 0.0}, {"cap": math.inf}, {"level": "turn"}])
def test_invalid_settings_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        TruncatedImportanceSampling(**wrong)
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        MaskedImportanceSampling(**wrong)


def test_the_bounds_of_icepop_must_be_in_order():
    with pytest.raises(ConfigError, match=r"high \(0.5\) must be above 5.0 .*low and high"):
        IcePop(low=5.0, high=0.5)


def test_corrections_are_selected_by_name():
    assert resolve_correction("icepop") == IcePop()
    assert resolve_correction(None) is None
    own = TruncatedImportanceSampling(3.0)
    assert resolve_correction(own) is own
    with pytest.raises(ConfigError, match="truncated, masked, icepop, kpop, m2po, dppo"):
        resolve_correction("ice")
