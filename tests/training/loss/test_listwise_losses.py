"""The losses of MaxEnt-GRPO against formulas in numpy, and against the worked example: values and
gradients, in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from loss_batches import Bigram, packed, padded, rows
from maxent_example import BETA, GRADIENT, TAU, B, L, N, R, U

from ludic.errors import ConfigError, DataKeyError
from ludic.training.coefficients import Coefficient
from ludic.training.loss import ListwiseClipLoss, ListwiseLoss, ReferenceKLLoss, SharedContext
from ludic.training.loss.statistics import compute_reference, sum_reference
from ludic.training.maxent import ListwiseCredit
from ludic.training.types import Candidates

COLUMNS = ("row_share", "candidate_tokens", "listwise_weight", "uniform_weight", "candidates_per_group")


def answers(logps, counts, **columns):
    """A context of samples whose n tokens each have the log-probability `logps`, with gradient.

    A row is a token that nothing predicts, then n action tokens of a vocabulary of two.
    """
    width = int(max(counts)) + 1
    mask = torch.zeros(len(counts), width, dtype=torch.float64)
    for row, count in enumerate(counts):
        mask[row, 1 : int(count) + 1] = 1.0
    leaf = torch.tensor(logps, dtype=torch.float64, requires_grad=True)
    batch = {"input_ids": torch.zeros(len(counts), width, dtype=torch.long), "attention_mask": mask.long(), "action_mask": mask}
    for name, values in columns.items():
        values = torch.as_tensor(np.asarray(values, dtype=np.float64))
        batch[name] = values[:, None] * mask if name.endswith("logps") else values
    # log softmax([x, log(1 - e^x)])[0] = x
    x = leaf[:, None].expand(len(counts), width)
    logits = torch.stack([x, torch.log1p(-x.exp())], dim=-1)
    return SharedContext(logits, batch), leaf


def weighed(**changes):
    settings = {"group_size": 4, "tau": TAU, "beta": BETA, "sampler_exponent": 0.0, "baseline": "none", **changes}
    candidates = Candidates(U, np.repeat([0, 1], 4), np.arange(8), N, R * N, B * N)
    result = ListwiseCredit(**settings).weigh(candidates)
    return {"weight": result.weights, **result.columns}


def exact(values):
    """Numbers that float32 holds exactly: columns of batches are read in that type."""
    return np.asarray(values, dtype=np.float32).astype(np.float64)


def test_the_likelihood_form_of_the_worked_example_has_its_values_and_gradient():
    reference = exact(R)
    shared, leaf = answers(L, N, **weighed(), reference_logps=reference)
    policy, _ = ListwiseLoss().compute_from(shared)
    kl, _ = ReferenceKLLoss(1.0, level="sequence").compute_from(shared)
    assert policy.item() == pytest.approx(0.90169200, abs=1e-8)
    assert kl.item() == pytest.approx(0.00611612, abs=2e-8)  # the reference is rounded to float32
    total = policy + BETA * kl
    assert total.item() == pytest.approx(0.90230362, abs=1e-8)
    (gradient,) = torch.autograd.grad(total, leaf)
    np.testing.assert_allclose(gradient.numpy(), GRADIENT, atol=2e-8, rtol=0)
    sums = {key: float(value) for key, value in sum_reference(shared).items()}
    stats = compute_reference(sums)
    assert stats["reference/sequence_kl"] == pytest.approx(0.00611612, abs=2e-8)
    assert stats["reference/kl"] == pytest.approx(0.00611612, abs=2e-8)  # all tokens of a sample are equal
    assert stats["reference/tokens"] == N.sum()
    assert stats["reference/kl_bucket/0-32"] == pytest.approx(stats["reference/kl"])
    assert "reference/kl_bucket/33-64" not in stats


def test_the_centred_form_and_the_clip_term_of_the_worked_example():
    shared, _ = answers(L, N, **weighed(baseline="uniform"), actor_logps=exact(B))
    assert ListwiseLoss().compute_from(shared)[0].item() == pytest.approx(0.03919200, abs=1e-8)
    clip = ListwiseClipLoss(1.0, 0.05, 0.05)
    assert clip.compute_from(shared)[0].item() == pytest.approx(-0.01904970, abs=2e-8)
    given_baseline = ListwiseClipLoss(1.0, 0.05, 0.05, baseline=0.25)
    assert given_baseline.compute_from(shared)[0].item() == pytest.approx(-0.01904970, abs=2e-8)


@pytest.mark.parametrize("level", ["token", "sequence_mean", "sequence_sum"])
@pytest.mark.parametrize("baseline", [None, 0.1])
def test_the_clip_term_is_the_formula(level, baseline):
    samples = rows(6, seed=4)
    batch, model = with_columns(padded(samples, dtype=torch.float64)), Bigram(dtype=torch.float64)
    shared = SharedContext(model(batch["input_ids"]), batch)
    loss, _ = ListwiseClipLoss(0.7, 0.1, 0.3, baseline, level).compute_from(shared)
    w, uniform, share, per_group = (batch[name].numpy() for name in (COLUMNS[2], COLUMNS[3], COLUMNS[0], COLUMNS[4]))
    total = 0.0
    for row in range(6):
        mask = shared.token_mask[row].numpy() > 0
        d = (shared.token_logp - shared.sampler_logp).detach()[row].numpy()[mask]
        a = w[row] - (uniform[row] if baseline is None else baseline)
        ratio = {"token": np.exp(d), "sequence_mean": np.exp(d.mean() * np.ones(1)), "sequence_sum": np.exp(d.sum() * np.ones(1))}
        r = ratio[level] if len(d) else np.ones(1)
        total -= (
            0.7
            * share[row]
            * per_group[row]
            * np.minimum(r * a, np.clip(r, 0.9, 1.3) * a).mean()
            * bool(len(d) or level != "token")
        )
    assert loss.item() == pytest.approx(total / 6, rel=1e-9)


def with_columns(batch, seed=0):
    """The batch with the columns of a batch credit and of a reference."""
    generator = torch.Generator().manual_seed(seed)
    count = len(batch["weight"])
    drawn = {name: torch.rand(count, generator=generator).to(batch["action_mask"].dtype) for name in COLUMNS}
    reference = -torch.rand(batch["input_ids"].shape, generator=generator) * 3
    return {**batch, **drawn, "reference_logps": reference.to(batch["action_mask"].dtype) * batch["action_mask"]}


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_reference_kl_is_the_formula(estimator, level):
    k = {"k1": lambda d: -d, "k2": lambda d: d**2 / 2, "k3": lambda d: np.exp(d) - d - 1}[estimator]
    batch, model = with_columns(padded(rows(6, seed=4), dtype=torch.float64)), Bigram(dtype=torch.float64)
    shared = SharedContext(model(batch["input_ids"]), batch)
    loss, _ = ReferenceKLLoss(0.3, estimator, level).compute_from(shared)
    total, tokens = 0.0, 0
    for row in range(6):
        mask = shared.token_mask[row].numpy() > 0
        d = (shared.reference_logp - shared.token_logp).detach()[row].numpy()[mask]
        tokens += len(d)
        total += k(d).sum() if level == "token" else len(d) * k(d.mean()) if len(d) else 0.0
    assert loss.item() == pytest.approx(0.3 * total / tokens, rel=1e-9)


LOSSES = {
    "likelihood": ListwiseLoss(),
    "likelihood of sums": ListwiseLoss(length_normalize=False),
    "clip by token": ListwiseClipLoss(1.0, 0.9, 9.0, ratio_level="token"),
    "clip by mean": ListwiseClipLoss(1.0, 0.9, 9.0),
    "clip by sum": ListwiseClipLoss(1.0, 0.999, 99.0, ratio_level="sequence_sum"),
    "kl of tokens": ReferenceKLLoss(0.3),
    "kl of sequences": ReferenceKLLoss(0.3, level="sequence"),
    "k2": ReferenceKLLoss(0.3, "k2"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_central_differences(name):
    batch, model = with_columns(padded(rows(5, seed=2), dtype=torch.float64)), Bigram(dtype=torch.float64)

    def value():
        return LOSSES[name].compute_from(SharedContext(model(batch["input_ids"]), batch))[0]

    (gradient,) = torch.autograd.grad(value(), model.table)
    assert gradient.abs().max() > 1e-3
    with torch.no_grad():
        for index in torch.argsort(gradient.abs().flatten(), descending=True)[:12].tolist():
            entry = model.table.view(-1)[index : index + 1]
            kept, ends = entry.clone(), []
            for step in (1e-6, -1e-6):
                entry.copy_(kept + step)
                ends.append(value().item())
            entry.copy_(kept)
            assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(gradient.view(-1)[index].item(), abs=1e-7)


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=8))
def test_the_kl_of_a_sequence_is_never_above_that_of_its_tokens(log_ratios):
    """Log-ratios of +-1 that cancel give 0 where the mean over tokens is .543."""
    d = np.array(log_ratios)
    k3 = lambda x: np.exp(x) - x - 1  # noqa: E731
    assert k3(d.mean()) <= k3(d).mean() + 1e-12
    assert k3(np.array([1.0, -1.0])).mean() == pytest.approx(0.5430806)


def test_as_a_loss_k3_follows_the_forward_kl_k2_the_reverse_and_k1_nothing():
    """Expected gradients over a policy of five tokens."""
    z = torch.tensor([0.3, -0.2, 0.5, 0.0, -0.7], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([-0.4, 0.1, 0.6, 0.2, -0.1], dtype=torch.float64), 0).float()
    probabilities = torch.softmax(z, 0).detach()

    def expected(estimator):
        total = torch.zeros(5, dtype=torch.float64)
        for token in range(5):
            ids = torch.tensor([[0, token]])
            batch = {"input_ids": ids, "action_mask": torch.tensor([[0.0, 1.0]]), "attention_mask": torch.ones(1, 2)}
            batch["reference_logps"] = torch.stack([torch.zeros(()), reference[token]])[None]
            shared = SharedContext(torch.stack([z, z])[None], batch)
            total += probabilities[token] * torch.autograd.grad(ReferenceKLLoss(1.0, estimator).compute_from(shared)[0], z)[0]
        return total

    rho, p = reference.double().exp(), torch.softmax(z, 0)
    forward = torch.autograd.grad((rho * (reference.double() - torch.log_softmax(z, 0))).sum(), z, retain_graph=True)[0]
    backward = torch.autograd.grad((p * (torch.log_softmax(z, 0) - reference.double())).sum(), z)[0]
    torch.testing.assert_close(expected("k3"), forward, rtol=0, atol=1e-6)
    torch.testing.assert_close(expected("k2"), backward, rtol=0, atol=1e-6)
    torch.testing.assert_close(expected("k1"), torch.zeros(5, dtype=torch.float64), rtol=0, atol=1e-12)


def test_the_coefficient_is_read_each_time():
    batch, model = with_columns(padded(rows(5, seed=2))), Bigram()
    beta = Coefficient(0.5)
    loss = ReferenceKLLoss(beta)
    before = loss.compute(model(batch["input_ids"]), batch)[0].item()
    beta.set(1.0)
    assert loss.compute(model(batch["input_ids"]), batch)[0].item() == pytest.approx(2 * before)


@given(st.integers(0, 1000), st.integers(1, 5))
def test_the_statistics_of_parts_are_those_of_the_whole_in_any_layout(seed, cut):
    samples = rows(6, seed=seed)
    model = Bigram()

    def sums(part, collate):
        batch = collate(part)
        ids = batch["input_ids"]
        batch["reference_logps"] = torch.log1p(ids.float()) * -0.3 * batch["action_mask"]  # depends on the token alone
        shared = SharedContext(model(ids), batch)
        _ = shared.token_logp
        return {key: float(value) for key, value in sum_reference(shared).items()}

    whole = compute_reference(sums(samples, padded))
    parts = [sums(samples[:cut], packed), sums(samples[cut:], padded)]
    assert compute_reference({key: parts[0][key] + parts[1][key] for key in parts[0]}) == pytest.approx(whole, rel=1e-5)


def test_missing_columns_and_wrong_settings_are_named():
    batch, model = padded(rows(3)), Bigram()
    for loss, words in (
        (ListwiseLoss(), "row_share"),
        (ListwiseClipLoss(), "uniform_weight"),
        (ReferenceKLLoss(), "FrozenModel"),
    ):
        with pytest.raises(DataKeyError, match=words):
            loss.compute(model(batch["input_ids"]), batch)
    with pytest.raises(ConfigError, match="estimator"):
        ReferenceKLLoss(estimator="k4")
    with pytest.raises(ConfigError, match="level"):
        ReferenceKLLoss(level="turn")
    with pytest.raises(ConfigError, match="ratio_level"):
        ListwiseClipLoss(ratio_level="mean")
