"""Distillation: the expected gradient is that of a KL, and a batch gets the same weights however it
is divided."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from loss_batches import Bigram
from maxent_batches import GROUP_SIZE, episodes, gradient_of_the_trainer
from torch import nn
from training_samples import ListSource, assert_same_tensors, cpu_config, tiny_model

from ludic.errors import ConfigError, DataError
from ludic.training import (
    ActorTokenLogps,
    Distillation,
    FrozenModel,
    SampleAttachments,
    SAWItem,
    Teacher,
    Trainer,
    make_grpo,
    make_opd,
)
from ludic.training.loss import SharedContext, compute_token_logp
from ludic.training.loss.correction import TruncatedImportanceSampling

V = 5


class Table(Bigram):
    """A policy over 5 tokens, of which the next depends on the last one."""

    def __init__(self, seed):
        nn.Module.__init__(self)
        self.table = nn.Parameter(torch.randn(V, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))


def answers(length, model):
    """Every answer to the prompt [0], with the log-probabilities of its tokens."""
    logps = model.table.detach().log_softmax(dim=-1)
    items = []
    for index, tokens in enumerate(product(range(V), repeat=length)):
        ids = [0, *tokens]
        sampled = [float(logps[left, right]) for left, right in zip(ids, tokens, strict=False)]
        items.append(
            SAWItem(
                ids,
                [1] * len(ids),
                [0] + [1] * length,
                weight=0.0,
                meta={"rollout_id": f"r{index}", "step_index": 0, "request_meta": {"group_id": 0}},
                attachments=SampleAttachments(ActorTokenLogps(sampled)),
            )
        )
    return items


def expected_gradient(algo, length, model, **config):
    """The gradient of the trainer, in which each answer counts as often as the policy gives it."""
    items = answers(length, model)
    for item in items:
        chance = len(items) * float(np.exp(sum(item.actor_logps.token_logps)))
        item.attachments.action_fractions = [chance] * length
    return gradient_of_the_trainer(algo, items, model, **config)[0]["table"]


def exact_gradient(length, model, teacher, *, fixed_prefixes):
    """The gradient of KL(pi || teacher) over all answers, summed token by token; with
    `fixed_prefixes` the chances of the prefixes are constants."""
    logps, theirs = model.table.log_softmax(dim=-1), teacher.table.detach().log_softmax(dim=-1)
    kl_by_state = (logps.exp() * (logps - theirs)).sum(dim=-1)
    chances = nn.functional.one_hot(torch.tensor(0), V).double()  # of the last token so far
    total = torch.zeros((), dtype=torch.float64)
    for _ in range(length):
        total = total + (chances.detach() if fixed_prefixes else chances) @ kl_by_state
        chances = chances @ logps.exp()
    [gradient] = torch.autograd.grad(total, model.table)
    return gradient


@pytest.mark.parametrize("length", [1, 3])
def test_with_gamma_1_the_expected_gradient_is_that_of_the_kl_of_whole_answers(length):
    model, teacher = Table(0), Table(1)
    algo = make_opd(teacher=FrozenModel(teacher, cpu_config()), gamma=1.0)
    exact = exact_gradient(length, model, teacher, fixed_prefixes=False)
    assert exact.abs().max() > 0.1
    torch.testing.assert_close(expected_gradient(algo, length, model), exact, rtol=0, atol=1e-6)


@pytest.mark.parametrize("length", [1, 3])
def test_with_gamma_0_it_leaves_out_how_a_token_changes_later_prefixes(length):
    model, teacher = Table(0), Table(1)
    algo = make_opd(teacher=FrozenModel(teacher, cpu_config()))
    gradient = expected_gradient(algo, length, model)
    fixed, whole = (exact_gradient(length, model, teacher, fixed_prefixes=each) for each in (True, False))
    torch.testing.assert_close(gradient, fixed, rtol=0, atol=1e-6)
    assert ((fixed - whole).abs().max() > 0.01) == (length > 1)


def test_the_reverse_kl_of_whole_distributions_has_the_same_expected_gradient():
    model, teacher = Table(0), Table(1)
    algo = make_opd(teacher=FrozenModel(teacher, cpu_config()), divergence="reverse")
    exact = exact_gradient(3, model, teacher, fixed_prefixes=True)
    torch.testing.assert_close(expected_gradient(algo, 3, model), exact, rtol=0, atol=1e-6)


def test_the_weights_of_two_samples_by_hand():
    """Log-ratios [1, -1] and [2]; to go with gamma .5 [1 - .5, -1] and [2]; plus 3 times credit."""
    weights = Distillation(reward_coeff=3.0, gamma=0.5).weigh(
        np.array([1.0, 1.0, -2.0]), np.array([-1.0, -2.0, -1.0]), np.array([-2.0, -1.0, -3.0]), np.array([2, 1])
    )
    assert weights.tolist() == [3.5, 2.0, -4.0]


KINDS = {
    "to go": {"gamma": 1.0},
    "corrected": {"correction": TruncatedImportanceSampling(2.0)},
    "jsd": {"divergence": "jsd", "top_k": 20},
}
PACKINGS = [{"micro_token_budget": 130}, {"packing": "padding_free"}, {"prefix_sharing": "tree"}, {"merge_turns": True}]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packing", PACKINGS)
def test_the_gradient_does_not_depend_on_how_the_batch_is_divided(packing, kind):
    model, teacher = tiny_model(), FrozenModel(tiny_model(seed=1), cpu_config())
    algo = make_opd(teacher=teacher, reward_coeff=0.5, group_size=GROUP_SIZE, **KINDS[kind])
    items = episodes((1, 3, 2, 1), seed=7)
    whole, prepared = gradient_of_the_trainer(algo, items, model)
    split, _ = gradient_of_the_trainer(algo, items, model, **packing)
    largest = max(value.abs().max().item() for value in whole.values())
    assert largest > 1e-2
    assert_same_tensors(split, whole, atol=1e-6 * max(1.0, largest))
    if kind == "jsd":
        return
    means = [float(column.mean()) for _, column in sorted(prepared.macro.token_columns["token_weight"].items())]
    assert prepared.macro.table.weights.tolist() == pytest.approx(means, rel=1e-5)


def test_credit_of_tokens_is_added_token_by_token():
    items, teacher = episodes(), FrozenModel(tiny_model(seed=1), cpu_config())
    plain = weights_by_row(make_opd(teacher=teacher), items)
    credits = [[float(place) for place, _ in enumerate(item.actor_logps.token_logps)] for item in items]
    with_columns = [
        replace(item, attachments=replace(item.attachments, token_columns={"token_weight": credit}))
        for item, credit in zip(items, credits, strict=True)
    ]
    weights = weights_by_row(make_opd(teacher=teacher, reward_coeff=2.0, group_size=GROUP_SIZE), with_columns)
    for row, credit in enumerate(credits):
        torch.testing.assert_close(weights[row], plain[row] + 2 * torch.tensor(credit), rtol=0, atol=1e-5)


def test_with_a_correction_the_weights_compare_the_trainers_policy_with_the_teacher():
    model = tiny_model()
    algo = make_opd(teacher=FrozenModel(model, cpu_config()), correction=TruncatedImportanceSampling(2.0))
    _, prepared = gradient_of_the_trainer(algo, episodes(), model)
    assert max(column.abs().max() for column in prepared.macro.token_columns["token_weight"].values()) < 1e-6


def test_a_teacher_that_is_the_policy_changes_nothing_and_is_not_the_reference_too():
    with pytest.raises(ConfigError, match="opd has no teacher; pass teacher="):
        Trainer(model=tiny_model(), algo=make_opd(), batch_source=ListSource([]), cfg=cpu_config())
    frozen = FrozenModel(tiny_model(), cpu_config())
    with pytest.raises(ConfigError, match="leave reference= out"):
        Trainer(
            model=tiny_model(), algo=make_opd(teacher=frozen), batch_source=ListSource([]), cfg=cpu_config(), reference=frozen
        )


class Broken:
    computes_trees = False

    def logps(self, micro_batch):
        mask = SharedContext(micro_batch.tensors["input_ids"], micro_batch.tensors).token_mask
        return torch.full_like(mask, float("-inf"))


def test_log_probabilities_that_are_not_finite_name_the_sample():
    with pytest.raises(DataError, match="r0/0 are not all finite"):
        gradient_of_the_trainer(make_opd(teacher=Broken()), episodes(), tiny_model())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward_coeff": 1.0}, r"reward_coeff \(1.0\) .* set group_size"),
        ({"reward_coeff": -1.0}, r"reward_coeff \(-1.0\) must be at least 0"),
        ({"top_k": 5}, r"top_k \(5\) .* set divergence"),
        ({"divergence": "jsd", "gamma": 1.0}, r"gamma \(1.0\) .* divergence=jsd"),
        ({"divergence": "kl"}, r"divergence \('kl'\) must be"),
        ({"gamma": 1.5}, r"gamma \(1.5\) must be .* at most 1"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        make_opd(**settings)


def test_a_divergence_needs_a_teacher_with_logits():
    with pytest.raises(ConfigError, match="logits, which Broken does not give"):
        Trainer(
            model=tiny_model(), algo=make_opd(teacher=Broken(), divergence="jsd"), batch_source=ListSource([]), cfg=cpu_config()
        )


def test_given_samples_need_no_log_probabilities_of_a_sampler():
    items = [replace(item, attachments=SampleAttachments()) for item in episodes()]
    algo = make_opd(teacher=FrozenModel(tiny_model(seed=1), cpu_config()), divergence="forward")
    trainer = Trainer(model=tiny_model(), algo=algo, batch_source=ListSource(items), cfg=cpu_config(lr=0.01))
    values = [trainer.train_step_sync()["train/divergence"] for _ in range(4)]
    assert values[0] > 0.1
    assert values == sorted(values, reverse=True)


def weights_by_row(algo, items, **config):
    _, prepared = gradient_of_the_trainer(algo, items, tiny_model(), **config)
    return prepared.macro.token_columns["token_weight"]


def test_a_column_of_the_row_names_the_teacher():
    first, second = (FrozenModel(tiny_model(seed=seed), cpu_config()) for seed in (1, 2))
    items = episodes()
    for index, item in enumerate(items):
        item.meta["row"] = {"subject": "maths" if index % 3 else "code"}
    alone = [weights_by_row(make_opd(teacher=each), items) for each in (first, second)]
    mixed = weights_by_row(make_opd(teacher={"maths": first, "code": second}, teacher_column="subject"), items)
    for row in range(len(items)):
        torch.testing.assert_close(mixed[row], alone[0 if row % 3 else 1][row], rtol=0, atol=1e-5)
    assert (alone[0][0] - alone[1][0]).abs().max() > 0.1
    with pytest.raises(DataError, match=r"has teacher None; .*one of the teachers maths"):
        weights_by_row(make_opd(teacher={"maths": first}), items)


def test_the_policy_teaches_itself_with_another_prompt():
    """The teacher's log-probabilities are those of the answer after the other prompt, by hand."""
    items = episodes()
    answers = [[id_ for id_, acts in zip(item.input_ids, item.action_mask, strict=True) if acts] for item in items]
    weights = weights_by_row(make_opd(teacher=Teacher(prompt=lambda item: [7, 8, 9, *item.input_ids[:2]])), items)
    for row, (item, answer) in enumerate(zip(items, answers, strict=True)):
        ids = torch.tensor([[7, 8, 9, *item.input_ids[:2], *answer]])
        logps = compute_token_logp(tiny_model()(ids).logits.detach(), ids)[0, 4:]
        expected = logps - torch.tensor(item.actor_logps.token_logps)
        torch.testing.assert_close(weights[row], expected, rtol=0, atol=1e-5)
    with pytest.raises(DataError, match=r"r0 has .* teacher's prompt; max_seq_len \(120\)"):
        weights_by_row(make_opd(teacher=Teacher(prompt=lambda item: [7] * 120)), items)


def test_with_a_reward_the_credit_is_that_of_grpo():
    assert make_opd(reward_coeff=1.0, group_size=4).credit_assigner == make_grpo(group_size=4).credit_assigner
