"""What is computed on a whole macro-batch: the gradient of a step with a reference and a batch
credit does not depend on how the batch is divided."""

import asyncio
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from gathering_loss import PairLoss
from hypothesis import HealthCheck, given, settings, strategies as st
from loss_batches import Bigram
from maxent_batches import GROUP_SIZE, episodes, gradient_by_hand, gradient_of_the_trainer
from training_samples import (
    ListSource,
    assert_same_tensors,
    branching_items,
    cpu_config,
    gradients_of,
    sorting_items,
    tiny_model,
    weights_of,
)

from ludic.errors import ConfigError, DataError
from ludic.models.prefix_trees import PREFIX_TREES
from ludic.training import (
    LoraSettings,
    RLAlgorithm,
    Trainer,
    apply_lora,
    collate_saw_items,
    make_cispo,
    make_dr_grpo,
    make_grpo,
    make_scalerl,
)
from ludic.training.algorithm import compose_preprocess, forward_batch, forward_logits
from ludic.training.backend.torch import TorchBackend
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch
from ludic.training.coefficients import Coefficient
from ludic.training.credit_assignment import ConstantCredit
from ludic.training.loss.batch import LOG_RATIO_BOUND
from ludic.training.loss.context import SharedContext
from ludic.training.loss.correction import M2PO, TruncatedImportanceSampling
from ludic.training.preparation import candidates_of, prepare
from ludic.training.presets import make_maxent_grpo
from ludic.training.reference import CachedReference, FrozenModel, WithoutAdapters

MAXENT = {"group_size": GROUP_SIZE, "tau": 0.3, "beta": 0.1}
ALGORITHMS = {
    "likelihood": make_maxent_grpo(**MAXENT, form="likelihood"),
    "likelihood with a clip term": make_maxent_grpo(**MAXENT, form="likelihood", clip_coeff=0.5, baseline="none"),
    "clip by token": make_maxent_grpo(**MAXENT, form="likelihood", clip_coeff=0.5, clip_ratio_level="token"),
    "surrogate": make_maxent_grpo(**MAXENT),
    "surrogate, kl of sequences": make_maxent_grpo(**MAXENT, kl_level="sequence", scale="tempered"),
    "surrogate over tokens, summed reference": make_maxent_grpo(**MAXENT, normalizer="tokens", length_normalize_reference=False),
    "grpo with a reference": make_grpo(group_size=GROUP_SIZE, reference_kl=0.2),
    "cispo with a reference": make_cispo(group_size=GROUP_SIZE, reference_kl=0.2, kl_coeff=0.1),
}
TURNS = (1, 3, 2, 1, 2, 1, 1, 2)


@cache
def model():
    return tiny_model()


@cache
def frozen():
    return tiny_model(seed=1)


@cache
def expected(name, turns):
    return gradient_by_hand(ALGORITHMS[name], episodes(turns, seed=7), model(), frozen())


QUICK = ("likelihood", "surrogate", "grpo with a reference")
"""Run with every change; the others are integration tests."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.integration) for name in ALGORITHMS]
)
@settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    budget=st.integers(120, 600),
    packing=st.sampled_from(["greedy", "optimal", "padding_free"]),
    merge_turns=st.booleans(),
    skip=st.booleans(),
)
def test_the_gradient_equals_that_of_the_unsplit_batch(name, budget, packing, merge_turns, skip):
    whole = expected(name, TURNS)
    split, prepared = gradient_of_the_trainer(
        ALGORITHMS[name],
        episodes(TURNS, seed=7),
        model(),
        reference=FrozenModel(frozen(), cpu_config()),
        micro_token_budget=budget,
        packing=packing,
        merge_turns=merge_turns,
        skip_zero_weight=skip,
    )
    largest = max(value.abs().max().item() for value in whole.values())
    assert largest > 1e-3
    assert_same_tensors(split, whole, atol=1e-6 * max(1.0, largest))
    assert prepared.stats["reference/scored"] == len(prepared.macro.items)


def test_m2po_drops_the_same_tokens_however_the_step_is_divided():
    """By hand: the largest |log w| of all samples is dropped until the mean square is at most the
    threshold."""
    items, algo = episodes(TURNS, seed=7), make_cispo(group_size=GROUP_SIZE, correction=M2PO(2.0))
    batch = dict(collate_saw_items(items, pad_token_id=0, device="cpu"))
    shared = SharedContext(forward_logits(model(), batch), batch)
    ratios = (shared.current_logp - shared.sampler_logp).detach()[shared.token_mask.bool()].abs().sort().values.tolist()
    kept = list(ratios)
    while sum(ratio**2 for ratio in kept) / len(kept) > 2.0:
        kept.pop()
    assert 0.1 * len(ratios) < len(kept) < 0.9 * len(ratios)
    batch[LOG_RATIO_BOUND] = torch.full((len(items),), (kept[-1] + ratios[len(kept)]) / 2)
    model().zero_grad(set_to_none=True)
    algo.compute_loss(model(), batch)[0].backward()
    whole = gradients_of(model())
    for config in ({}, {"micro_token_budget": 150, "packing": "padding_free"}, {"micro_token_budget": 120, "merge_turns": False}):
        split, prepared = gradient_of_the_trainer(algo, items, model(), **config)
        assert_same_tensors(split, whole, atol=1e-5)
        assert prepared.macro.sample_columns[LOG_RATIO_BOUND][0] == pytest.approx(ratios[len(kept)], rel=1e-4)


def test_weights_computed_on_each_part_alone_would_give_another_gradient():
    """The check above can fail: with whole groups in each part but C/G of the part, or with parts
    of groups, the weights differ."""
    items = episodes(TURNS, seed=7)
    credit = make_maxent_grpo(group_size=GROUP_SIZE).batch_credit
    whole = credit.weigh(candidates_of(MacroBatch.ingest(items, 120))).weights
    half = credit.weigh(candidates_of(MacroBatch.ingest(items[:4], 120))).weights
    assert np.abs(whole[:4] - half).max() > 0.1


@pytest.mark.parametrize("name", ["surrogate", "likelihood", "grpo with a reference"])
def test_switched_off_adapters_are_a_reference(name):
    """With LoRA the base model scores: the gradient is that with a frozen copy of the base."""
    adapted = apply_lora(tiny_model(), LoraSettings(rank=2))
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    items = episodes(TURNS, seed=7)
    before = weights_of(adapted)
    off, _ = gradient_of_the_trainer(ALGORITHMS[name], items, adapted)
    flags = {key: (parameter.requires_grad, parameter.grad is None) for key, parameter in adapted.named_parameters()}
    frozen_base, _ = gradient_of_the_trainer(
        ALGORITHMS[name], items, adapted, reference=FrozenModel(tiny_model(), cpu_config()), packing="padding_free"
    )
    assert max(value.abs().max().item() for value in off.values()) > 1e-4
    assert_same_tensors(off, frozen_base, atol=1e-6)
    assert_same_tensors(weights_of(adapted), before)
    assert all(has_gradient == trainable or not trainable for trainable, has_gradient in ((t, not n) for t, n in flags.values()))
    assert adapted.training


class Recorded:
    """A reference that notes whether it was asked about prefix trees."""

    def __init__(self, inner):
        self.inner, self.computes_trees, self.asked = inner, inner.computes_trees, []

    def logps(self, micro_batch):
        self.asked.append(PREFIX_TREES in micro_batch.tensors)
        return self.inner.logps(micro_batch)


def token_columns(items, sharing, logits, budget):
    """The columns of an algorithm that reads a reference, corrects, and rescores every second
    sample; and whether each pass had trees."""
    cfg = cpu_config(prefix_sharing=sharing, logits=logits, micro_token_budget=budget, minibatches_per_batch=2)
    algo = replace(
        make_grpo(group_size=4, reference_kl=0.2),
        correction=TruncatedImportanceSampling(2.0),
        rescores=lambda item: int(item.meta["rollout_id"][1:]) % 2 == 0,
    )
    reference = Recorded(FrozenModel(frozen(), cfg))
    trainer = Trainer(model=model(), algo=algo, batch_source=ListSource(items), cfg=cfg, reference=reference)
    passes = []
    inner = trainer.backend.forward_logprobs
    trainer.backend.forward_logprobs = lambda batch: (passes.append(PREFIX_TREES in batch.tensors), inner(batch))[1]
    columns = asyncio.run(prepare(trainer, trainer._ingest(items))).macro.token_columns
    return columns, passes + reference.asked


@settings(max_examples=5, deadline=None)
@given(
    groups=st.lists(st.integers(2, 5), min_size=1, max_size=3),
    seed=st.integers(0, 1000),
    budget=st.integers(40, 200),
    logits=st.sampled_from(["full", "chunked"]),
)
def test_trees_score_samples_as_rows_of_their_own_do(groups, seed, budget, logits):
    items = branching_items(groups, seed)
    want, apart = token_columns(items, "off", logits, budget)
    got, shared = token_columns(items, "tree", logits, budget)
    assert not any(apart)
    assert len(shared) >= 3
    assert all(shared)
    assert got.keys() == want.keys() == {"actor_logps", "reference_logps", "proximal_logps"}
    for name, rows in want.items():
        assert got[name].keys() == rows.keys()
        for row, values in rows.items():
            torch.testing.assert_close(got[name][row], values, rtol=1e-5, atol=1e-5)


def test_a_reference_that_does_not_name_trees_gets_rows_of_their_own():
    class Mine:
        def logps(self, micro_batch):
            assert PREFIX_TREES not in micro_batch.tensors
            return inner.logps(micro_batch)

    cfg = cpu_config(prefix_sharing="tree")
    inner = FrozenModel(frozen(), cfg)
    items = branching_items((4, 4), 1)
    algo = make_grpo(group_size=4, reference_kl=0.2)
    trainer = Trainer(model=tiny_model(), algo=algo, batch_source=ListSource(items), cfg=cfg, reference=Mine())
    assert trainer.train_step_sync()["perf/shared_tokens"] > 0


@pytest.mark.parametrize("wrap", [lambda reference: reference, CachedReference])
def test_references_compute_trees_if_their_model_does(wrap):
    cfg = cpu_config(prefix_sharing="auto")
    assert wrap(FrozenModel(frozen(), cfg)).computes_trees
    assert not wrap(FrozenModel(frozen(), cpu_config(prefix_sharing="off"))).computes_trees
    assert not wrap(FrozenModel(Bigram(), cfg)).computes_trees
    backend = TorchBackend(apply_lora(tiny_model(), LoraSettings(rank=2)), cfg, algo=make_grpo(group_size=4))
    assert wrap(WithoutAdapters(backend)).computes_trees


def over_long(item):
    """The sample, with a prompt that leaves no room for its answer."""
    ids = [item.input_ids[0]] * 120
    return replace(
        item,
        input_ids=ids + item.input_ids,
        attention_mask=[1] * 120 + item.attention_mask,
        action_mask=[0] * 120 + item.action_mask,
    )


def drop_first(batch):
    return replace(batch, items=batch.items[1:])


@pytest.mark.parametrize("lost", ["by ingest", "by a filter"])
@pytest.mark.parametrize("form", ["surrogate", "likelihood"])
def test_a_dropped_sample_is_no_candidate(form, lost):
    """The step goes on with the weights of the group without it; the other group is as before."""
    items = episodes(seed=4)
    algo = make_maxent_grpo(group_size=4, form=form)
    whole = algo.batch_credit.weigh(candidates_of(MacroBatch.ingest(items, 120)))
    rest = algo.batch_credit.weigh(candidates_of(MacroBatch.ingest(items[1:], 120)))
    if lost == "by ingest":
        items[0] = over_long(items[0])
    else:
        algo = replace(algo, preprocess=compose_preprocess(algo.preprocess or (lambda batch: batch), drop_first))
    _, prepared = gradient_of_the_trainer(algo, items if lost == "by ingest" else items[1:], model())
    assert len(prepared.macro.items) == 7
    assert prepared.groups.offsets.tolist() == [0, 3, 7]
    np.testing.assert_array_equal(prepared.macro.table.weights, rest.weights.astype(np.float32))
    assert prepared.macro.sample_columns["uniform_weight"].tolist() == [1 / 3] * 3 + [1 / 4] * 4
    np.testing.assert_array_equal(rest.columns["listwise_weight"][3:], whole.columns["listwise_weight"][4:])
    cfg = cpu_config(max_seq_len=120, micro_token_budget=4096)
    stats = Trainer(model=tiny_model(), algo=algo, batch_source=ListSource(items), cfg=cfg).train_step_sync()
    assert stats["train/num_samples"] == 7


@pytest.mark.parametrize("sizes", [(4, 4), (4, 3)])
def test_for_a_large_tau_the_gradient_is_that_of_dr_grpo(sizes):
    items = episodes((1,) * sum(sizes), seed=2, sizes=sizes)
    tempered = make_maxent_grpo(group_size=4, tau=1e6, scale="tempered", sampler_exponent=0.0, q_epsilon=1e-12)
    gradient, _ = gradient_of_the_trainer(tempered, items, model())
    centred = {
        group: np.mean([item.weight for item in items if item.meta["request_meta"]["group_id"] == group]) for group in range(2)
    }
    for item in items:
        item.weight -= float(centred[item.meta["request_meta"]["group_id"]])
    plain, _ = gradient_of_the_trainer(make_dr_grpo(group_size=4), items, model())
    assert max(value.abs().max().item() for value in plain.values()) > 1e-3
    assert_same_tensors(gradient, plain, atol=1e-5)


def test_a_step_logs_the_weights_and_the_reference_kl():
    items = episodes(seed=4)
    algo = make_maxent_grpo(**MAXENT)
    cfg = cpu_config(minibatches_per_batch=2)
    trainer = Trainer(
        model=tiny_model(), algo=algo, batch_source=ListSource(items), cfg=cfg, reference=FrozenModel(tiny_model(), cfg)
    )
    stats = trainer.train_step_sync()
    assert (stats["train/tau"], stats["train/beta"]) == (0.3, 0.1)
    assert 0 < stats["train/weight_entropy"] < np.log(4)
    assert stats["reference/scored"] == stats["train/num_samples"] == 8
    assert 0 <= stats["reference/kl"] < 0.1  # 0 in the first optimizer step, since the reference is the start
    assert stats["reference/tokens"] == sum(sum(item.action_mask) for item in items)
    assert [item.weight for item in items] == [item.weight for item in episodes(seed=4)]  # utilities stay
    assert trainer.train_step_sync()["reference/kl"] > stats["reference/kl"]


def test_the_reference_kl_is_exact_over_micro_batches():
    items = episodes(TURNS, seed=7)
    logged = []
    for config in ({"micro_token_budget": 4096}, {"micro_token_budget": 130, "packing": "padding_free"}):
        cfg = cpu_config(max_seq_len=120, lr=0.0, **config)
        trainer = Trainer(
            model=tiny_model(),
            algo=ALGORITHMS["surrogate"],
            batch_source=ListSource(items),
            cfg=cfg,
            reference=FrozenModel(frozen(), cfg),
        )
        stats = trainer.train_step_sync()
        logged.append({key: value for key, value in stats.items() if key.startswith("reference/")})
    assert logged[0]["reference/kl"] > 0.01
    assert logged[1] == pytest.approx(logged[0], rel=1e-4)


def test_without_a_reference_nothing_is_scored_and_nothing_is_logged_about_one():
    items = episodes(seed=4)
    for algo in (make_maxent_grpo(group_size=4), make_grpo(group_size=4)):
        trainer = Trainer(model=tiny_model(), algo=algo, batch_source=ListSource(items), cfg=cpu_config())
        assert trainer.reference is None
        stats = trainer.train_step_sync()
        assert not [key for key in stats if key.startswith("reference/")]


@pytest.mark.parametrize(
    "algo",
    [
        make_maxent_grpo(group_size=4, beta=0.1),
        make_maxent_grpo(group_size=4, beta=Coefficient(0.0)),
        make_grpo(group_size=4, reference_kl=0.1),
        make_scalerl(group_size=4, reference_kl=0.1),
    ],
    ids=["beta", "a controlled beta", "grpo", "scalerl"],
)
def test_an_algorithm_that_reads_a_reference_needs_one(algo):
    assert algo.reads_reference
    with pytest.raises(ConfigError, match="FrozenModel"):
        Trainer(model=tiny_model(), algo=algo, batch_source=ListSource([]), cfg=cpu_config())


def test_samples_that_cannot_be_weighed_are_named():
    items = episodes(seed=4)
    items[3].meta["request_meta"] = {}
    trainer = Trainer(model=tiny_model(), algo=make_maxent_grpo(group_size=4), batch_source=ListSource(items), cfg=cpu_config())
    with pytest.raises(DataError, match=r"r3/0 is missing group_id"):
        trainer.train_step_sync()


def test_a_reference_without_finite_values_stops_the_step():
    class Broken:
        def logps(self, micro_batch):
            return torch.full((len(micro_batch.tensors["weight"]), micro_batch.tensors["input_ids"].shape[1] - 1), -torch.inf)

    items = episodes(seed=4)
    trainer = Trainer(
        model=tiny_model(), algo=make_maxent_grpo(**MAXENT), batch_source=ListSource(items), cfg=cpu_config(), reference=Broken()
    )
    with pytest.raises(DataError, match="not all finite"):
        trainer.train_step_sync()


def test_groups_of_several_agents_are_apart_and_names_need_not_be_numbers():
    items = sorting_items(4, weight=1.0)
    for index, item in enumerate(items):
        item.meta["request_meta"] = {"group_id": ("a", 1)}
        item.meta["agent_id"] = index % 2
        item.meta["rollout_id"] = f"shared{index // 2}"  # both agents play the same episode
    candidates = candidates_of(MacroBatch.ingest(items, 64))
    assert candidates.group.tolist() == [0, 1, 0, 1]
    assert candidates.rollout.tolist() == [0, 1, 2, 3]
    assert candidates.token_count.tolist() == [sum(item.action_mask) for item in items]
    assert candidates.behaviour_logp == pytest.approx([sum(item.actor_logps.token_logps) for item in items])


def test_preparing_leaves_the_batch_of_an_ordinary_algorithm_as_it_is():
    items = episodes(seed=4)
    trainer = Trainer(model=tiny_model(), algo=make_grpo(group_size=4), batch_source=ListSource(items), cfg=cpu_config())
    macro = trainer._ingest(items)
    assert asyncio.run(prepare(trainer, macro)).macro is macro


PAIRS = RLAlgorithm(
    "pairs", ConstantCredit(), PairLoss(), sample_columns={"label": lambda item: float(int(item.meta["rollout_id"][1:]) % 3)}
)


@cache
def gradient_of_pairs():
    return gradient_of_the_trainer(PAIRS, episodes((1,) * 8, seed=7), model(), max_seq_len=32)[0]


@settings(max_examples=4)
@given(
    budget=st.integers(40, 300),
    packing=st.sampled_from(["greedy", "optimal", "padding_free"]),
    logits=st.sampled_from(["full", "chunked"]),
)
def test_a_loss_over_pairs_of_samples_has_the_gradient_of_the_unsplit_batch(budget, packing, logits):
    """Hidden states of all samples are gathered in a first pass; pairs cross micro-batches."""
    whole = gradient_of_pairs()
    config = {"max_seq_len": 32, "micro_token_budget": budget, "packing": packing, "logits": logits}
    split, _ = gradient_of_the_trainer(PAIRS, episodes((1,) * 8, seed=7), model(), **config)
    largest = max(value.abs().max().item() for value in whole.values())
    assert largest > 1e-3
    assert_same_tensors(split, whole, atol=1e-6 * max(1.0, largest))


def test_hidden_states_are_the_last_of_the_model_also_with_adapters():
    batch = next(iter(MiniBatch(MacroBatch.ingest(sorting_items(3), 64), np.arange(3), cpu_config()))).tensors
    for network in (tiny_model(), apply_lora(tiny_model(), LoraSettings(rank=2))):
        logits, seen = forward_batch(network, batch, with_hidden=True)
        plain = network(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], output_hidden_states=True)
        torch.testing.assert_close(seen["hidden"], plain.hidden_states[-1], rtol=0, atol=0)
        torch.testing.assert_close(logits, plain.logits, rtol=0, atol=0)
        assert seen["hidden"].requires_grad
    assert "hidden" not in forward_batch(network, batch)[1]
    with pytest.raises(ConfigError, match="get_output_embeddings"):
        forward_batch(Bigram(), batch, with_hidden=True)
