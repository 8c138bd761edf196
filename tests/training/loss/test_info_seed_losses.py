"""InfoSeed's losses on given hidden states. Shapes: B samples, T tokens, D width."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from ludic.errors import ConfigError, DataKeyError
from ludic.training.info_seed import seed_metrics
from ludic.training.loss import BatchTotals, SeedClassificationLoss, SeedContrastiveLoss
from ludic.training.loss.context import SharedContext
from ludic.training.loss.info_seed import contrast_seeds, pool_completions, seed_stats

H = torch.tensor([[1.0, 0.2], [0.8, 0.5], [-0.3, 1.0], [0.1, 0.9], [0.6, -0.4]], dtype=torch.float64)
SEEDS = torch.tensor([1, 1, 2, 2, -1])


def batch_of(hidden, lengths, prompts, seeds=None, positions=None):
    """A padded batch whose row b has `lengths[b]` tokens, of which the first `prompts[b]` are the
    prompt."""
    columns = torch.arange(hidden.shape[1])
    lengths, prompts = torch.tensor(lengths), torch.tensor(prompts)
    batch = {
        "input_ids": torch.zeros(hidden.shape[:2], dtype=torch.long),
        "attention_mask": (columns < lengths[:, None]).long(),
        "action_mask": ((columns >= prompts[:, None]) & (columns < lengths[:, None])).float(),
        "hidden": hidden,
    }
    extra = {"seed_id": seeds, "position": positions}
    return batch | {name: torch.as_tensor(value) for name, value in extra.items() if value is not None}


def pooled_batch(pooled, seeds, positions=None):
    """One prompt token, then one completion token whose state is the row."""
    hidden = torch.stack([torch.zeros_like(pooled), pooled], dim=1)
    return batch_of(hidden, [2] * len(pooled), [1] * len(pooled), seeds, positions)


def test_the_worked_example_of_the_contrastive_loss():
    h = H.clone().requires_grad_()
    loss = contrast_seeds(h, SEEDS, 0.5)
    assert float(loss.detach()) == pytest.approx(0.46864526906725984, abs=1e-12)
    [gradient] = torch.autograd.grad(loss, h)
    expected = [
        [-0.025584706467790985, 0.12792353233895495],
        [-0.2954192838325572, 0.47267085413209164],
        [0.10032038668036983, 0.03009611600411094],
        [0.6031509995555803, -0.06701677772839781],
        [0.0, 0.0],
    ]
    torch.testing.assert_close(gradient, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


def test_the_worked_example_of_the_classifier():
    head = torch.nn.Linear(2, 2, bias=False)
    head.weight.data = torch.tensor([[0.5, -0.2], [-0.3, 0.4]])
    loss, stats = SeedClassificationLoss(head, coeff=2.0).compute(torch.empty(0), pooled_batch(H.float(), SEEDS))
    assert float(loss.detach()) == pytest.approx(2 * 0.4489079908882729, abs=1e-6)
    assert float(stats["pred_acc"]) == 1.0


def slow_contrast(pooled, seeds, temperature):
    """The definition, pair by pair."""
    rows = [row for row, seed in enumerate(seeds) if seed >= 1]
    unit = pooled / pooled.norm(dim=1, keepdim=True)
    terms = []
    for i in rows:
        similarity = {j: float(unit[i] @ unit[j]) / temperature for j in rows if j != i}
        if similarity:
            whole = torch.logsumexp(torch.tensor(list(similarity.values()), dtype=torch.float64), 0)
            terms += [float(whole) - value for j, value in similarity.items() if seeds[j] == seeds[i]]
    return sum(terms) / len(terms) if terms else 0.0


@given(st.lists(st.integers(-1, 3), min_size=1, max_size=9), st.floats(0.05, 2.0), st.integers(0, 99))
def test_the_contrastive_loss_is_the_mean_over_ordered_pairs_of_one_seed(seeds, temperature, draw):
    pooled = torch.randn(len(seeds), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(draw))
    found = contrast_seeds(pooled, torch.tensor(seeds), temperature)
    assert float(found) == pytest.approx(slow_contrast(pooled, seeds, temperature), abs=1e-9)


@given(st.lists(st.integers(-1, 3), min_size=1, max_size=9), st.integers(0, 99))
def test_the_statistics_are_those_of_the_evaluator(seeds, draw):
    pooled = torch.randn(len(seeds), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(draw))
    found = {name: float(value) for name, value in seed_stats(pooled, torch.tensor(seeds)).items()}
    assert found == pytest.approx(seed_metrics(pooled.numpy(), seeds), abs=1e-9)


def test_completions_are_pooled_without_prompt_and_padding():
    hidden = torch.arange(24, dtype=torch.float32).reshape(2, 6, 2)
    batch = batch_of(hidden, [4, 6], [2, 1])
    torch.testing.assert_close(pool_completions(batch), torch.stack([hidden[0, 2:4].mean(0), hidden[1, 1:6].mean(0)]))
    torch.testing.assert_close(pool_completions(batch, "last"), torch.stack([hidden[0, 3], hidden[1, 5]]))


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_every_layout_of_a_batch_has_the_same_representations(pooling):
    """Samples [p a b] and [p c], padded, padding-free, and as turns of one row [p a b p c]."""
    states = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    padded = torch.zeros(2, 3, 3)
    padded[0], padded[1, :2] = states[:3], states[3:]
    expected = pool_completions(batch_of(padded, [3, 2], [1, 1]), pooling)
    row = {
        "input_ids": torch.zeros(1, 5, dtype=torch.long),
        "action_mask": torch.tensor([[0.0, 1, 1, 0, 1]]),
        "hidden": states[None],
    }
    free = {**row, "cu_seqlens": torch.tensor([0, 3, 5]), "max_seqlen": 3}
    turns = {**row, "attention_mask": torch.ones(1, 5), "turns": torch.tensor([[0, 0, 3], [0, 3, 5]])}
    for batch in (free, turns):
        torch.testing.assert_close(pool_completions(batch, pooling), expected)


@st.composite
def partitions(draw):
    """(seeds of up to 8 samples, their micro-batches in any order)."""
    count = draw(st.integers(1, 8))
    order = draw(st.permutations(range(count)))
    cuts = sorted(draw(st.sets(st.integers(1, max(1, count - 1)), max_size=count - 1)))
    parts = [part for a, b in zip([0, *cuts], [*cuts, count], strict=True) if (part := order[a:b])]
    return draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)), parts


@given(partitions(), st.sampled_from(["mean", "last"]))
@settings(max_examples=settings.default.max_examples // 2)
def test_any_split_has_the_loss_and_the_gradient_of_the_whole(partition, pooling):
    seeds, parts = partition
    generator = torch.Generator().manual_seed(len(parts))
    inputs = torch.randn(len(seeds), 5, 3, generator=generator)
    theta = torch.randn(3, 4, generator=generator).requires_grad_()
    head = torch.nn.Linear(4, 3)
    lengths, prompts = [2 + row % 4 for row in range(len(seeds))], [1 + row % 2 for row in range(len(seeds))]
    prompts = [min(prompt, length - 1) for prompt, length in zip(prompts, lengths, strict=True)]

    def micro_batch(rows):
        rows = list(rows)
        picked = [seeds[row] for row in rows]
        return batch_of(inputs[rows] @ theta, [lengths[r] for r in rows], [prompts[r] for r in rows], picked, rows)

    for loss in (SeedContrastiveLoss(0.3, 0.2, pooling), SeedClassificationLoss(head, 0.3, pooling)):
        whole, _ = loss.compute(torch.empty(0), micro_batch(range(len(seeds))))
        expected = torch.autograd.grad(whole, theta, allow_unused=True)[0]
        measured = first_pass(loss, [micro_batch(part) for part in parts], parts, len(seeds))
        totals = BatchTotals(float(len(seeds)), 0.0, weight_mean=0.0, weight_std=0.0, measured=measured)
        values, gradient = [], torch.zeros_like(theta)
        for part in parts:
            batch = micro_batch(part)
            value, _ = loss.compute(torch.empty(0), batch, shared=SharedContext(torch.empty(0), batch, totals=totals))
            values.append(value.detach())
            gradient += torch.autograd.grad(value, theta)[0]
        torch.testing.assert_close(sum(values), whole.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)


def first_pass(loss, batches, parts, count):
    """Sums over micro-batches; what has a row for each sample is placed by position."""
    gathered = getattr(loss, "gathers", ())
    measured = {}
    with torch.no_grad():
        for batch, part in zip(batches, parts, strict=True):
            for name, value in loss.first_pass(torch.empty(0), batch).items():
                if name in gathered:
                    value = value.new_zeros(count, *value.shape[1:]).index_add(0, torch.tensor(list(part)), value)
                measured[name] = measured.get(name, 0) + value
    return measured


def test_a_micro_batch_without_samples_adds_nothing_and_can_be_differentiated():
    """As a rank has one when others have more micro-batches: its action mask is zero."""
    h = H.float().requires_grad_()
    batch = pooled_batch(h, SEEDS, [0] * 5)
    batch["action_mask"] = torch.zeros_like(batch["action_mask"])
    loss = SeedContrastiveLoss(1.0, 0.5)
    parts = loss.first_pass(torch.empty(0), batch)
    assert not any(value.any() for value in parts.values())
    measured = first_pass(loss, [pooled_batch(h, SEEDS)], [range(5)], 5)
    totals = BatchTotals(5.0, 0.0, weight_mean=0.0, weight_std=0.0, measured=measured)
    value, _ = loss.compute(torch.empty(0), batch, shared=SharedContext(torch.empty(0), batch, totals=totals))
    value.backward()
    assert float(value.detach()) == 0
    assert not h.grad.any()


def test_without_a_pair_of_one_seed_there_is_no_loss():
    h = H.clone().requires_grad_()
    loss = contrast_seeds(h, torch.tensor([1, 2, 3, 0, -1]), 0.5)
    loss.backward()
    assert float(loss.detach()) == 0
    assert not h.grad.any()


def test_a_very_small_temperature_is_bounded():
    assert float(contrast_seeds(H, SEEDS, 1e-12)) == float(contrast_seeds(H, SEEDS, 1e-4))


def test_what_is_missing_or_wrong_is_named():
    batch = pooled_batch(H.float(), SEEDS)
    with pytest.raises(DataKeyError, match=r"no hidden; .*reads_hidden"):
        pool_completions({name: value for name, value in batch.items() if name != "hidden"})
    with pytest.raises(DataKeyError, match="no seed_id"):
        SeedContrastiveLoss().compute(torch.empty(0), {name: value for name, value in batch.items() if name != "seed_id"})
    for wrong in ({"coeff": -1.0}, {"temperature": 0.0}, {"pooling": "max"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            SeedContrastiveLoss(**wrong)
