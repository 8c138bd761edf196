"""InfoSeed's losses on their own, on tables of token states: they reach the minimum that theory
has, they cannot tell more than the answers do, and they leave the output layer alone."""

from math import exp, log, sqrt

import numpy as np
import pytest
import torch
from maxent_batches import gradient_of_the_trainer
from seeded_batches import PLAIN, SEEDS, preprocessed, seeded_episodes
from training_samples import tiny_model

from ludic.training.info_seed import InfoSeed, seed_metrics
from ludic.training.loss import SeedClassificationLoss, SeedContrastiveLoss
from ludic.training.loss.info_seed import FixedSeedHead, pool_completions
from ludic.training.presets import make_maxent_grpo

T = 0.5
COMMON = 9
"""A token of all answers."""


def answers_of(completions, seeds):
    """One prompt token 0, then the tokens of the answer."""
    length = 1 + len(completions[0])
    return {
        "input_ids": torch.tensor([[0, *tokens] for tokens in completions]),
        "attention_mask": torch.ones(len(completions), length, dtype=torch.long),
        "action_mask": torch.cat([torch.zeros(len(completions), 1), torch.ones(len(completions), length - 1)], dim=1),
        "seed_id": torch.tensor(seeds),
    }


def learn(loss, batch, *, steps=400, width=8):
    """Train the table of the tokens' states, which begin nearly equal. Returns the pooled states
    before and after, and the last loss."""
    draw = torch.Generator().manual_seed(0)
    table = torch.nn.Parameter(torch.ones(10, width) + 1e-3 * torch.randn(10, width, generator=draw))
    optimizer = torch.optim.Adam([table], lr=0.03)
    pooled, value = [], torch.zeros(())
    for step in range(steps + 1):
        states = {**batch, "hidden": table[batch["input_ids"]]}
        if step in (0, steps):
            pooled.append(pool_completions(states).detach().double().numpy())
        value, _ = loss.compute(torch.empty(0), states)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    return *pooled, float(value.detach())


def test_the_contrastive_loss_alone_separates_seeds_down_to_its_minimum():
    """4 seeds x 3 answers: the best directions are a simplex (Graf et al. 2021, arXiv:2102.08817,
    theorem 2), with cosine 1 to the 2 others of a seed and -1/3 to the 9 of other seeds. At T = .5
    each term is log(2 e^2 + 9 e^(-2/3)) - 2 = log(2 + 9 e^(-8/3)) = .96521. The seeds begin nearly
    equal, and the loss at log 11 = 2.39790."""
    seeds = np.repeat([1, 2, 3, 4], 3)
    _, after, value = learn(SeedContrastiveLoss(1.0, T), answers_of([[seed, COMMON] for seed in seeds], seeds))
    assert seed_metrics(after, seeds)["pred_acc"] == 1.0
    minimum = log(2 + 9 * exp(-(4 / 3) / T))
    assert minimum == pytest.approx(0.96521, abs=1e-5)
    assert minimum - 1e-5 <= value < minimum + 1e-3


def test_the_classifier_alone_finds_the_directions_of_the_seeds():
    """The best h has the cosine a with its own of 4 orthonormal directions and -b with the others:
    a^2 + 3 b^2 = 1, and a + b is largest at a = 3 b, where it is sqrt(4/3). So the minimum is
    log(1 + 3 e^(-sqrt(4/3) / T)) = .26079."""
    seeds = np.repeat([1, 2, 3, 4], 3)
    loss = SeedClassificationLoss(FixedSeedHead(4, T), coeff=1.0)
    before, after, value = learn(loss, answers_of([[seed, COMMON] for seed in seeds], seeds))
    head = FixedSeedHead(4, T)
    accuracies = [float((head(torch.tensor(rows)).argmax(dim=1).numpy() + 1 == seeds).mean()) for rows in (before, after)]
    assert accuracies == [0.25, 1.0]
    minimum = log(1 + 3 * exp(-sqrt(4 / 3) / T))
    assert minimum == pytest.approx(0.26079, abs=1e-5)
    assert minimum - 1e-5 <= value < minimum + 1e-3


@pytest.mark.parametrize(("second", "best"), [((4, 12, 2, 2), 0.7), ((12, 4, 2, 2), 0.5)])
def test_seeds_are_told_no_better_than_the_answers_allow(second, best):
    """Answers 1 to 4 have the shares .6 .2 .1 .1 under seed 1. If seed 2 has .2 .6 .1 .1, the best
    guess from the answer is right in (.6 + .6 + .1 + .1) / 2 = .7; if it has the same, in half. No
    loss on representations of given answers can pass that: only other answers could."""
    counts = [(12, 4, 2, 2), second]
    completions = [[token + 1] for count in counts for token, n in enumerate(count) for _ in range(n)]
    seeds = np.repeat([1, 2], 20)
    loss = SeedClassificationLoss(FixedSeedHead(2, T), coeff=1.0)
    _, after, _ = learn(loss, answers_of(completions, seeds))
    head = FixedSeedHead(2, T)
    assert float((head(torch.tensor(after)).argmax(dim=1).numpy() + 1 == seeds).mean()) == pytest.approx(best)


@pytest.mark.parametrize("loss", [SeedContrastiveLoss(1.0, T), SeedClassificationLoss(FixedSeedHead(2, T), coeff=1.0)])
def test_gradients_are_central_differences(loss):
    batch = answers_of([[1, 2], [3, 4], [5, 6], [7, 8]], [1, 1, 2, 2])
    hidden = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    value, _ = loss.compute(torch.empty(0), {**batch, "hidden": hidden})
    [gradient] = torch.autograd.grad(value, hidden)
    assert float(gradient[:, 0].abs().max()) == 0.0  # the prompt
    assert float(gradient[:, 1:].abs().min()) > 0.0
    for place in np.ndindex(4, 3, 5):
        step = torch.zeros_like(hidden)
        step[place] = 1e-2
        ends = [float(loss.compute(torch.empty(0), {**batch, "hidden": hidden.detach() + sign * step})[0]) for sign in (1, -1)]
        assert (ends[0] - ends[1]) / 2e-2 == pytest.approx(float(gradient[place]), abs=1e-3)


@pytest.mark.parametrize("kind", ["infonce", "ce"])
def test_the_term_gives_the_output_layer_no_gradient(kind):
    """It reads the states before that layer: what is sampled changes with other layers alone."""
    algo = make_maxent_grpo(group_size=PLAIN, info_seed=InfoSeed(SEEDS, coeff=1.0, loss=kind))
    items = preprocessed(algo, seeded_episodes())
    seen = []
    for coeff in (0.0, 1.0):
        algo = make_maxent_grpo(group_size=PLAIN, info_seed=InfoSeed(SEEDS, coeff=coeff, loss=kind))
        seen.append(gradient_of_the_trainer(algo, items, tiny_model(tie_word_embeddings=False))[0])
    differences = {name: float((seen[0][name] - seen[1][name]).abs().max()) for name in seen[0]}
    assert differences.pop("lm_head.weight") == 0.0
    assert min(value for name, value in differences.items() if "layers" in name) > 0.0
