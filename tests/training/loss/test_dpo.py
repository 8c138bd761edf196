"""The losses of direct preference optimization: numbers by hand, a slow oracle in float64, and no
dependence on the split."""

import math
import random

import pytest
import torch
from hypothesis import given, strategies as st
from loss_batches import Bigram, padded, rows

from ludic.errors import ConfigError, DataError, DataKeyError
from ludic.training import BatchTotals, DPOLoss, RLAlgorithm, make_dpo
from ludic.training.credit_assignment import ConstantCredit
from ludic.training.loss import SharedContext
from ludic.training.loss.batch import PREFERRED_LENGTH, PREFERRED_TOKENS

NAMES = (PREFERRED_TOKENS, PREFERRED_LENGTH)

TYPES = ("sigmoid", "ipo", "robust")
WITHOUT_REFERENCE = ("cpo", "simpo", "orpo")


def softplus(z):
    return math.log1p(math.exp(-abs(z))) + max(z, 0.0)


def pair_batch(log_ratios, labels=(1.0,), *, reference=-1.0):
    """A batch of pairs, chosen first: one sample for each list of log-ratios, of its action tokens.

    Its logits over two tokens give token 1 the log-probability `reference + log-ratio`."""
    width = max(map(len, log_ratios)) + 1
    count = len(log_ratios)
    logits = torch.zeros(count, width, 2, dtype=torch.float64)
    mask = torch.zeros(count, width)
    for sample, ratios in enumerate(log_ratios):
        for position, ratio in enumerate(ratios):
            p = math.exp(reference + ratio)
            logits[sample, position] = torch.tensor([math.log(1 - p), math.log(p)])
            mask[sample, position + 1] = 1.0
    meta = {
        "pair_id": [sample // 2 for sample in range(count)],
        "role": ["chosen", "rejected"] * (count // 2),
        "label": [labels[sample // 2 % len(labels)] for sample in range(count)],
    }
    ids = torch.ones(count, width, dtype=torch.long)
    batch = {"input_ids": ids, "attention_mask": ids, "action_mask": mask, "weight": torch.ones(count), "meta": meta}
    return logits.requires_grad_(), {**batch, "reference_logps": reference * mask}


def test_the_sigmoid_loss_by_hand():
    logits, batch = pair_batch([[0.5, 0.25], [-0.25], [0.0], [0.5]])
    loss, stats = DPOLoss(beta=2.0).compute(logits, batch)
    # log-ratios 0.75 and -0.25: h = 1, z = 2; 0 and 0.5: h = -0.5, z = -1.
    # softplus(-2) = 0.126928, softplus(1) = 1.313262
    assert loss.item() == pytest.approx((0.126928 + 1.313262) / 2, abs=1e-6)
    # sums of log pi: -2 + 0.75 = -1.25 and -1 + 0 = -1; -1 - 0.25 = -1.25 and -1 + 0.5 = -0.5
    assert {name: value.item() for name, value in stats.items()} == pytest.approx(
        {
            "loss": loss.item(),
            "rewards/chosen": 2 * (0.75 + 0.0) / 2,
            "rewards/rejected": 2 * (-0.25 + 0.5) / 2,
            "rewards/margins": (2.0 - 1.0) / 2,
            "rewards/accuracies": 0.5,
            "logps/chosen": (-1.25 - 1.0) / 2,
            "logps/rejected": (-1.25 - 0.5) / 2,
            "num_pairs": 2.0,
        },
        abs=1e-6,
    )


def test_label_smoothing_is_the_probability_of_a_wrong_label():
    logits, batch = pair_batch([[0.75], [-0.25]])
    loss, _ = DPOLoss(beta=2.0, label_smoothing=0.1).compute(logits, batch)
    # 0.9 softplus(-2) + 0.1 softplus(2) = 0.9 * 0.126928 + 0.1 * 2.126928
    assert loss.item() == pytest.approx(0.327, abs=5e-4)
    assert loss.item() == pytest.approx(0.9 * 0.126928 + 0.1 * 2.126928, abs=1e-6)


def test_ipo_divides_each_log_ratio_by_its_tokens():
    logits, batch = pair_batch([[0.5, 0.25, 0.15], [-0.25, -0.05]])
    loss, stats = DPOLoss(beta=0.5, loss_type="ipo").compute(logits, batch)
    # 0.9 / 3 - (-0.3 / 2) = 0.45; (0.45 - 1 / (2 * 0.5))^2 = 0.3025
    assert loss.item() == pytest.approx(0.3025, abs=1e-6)
    assert stats["rewards/margins"].item() == pytest.approx(0.5 * (0.9 + 0.3))  # of sums, as in TRL
    whole, _ = DPOLoss(beta=0.5, loss_type="ipo", length_normalize=False).compute(logits, batch)
    # (0.9 + 0.3 - 1)^2 = 0.04, eq. 17 as it stands
    assert whole.item() == pytest.approx(0.04, abs=1e-6)


def test_the_likelihood_of_the_chosen_answers_is_added_per_token():
    logits, batch = pair_batch([[0.5, 0.25], [-0.25], [0.0], [0.5]])
    plain, _ = DPOLoss(beta=2.0).compute(logits, batch)
    loss, stats = DPOLoss(beta=2.0, nll_coeff=0.4).compute(logits, batch)
    # log pi of the chosen answers: (-0.5 - 0.75) / 2 = -0.625 and -1 / 1; their mean is -0.8125
    assert stats["nll_loss"].item() == pytest.approx(0.8125, abs=1e-6)
    assert loss.item() == pytest.approx(plain.item() + 0.4 * 0.8125, abs=1e-6)
    assert stats["loss"].item() == loss.item()


def test_sigmoid_with_length_normalize_is_that_of_the_means():
    logits, batch = pair_batch([[0.5, 0.25, 0.15], [-0.25, -0.05]])
    loss, _ = DPOLoss(beta=4.0, length_normalize=True).compute(logits, batch)
    assert loss.item() == pytest.approx(softplus(-4.0 * 0.45), abs=1e-6)


def test_the_robust_loss_is_without_bias_under_flipped_labels():
    """A share eps of flipped pairs: the mean robust loss is the sigmoid loss of the true labels."""
    h, eps = 0.7, 0.2
    robust, plain = DPOLoss(loss_type="robust", label_smoothing=eps), DPOLoss()
    one, other = (
        robust.of_differences(torch.tensor([sign * h], dtype=torch.float64), torch.ones(1, dtype=torch.float64)).item()
        for sign in (1, -1)
    )
    truth = plain.of_differences(torch.tensor([h], dtype=torch.float64), torch.ones(1, dtype=torch.float64)).item()
    assert (1 - eps) * one + eps * other == pytest.approx(truth, abs=1e-12)


def test_the_optimum_of_a_smoothed_loss_is_the_log_odds_of_the_label():
    """d/dh = 0 at sigma(beta h) = 1 - eps for sigmoid, at h = (1 - 2 eps) / (2 beta) for IPO."""
    beta, eps = 0.5, 0.1
    for loss_type, best in (("sigmoid", math.log((1 - eps) / eps) / beta), ("ipo", (1 - 2 * eps) / (2 * beta))):
        h = torch.tensor([best], dtype=torch.float64, requires_grad=True)
        DPOLoss(beta, loss_type, eps).of_differences(h, torch.ones(1, dtype=h.dtype)).sum().backward()
        assert h.grad.item() == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("loss_type", TYPES)
def test_a_label_of_zero_swaps_the_pair(loss_type):
    loss = DPOLoss(0.3, loss_type, 0.1)
    h = torch.tensor([0.4, -2.0, 1.5])
    zeros = loss.of_differences(h, torch.zeros(3))
    torch.testing.assert_close(zeros, loss.of_differences(-h, torch.ones(3)))
    half = loss.of_differences(h, torch.full((3,), 0.5))
    torch.testing.assert_close(half, (zeros + loss.of_differences(h, torch.ones(3))) / 2)


def test_a_policy_that_is_its_reference_has_loss_log_2_and_no_right_pair():
    _, batch = pair_batch([[0.0, 0.0], [0.0]])
    logits = torch.zeros(2, 3, 2, requires_grad=True)
    batch["reference_logps"] = logits.detach().log_softmax(-1)[..., 1]
    loss, stats = DPOLoss().compute(logits, batch)
    assert loss.item() == pytest.approx(math.log(2))
    assert stats["rewards/accuracies"].item() == 0.0  # a tie is wrong
    loss.backward()
    # dL/dh = -beta sigma(-beta h) = -0.1 / 2 = -0.05, times dh/d logit = 1 - 0.5, of each token
    torch.testing.assert_close(logits.grad[..., 1], torch.tensor([[-0.025, -0.025, 0.0], [0.025, 0.0, 0.0]]))


@pytest.mark.parametrize("noise", [0.0, 5e-7, -5e-7])
def test_a_difference_within_rounding_is_a_tie(noise):
    # Two answers of log-probability -1.5 + noise and -1.5: 5e-7 is less than 1e-6 * 3.
    _, stats = DPOLoss().compute(*pair_batch([[noise], [0.0]], reference=-1.5))
    assert stats["rewards/accuracies"].item() == 0.0
    _, stats = DPOLoss().compute(*pair_batch([[4e-6], [0.0]], reference=-1.5))
    assert stats["rewards/accuracies"].item() == 1.0


def test_the_losses_without_a_reference_by_hand():
    logits, batch = pair_batch([[0.5, 0.25], [-0.25]])
    del batch["reference_logps"]
    # log pi of the tokens: -0.5, -0.75 and -1.25. Sums: -1.25 and -1.25; means: -0.625 and -1.25.
    cpo, stats = DPOLoss(0.5, "cpo", cpo_alpha=0.2).compute(logits, batch)
    assert cpo.item() == pytest.approx(math.log(2) + 0.2 * 0.625, abs=1e-6)
    assert stats["nll_loss"].item() == pytest.approx(0.625, abs=1e-6)
    simpo, stats = DPOLoss(2.0, "simpo", simpo_gamma=0.5).compute(logits, batch)
    assert simpo.item() == pytest.approx(softplus(-(2 * 0.625 - 0.5)), abs=1e-6)
    assert stats["rewards/chosen"].item() == pytest.approx(2 * -0.625, abs=1e-6)
    orpo, _ = DPOLoss(0.1, "orpo").compute(logits, batch)
    # odds: e^-0.625 / (1 - e^-0.625) = 1.15143 and e^-1.25 / (1 - e^-1.25) = 0.40157; the log of
    # their ratio is 1.05336.
    assert orpo.item() - orpo_nll(logits, batch) == pytest.approx(0.1 * softplus(-1.05336), abs=1e-5)


def orpo_nll(logits, batch):
    """The mean of -log pi over all tokens of the chosen sample, token by token."""
    logp = logits[0].log_softmax(-1)
    taken = [t for t in range(1, logits.shape[1]) if batch["attention_mask"][0, t]]
    return -sum(logp[t - 1, batch["input_ids"][0, t]].item() for t in taken) / len(taken)


def test_the_margin_of_simpo_holds_in_either_order():
    h = torch.tensor([0.0])
    loss = DPOLoss(2.0, "simpo", simpo_gamma=0.5)
    for label in (0.0, 1.0):
        assert loss.of_differences(h, torch.tensor([label])).item() == pytest.approx(softplus(0.5))


def test_orpo_is_finite_where_the_probability_rounds_to_one():
    logits = torch.zeros(2, 2, 2)
    logits[:, 0, 1] = 200.0
    _, batch = pair_batch([[0.0], [0.0]])
    logits.requires_grad_()
    loss, _ = DPOLoss(0.1, "orpo").compute(logits, batch)
    loss.backward()
    assert loss.isfinite()
    assert logits.grad.isfinite().all()


# --- a slow oracle, and any split


def oracle(model, samples, settings):
    """The loss of whole pairs in float64, token by token, from the formulas of the papers."""
    beta, loss_type, eps, nll_coeff = settings
    table = model.table.double()
    losses, nll = [], []
    for chosen, rejected in zip(samples[::2], samples[1::2], strict=True):
        ratios = []
        for sample in (chosen, rejected):
            ids, mask, reference = sample["input_ids"], sample["action_mask"], sample["actor_logps"].double()
            taken = [t for t in range(1, len(ids)) if mask[t]]
            if sample is chosen:
                own = [table[ids[t - 1]].log_softmax(0)[ids[t]] for t in taken]
                nll.append(-sum(own, start=table.sum() * 0) / max(1, len(taken)))
            if loss_type == "orpo":
                ratios.append(own_odds(table, ids, taken))
                continue
            held = torch.zeros_like(reference) if loss_type in WITHOUT_REFERENCE else reference
            total = sum((table[ids[t - 1]].log_softmax(0)[ids[t]] - held[t] for t in taken), start=table.sum() * 0)
            ratios.append(total / max(1, len(taken)) if loss_type in ("ipo", "simpo") else total)
        h = ratios[0] - ratios[1]
        right, wrong = -torch.nn.functional.logsigmoid(beta * h), -torch.nn.functional.logsigmoid(-beta * h)
        if loss_type == "ipo":
            right, wrong = (h - 1 / (2 * beta)) ** 2, (-h - 1 / (2 * beta)) ** 2
        if loss_type == "simpo":
            right = -torch.nn.functional.logsigmoid(beta * h - 0.5)
        if loss_type == "orpo":
            right = -beta * torch.nn.functional.logsigmoid(h)
        if loss_type == "robust":
            losses.append(((1 - eps) * right - eps * wrong) / (1 - 2 * eps))
        else:
            losses.append((1 - eps) * right + eps * wrong)
    if loss_type in WITHOUT_REFERENCE:
        return torch.stack(losses).mean() + nll_coeff * token_mean(table, samples[::2], whole=loss_type == "orpo")
    return torch.stack(losses).mean() + nll_coeff * torch.stack(nll).mean()


def own_odds(table, ids, taken):
    mean = sum((table[ids[t - 1]].log_softmax(0)[ids[t]] for t in taken), start=table.sum() * 0) / max(1, len(taken))
    p = mean.exp().clamp(max=1 - 1e-7)
    return (p / (1 - p)).log()


def token_mean(table, samples, *, whole):
    """The mean of -log pi over the tokens of all samples, with `whole` also of their prompts."""
    logps = [
        table[ids[t - 1]].log_softmax(0)[ids[t]]
        for ids, mask in ((sample["input_ids"], sample["action_mask"]) for sample in samples)
        for t in range(1, len(ids))
        if whole or mask[t]
    ]
    return -sum(logps, start=table.sum() * 0) / max(1, len(logps))


def collate_pairs(pairs):
    """A padded batch of (number, chosen, rejected), with the reference in place of the sampler."""
    samples = [sample for _, chosen, rejected in pairs for sample in (chosen, rejected)]
    batch = padded(samples)
    meta = {
        "pair_id": [number for number, *_ in pairs for _ in range(2)],
        "role": ["chosen", "rejected"] * len(pairs),
        "label": [1.0] * len(samples),
    }
    return {**batch, "reference_logps": batch["actor_logps"], "meta": meta}


def test_a_label_below_a_half_makes_the_other_answer_the_preferred_one():
    samples = rows(2, seed=1)
    algorithm = RLAlgorithm("dpo", ConstantCredit(1.0), DPOLoss(0.5, nll_coeff=0.5))
    given = collate_pairs([(0, *samples)])
    swapped = collate_pairs([(0, *samples[::-1])])
    given["meta"]["label"], swapped["meta"]["label"] = [0.25, 0.25], [0.75, 0.75]
    values = [algorithm.compute_loss(Bigram(), batch)[0].item() for batch in (given, swapped)]
    assert values[0] == pytest.approx(values[1], rel=1e-6)


@st.composite
def divided_pairs(draw):
    """Samples in pairs, and the pairs in random order, cut at random places."""
    count = draw(st.integers(1, 6))
    samples = rows(2 * count, seed=draw(st.integers(0, 10_000)))
    pairs = [(number, samples[2 * number], samples[2 * number + 1]) for number in range(count)]
    random.Random(draw(st.integers(0, 99))).shuffle(pairs)
    cuts = sorted(draw(st.sets(st.integers(1, count))) - {count})
    return samples, [pairs[a:b] for a, b in zip([0, *cuts], [*cuts, count], strict=True)]


@pytest.mark.parametrize("loss_type", [*TYPES, *WITHOUT_REFERENCE])
@given(
    divided=divided_pairs(),
    beta=st.sampled_from([0.05, 0.1, 1.0]),
    eps=st.sampled_from([0.0, 0.1, 0.3]),
    nll=st.sampled_from([0.0, 0.5]),
)
def test_value_and_gradient_are_those_of_the_oracle_for_any_split(loss_type, divided, beta, eps, nll):
    samples, parts = divided
    own = {"nll_coeff": nll}
    if loss_type in WITHOUT_REFERENCE:
        eps, nll = (eps, nll) if loss_type == "cpo" else (0.0, 1.0 if loss_type == "orpo" else nll)
        own = {} if loss_type == "orpo" else {"cpo_alpha": nll}
    slow = Bigram()
    expected = oracle(slow, samples, (beta, loss_type, eps, nll))
    expected.backward()
    model, algorithm = Bigram(), RLAlgorithm("dpo", ConstantCredit(1.0), DPOLoss(beta, loss_type, eps, **own))
    tokens = (
        [sum(sample["action_mask"][1:]) for sample in samples[::2]],
        [len(sample["input_ids"]) - 1 for sample in samples[::2]],
    )
    measured = {name: torch.tensor(float(sum(each))) for name, each in zip(NAMES, tokens, strict=True)}
    totals = BatchTotals(float(len(samples)), 1.0, 0.0, 0.0, num_pairs=len(samples) / 2, measured=measured)
    value = 0.0
    for part in parts:
        loss, _ = algorithm.compute_loss(model, collate_pairs(part), totals=totals)
        loss.backward()
        value += loss.item()
    largest = max(1.0, abs(expected.item()), slow.table.grad.abs().max().item())
    assert value == pytest.approx(expected.item(), abs=1e-6 * largest)
    torch.testing.assert_close(model.table.grad, slow.table.grad, atol=2e-6 * largest, rtol=0)


# --- errors


@pytest.mark.parametrize("beta", [0.0, -0.1, math.inf, math.nan])
def test_a_beta_that_holds_nothing_is_refused(beta):
    with pytest.raises(ConfigError, match=r"beta \(.*\) must be above 0 and finite"):
        make_dpo(beta=beta)


def test_unknown_losses_and_impossible_smoothing_are_refused():
    with pytest.raises(ConfigError, match="sigmoid, ipo, robust"):
        make_dpo(loss_type="hinge")
    for eps in (-0.1, 0.5, 1.0):
        with pytest.raises(ConfigError, match=r"label_smoothing \(.*\) must be at least 0 and below 0\.5"):
            make_dpo(label_smoothing=eps)


def test_a_negative_weight_of_the_likelihood_is_refused():
    with pytest.raises(ConfigError, match=r"nll_coeff \(-1\)"):
        make_dpo(nll_coeff=-1)


def test_a_setting_of_another_loss_is_refused():
    for settings in ({"loss_type": "simpo", "nll_coeff": 1.0}, {"cpo_alpha": 1.0}, {"loss_type": "orpo", "label_smoothing": 0.1}):
        with pytest.raises(ConfigError, match="is no setting of loss_type="):
            DPOLoss(**settings)


def test_a_likelihood_over_tokens_needs_their_number_in_the_whole_mini_batch():
    logits, batch = pair_batch([[0.5], [0.25]])
    shared = SharedContext(logits, batch, totals=BatchTotals(4.0, 4.0, 0.0, 0.0, num_pairs=2.0))
    with pytest.raises(ConfigError, match="needs preferred_tokens of all 2 pairs"):
        DPOLoss(loss_type="cpo").compute(logits, batch, shared=shared)


def test_a_batch_without_reference_or_pairs_says_what_it_lacks():
    logits, batch = pair_batch([[0.5], [0.25]])
    without = {name: value for name, value in batch.items() if name != "reference_logps"}
    with pytest.raises(DataKeyError, match="no reference_logps"):
        DPOLoss().compute(logits, without)
    del batch["meta"]
    with pytest.raises(DataError, match=r"pair_id.* 0 entries .*collate_preference_items"):
        DPOLoss().compute(logits, batch)


def test_lone_samples_have_no_loss_and_no_gradient():
    logits, batch = pair_batch([[0.5], [0.25]])
    batch["meta"]["pair_id"] = [0, 1]
    loss, stats = DPOLoss().compute(logits, batch, shared=SharedContext(logits, batch))
    loss.backward()
    assert (loss.item(), stats["num_pairs"].item(), logits.grad.abs().max().item()) == (0.0, 0.0, 0.0)


def test_the_weight_of_the_second_term_is_the_setting_of_the_loss():
    assert [DPOLoss(loss_type=name, cpo_alpha=0.0).nll_weight for name in ("cpo", "simpo")] == [0, 0]
    assert [DPOLoss(loss_type=name).nll_weight for name in ("cpo", "simpo", "orpo")] == [1, 0, 1]
    assert DPOLoss(nll_coeff=0.4, cpo_alpha=0.0).nll_weight == 0.4
