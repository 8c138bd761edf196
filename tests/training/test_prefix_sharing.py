"""Rows of prefix trees have the losses, statistics and gradients of separate rows, for every loss
and for models of many architectures."""

import asyncio
import logging
import random
import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from loss_batches import Bigram
from policy_losses import LOSSES
from small_models import CAUSAL, LLAMA, causal_model, make_from_config, mixture_model, model_with_hidden_windows
from torch import nn
from training_samples import (
    ListSource,
    assert_same_tensors,
    branching_items,
    cpu_config,
    dialogues,
    gradients_of,
    sorting_items,
    tiny_model,
    weights_of,
)

from ludic.errors import ConfigError
from ludic.models.packed_attention import PACKED, get_attention
from ludic.models.prefix_trees import PREFIX_TREES
from ludic.training import RLAlgorithm, Trainer, TrainerConfig, collate_saw_items, make_grpo
from ludic.training.algorithm import forward_for_loss
from ludic.training.backend.torch import TorchBackend, enable_checkpointing
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch
from ludic.training.batching.tree_batches import TreeMiniBatch
from ludic.training.credit_assignment import ConstantCredit
from ludic.training.loss import TokenClippedSurrogateLoss
from ludic.training.loss.actions import split_actions
from ludic.training.loss.correction import TruncatedImportanceSampling
from ludic.training.preflight import layouts
from ludic.training.reference import FrozenModel
from ludic.training.types import ActorTokenLogps, SampleAttachments

WITH_ENTROPY = LOSSES["composite_entropy"]


def algorithm(loss=WITH_ENTROPY, **options):
    return RLAlgorithm("test", ConstantCredit(1.0), loss, **options)


def backward(model, algo, mini_batch, cfg):
    """Gradients, loss and statistics."""
    backend = TorchBackend(model, cfg, algo=algo)
    assert backend.shares_prefixes == (cfg.prefix_sharing != "off")
    model.zero_grad(set_to_none=True)
    result = asyncio.run(backend.forward_backward(mini_batch, totals=mini_batch.totals).result())
    return gradients_of(model), result.loss.item(), result.micro_stats


def largest(gradients):
    return max(gradient.abs().max().item() for gradient in gradients.values())


def assert_same_step(model, algo, items, *, atol=1e-5, **options):
    """The gradient of trees equals that of one padded batch. Returns the micro-batches of trees."""
    longest = max(len(item.input_ids) for item in items)
    base = {"max_seq_len": longest, "micro_token_budget": len(items) * longest}
    macro = MacroBatch.ingest(items, longest)
    cfg = cpu_config(**{**options, **base, "logits": "full"})
    plain = MiniBatch(macro, np.arange(len(macro.items)), cfg)
    want, want_loss, _ = backward(model, algo, plain, cfg)
    cfg = cpu_config(**{**base, **options, "prefix_sharing": "tree"})
    shared = TreeMiniBatch(macro, np.arange(len(macro.items)), cfg)
    got, got_loss, _ = backward(model, algo, shared, cfg)
    assert_same_tensors(got, want, atol=atol * max(1.0, largest(want)))
    assert got_loss == pytest.approx(want_loss, rel=1e-5, abs=1e-5)
    return list(shared)


@cache
def model():
    return tiny_model()


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=6, deadline=None)
@given(
    groups=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
    turns=st.lists(st.integers(1, 4), max_size=2),
    spare=st.integers(0, 120),
    logits=st.sampled_from(["full", "chunked"]),
    temperature=st.sampled_from([1.0, 0.7]),
)
def test_the_gradient_of_trees_equals_that_of_separate_rows(name, groups, seed, turns, spare, logits, temperature):
    items = [*branching_items(groups, seed), *dialogues(turns, seed)]
    longest = max(len(item.input_ids) for item in items)
    micro_batches = assert_same_step(
        model(), algorithm(LOSSES[name]), items, micro_token_budget=longest + spare, logits=logits, temperature=temperature
    )
    assert sum(batch.num_items for batch in micro_batches) == len(items)
    for batch in micro_batches:
        assert batch.tensors[PREFIX_TREES].input_ids.numel() <= longest + spare


def test_the_expected_gradients_are_not_zero():
    items = branching_items((6, 6), 1)
    cfg = cpu_config(micro_token_budget=1000)
    for name, loss in LOSSES.items():
        mini_batch = MiniBatch(MacroBatch.ingest(items, 32), np.arange(12), cfg)
        assert largest(backward(model(), algorithm(loss), mini_batch, cfg)[0]) > 1e-4, name


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 1000), logits=st.sampled_from(["full", "chunked"]))
def test_a_correction_weights_the_tokens_of_trees_as_those_of_rows(seed, logits):
    algo = algorithm(correction=TruncatedImportanceSampling(2.0))
    assert_same_step(model(), algo, branching_items((4, 3), seed), logits=logits)


WINDOWS = {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 0}
MODELS = {
    **{name: lambda name=name: causal_model(name) for name in CAUSAL if name not in ("Falcon", "Bloom", "OPT")},
    "OPT": lambda: causal_model("OPT", dropout=0.0),  # it has no module for its dropout
    "Qwen3": lambda: make_from_config("Qwen3", "ForCausalLM", {**LLAMA, "head_dim": 8}, 0),
    "Gemma3": lambda: make_from_config("Gemma3Text", "ForCausalLM", {**LLAMA, "head_dim": 8, "sliding_window": 5}, 0),
    "Olmo2": lambda: make_from_config("Olmo2", "ForCausalLM", LLAMA, 0),
    "Qwen2 with windows": lambda: causal_model("Qwen2", **WINDOWS),
    "Mistral with windows": lambda: make_from_config("Mistral", "ForCausalLM", {**LLAMA, "sliding_window": 5}, 0),
    "DeepseekV3": lambda: mixture_model("DeepseekV3"),
}
small = cache(lambda name: MODELS[name]())


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=3, deadline=None)
@given(groups=st.lists(st.integers(1, 5), min_size=1, max_size=3), seed=st.integers(0, 1000), spare=st.integers(0, 200))
def test_every_architecture_has_the_gradient_of_separate_rows(name, groups, seed, spare):
    items = branching_items(groups, seed)
    longest = max(len(item.input_ids) for item in items)
    network = small(name).eval()
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    assert_same_step(network, algorithm(), items, micro_token_budget=longest + spare)


def test_recomputed_activations_have_the_same_gradient():
    network = tiny_model().train()
    enable_checkpointing(network)
    assert_same_step(network, algorithm(), branching_items((5, 4), 3))


def bias():
    """Attends to all tokens of a row, whatever it is told."""
    network = tiny_model()
    for layer in network.model.layers:
        inner = layer.forward
        layer.forward = lambda hidden, *args, inner=inner, **options: inner(
            hidden + hidden.mean(dim=1, keepdim=True), *args, **options
        )
    return network


def mamba():
    from transformers import MambaConfig, MambaForCausalLM

    torch.manual_seed(0)
    network = MambaForCausalLM(MambaConfig(vocab_size=259, hidden_size=16, num_hidden_layers=2, initializer_range=0.2))
    network.config._attn_implementation = "sdpa"  # which it has none of
    return network


def bias_behind_a_head_of_zeros():
    network = bias()
    nn.init.zeros_(network.lm_head.weight)
    return network


def eager():
    network = tiny_model()
    network.set_attn_implementation("eager")
    return network


class ReadsLogits(TokenClippedSurrogateLoss):
    reads_shared_only = False


@pytest.mark.parametrize(
    ("make", "loss", "reason"),
    [
        (Bigram, None, "Bigram is None, not sdpa"),
        (mamba, None, "MambaForCausalLM (has other logits|does not accept)"),
        (bias, None, "Qwen2ForCausalLM has other logits for trees"),
        (bias_behind_a_head_of_zeros, None, "same logits .*the tokens before"),
        (eager, None, "Qwen2ForCausalLM is eager, not sdpa"),
        (lambda: causal_model("Bloom"), None, "BloomForCausalLM"),
        (model_with_hidden_windows, None, "windows of which only its mask knows"),
        (tiny_model, ReadsLogits(), "ReadsLogits reads logits"),
    ],
)
@pytest.mark.parametrize("sharing", ["tree", "auto"])
def test_unsupported_models_have_rows_of_their_own_and_one_line_says_why(make, loss, reason, sharing, caplog):
    network = make()
    before = get_attention(network)
    algo = algorithm(loss or TokenClippedSurrogateLoss())
    cfg = cpu_config(prefix_sharing=sharing)
    with caplog.at_level(logging.INFO, "ludic.training.preflight.layouts"):
        trainer = Trainer(model=network, algo=algo, batch_source=ListSource(branching_items((4, 4))), cfg=cfg)
        trainer.train_sync(2)
    [line] = [record for record in caplog.records if "sharing prefixes" in record.getMessage()]
    assert re.search(reason, line.getMessage())
    assert line.levelno == (logging.WARNING if sharing == "tree" else logging.INFO)
    # A loss with rows of its own does not keep passes without gradient from trees.
    assert get_attention(network) == (before if loss is None else PACKED)


def test_windows_that_no_sample_can_exceed_do_not_keep_a_model_from_trees():
    """PhiMoE has windows of all its positions, 131,072; so has this model, of its 64."""
    network = model_with_hidden_windows(64)
    Trainer(
        model=network, algo=algorithm(), batch_source=ListSource(branching_items((4, 4))), cfg=cpu_config(prefix_sharing="tree")
    )
    assert get_attention(network) == PACKED


class DescentTrainer(Trainer):
    """Gradient descent with learning rate 1, so the step is the gradient."""

    def initialize_optimizer(self):
        return torch.optim.SGD([p for p in self.model.parameters() if p.requires_grad], lr=1.0)


def step_of(items, **options):
    """What a step of the trainer subtracts from the weights, and its statistics."""
    network = tiny_model()
    before = weights_of(network)
    cfg = cpu_config(max_grad_norm=None, **options)
    trainer = DescentTrainer(model=network, algo=algorithm(), batch_source=ListSource(items), cfg=cfg)
    stats = trainer.train_step_sync()
    return {name: before[name] - weight for name, weight in weights_of(network).items()}, stats


@pytest.mark.parametrize("packing", ["greedy", "optimal", "padding_free"])
@pytest.mark.parametrize("logits", ["full", "chunked"])
def test_a_step_of_the_trainer_has_the_statistics_of_separate_rows(packing, logits):
    items = branching_items((6, 5, 1), 7)
    want, plain = step_of(items, packing=packing, prefix_sharing="off")
    got, shared = step_of(items, packing=packing, prefix_sharing="tree", logits=logits)
    assert_same_tensors(got, want, atol=1e-5 * max(1.0, largest(want)))
    for key, value in plain.items():
        if not key.startswith(("perf/", "train/max_ratio")):
            assert shared[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key
    tokens = sum(len(item.input_ids) for item in items)
    assert shared["perf/real_tokens"] == shared["perf/padded_tokens"] < 0.7 * tokens
    assert shared["perf/real_tokens"] + shared["perf/shared_tokens"] == tokens == plain["perf/real_tokens"]
    assert plain["perf/shared_tokens"] == 0
    assert shared["perf/padded_tokens_unpacked"] == plain["perf/padded_tokens_unpacked"]


def test_the_speed_counts_the_tokens_of_the_samples_and_a_factor_says_how_many_were_shared():
    """As an example 3 samples of 4 tokens, of which 3 are shared: 3 + 3 computed, a factor of 2."""
    items = branching_items((6, 5), 7)
    tokens = sum(len(item.input_ids) for item in items)
    for sharing in ("off", "tree"):
        stats = step_of(items, prefix_sharing=sharing)[1]
        assert stats["perf/tokens_per_s"] == pytest.approx(tokens / stats["perf/step_s"])
        assert stats["perf/sharing_factor"] == pytest.approx(tokens / stats["perf/real_tokens"])
        assert (stats["perf/sharing_factor"] > 1.4) == (sharing == "tree")


def test_a_loss_that_is_replaced_decides_anew():
    """As `reads_shared_only` is read at each step."""
    items = branching_items((6, 5), 7)
    algo = algorithm(TokenClippedSurrogateLoss())
    trainer = Trainer(
        model=tiny_model(), algo=algo, batch_source=ListSource(items), cfg=cpu_config(prefix_sharing="tree", lr=0.0)
    )
    shared = []
    for loss in (algo.loss, ReadsLogits(), TokenClippedSurrogateLoss()):
        algo.loss = loss
        shared.append(trainer.train_step_sync()["perf/shared_tokens"])
    assert shared[0] == shared[2] > 0 == shared[1]


def test_by_default_prefixes_are_shared_where_that_saves_a_tenth_of_the_tokens():
    """The prompts of the first batch have at least 8 tokens in common, those of the second fewer:
    they are digits."""
    alike, different = branching_items((6, 6), 1), sorting_items(12, seed=4)
    assert TrainerConfig(pad_token_id=0).prefix_sharing == "auto"
    assert step_of(alike)[1]["perf/shared_tokens"] > 50
    assert step_of(different)[1]["perf/shared_tokens"] == 0


@pytest.mark.parametrize("name", ["grpo", "gspo", "composite_entropy"])
def test_the_samples_of_a_tree_can_be_separated(name):
    items = branching_items((4, 2), 3)
    cfg = cpu_config(prefix_sharing="tree", micro_token_budget=1000)
    algo, network = algorithm(LOSSES[name]), tiny_model()
    assert TorchBackend(network, cfg, algo=algo).shares_prefixes
    [batch] = TreeMiniBatch(MacroBatch.ingest(items, 32), np.arange(len(items)), cfg)
    by_name = {f"{item.meta['rollout_id']}/0": item for item in items}
    for index, sample_name in enumerate(batch.sample_names):
        alone = collate_saw_items([by_name[sample_name]], pad_token_id=0, device="cpu")
        want, _ = algo.compute_loss(network, alone)
        got, _ = algo.compute_loss(network, batch.row(index).tensors)
        assert got.item() == pytest.approx(want.item(), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("logits", ["full", "chunked"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_log_probabilities_of_a_tree_are_those_of_its_samples(logits, temperature):
    items = branching_items((4, 2), 3)
    cfg = cpu_config(prefix_sharing="tree", micro_token_budget=1000, logits=logits)
    backend = TorchBackend(tiny_model(), cfg, algo=algorithm())
    assert backend.computes_trees
    macro = MacroBatch.ingest(items, 32)
    mini_batch = TreeMiniBatch(macro, np.arange(len(items)), cfg)
    [tree] = mini_batch
    got = split_actions(backend.forward_logprobs(tree, temperature=temperature).wait(), tree.tensors)
    for row, logps in zip(mini_batch.rows, got, strict=True):
        [alone] = MiniBatch(macro, np.array([row]), cfg)
        want = backend.forward_logprobs(alone, temperature=temperature).wait()
        assert len(logps) == sum(items[row].action_mask)
        torch.testing.assert_close(logps, split_actions(want, alone.tensors)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=4, deadline=None)
@given(copies=st.integers(2, 5), seed=st.integers(0, 1000), logits=st.sampled_from(["full", "chunked"]))
def test_equal_answers_are_computed_once_and_each_has_its_own_loss(name, copies, seed, logits):
    """They differ in weights and in sampled log-probabilities. A row has as many tokens as one."""
    draw = random.Random(seed)
    [first, other] = branching_items((2,), seed)
    items = [
        replace(
            first,
            weight=draw.choice([-1.0, -0.5, 0.5, 1.5]),
            meta={**first.meta, "rollout_id": f"copy {number}"},
            attachments=SampleAttachments(ActorTokenLogps([-0.2 - 5 * draw.random() for _ in first.actor_logps.token_logps])),
        )
        for number in range(copies)
    ]
    [batch] = assert_same_step(model(), algorithm(LOSSES[name]), items, logits=logits)
    assert batch.tensors[PREFIX_TREES].input_ids.tolist() == [list(first.input_ids)]
    assert batch.tensors["input_ids"].numel() == copies * len(first.input_ids)
    assert_same_step(model(), algorithm(LOSSES[name]), [*items, other], logits=logits)


@pytest.mark.parametrize("weights", [(1, 1, 1, 1, 1), (1, -0.5, 0.25, 0.25, -1)])
def test_equal_samples_differ_after_a_step_of_adam_only_where_the_gradient_is_rounding_error(weights):
    """The first step is u(g) = lr * g / (|g| + eps). Two gradients of one sign differ there by lr *
    eps * |a - b| / ((|a| + eps) * (|b| + eps)), with lr = 1e-2, eps = 1e-8 and |a - b| <= 1e-5 at
    most 1e-5 from |a|, |b| = 1e-5 on. Below, rounding errors of 1e-9 become steps of 1e-3."""
    [first] = branching_items((1,), 0)
    copies = [replace(first, weight=w, meta={**first.meta, "rollout_id": f"copy {at}"}) for at, w in enumerate(weights)]
    gradients, steps = {}, {}
    for sharing in ("tree", "off"):
        network = tiny_model()
        cfg = cpu_config(prefix_sharing=sharing, max_grad_norm=None)
        kind = TreeMiniBatch if sharing == "tree" else MiniBatch
        mini_batch = kind(MacroBatch.ingest(copies, 32), np.arange(5), cfg)
        gradients[sharing] = backward(network, algorithm(), mini_batch, cfg)[0]
        Trainer(model=network, algo=algorithm(), batch_source=ListSource(copies), cfg=cfg).train_step_sync()
        steps[sharing] = weights_of(network)
    assert_same_tensors(gradients["tree"], gradients["off"], atol=1e-5)
    for name, want in gradients["off"].items():
        known = (want.abs() > 1e-5) & (gradients["tree"][name].abs() > 1e-5)
        same_sign = known & (want.sign() == gradients["tree"][name].sign())
        assert known.any()
        torch.testing.assert_close(steps["tree"][name][same_sign], steps["off"][name][same_sign], atol=1.1e-5, rtol=0)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_loss_reads_the_hidden_states_of_its_samples(chunked):
    class ReadsHidden(TokenClippedSurrogateLoss):
        reads_hidden = True

    cfg = cpu_config(prefix_sharing="tree", micro_token_budget=1000)
    backend = TorchBackend(tiny_model(), cfg, algo=algorithm())
    assert backend.shares_prefixes
    items = branching_items((4, 2), 3)
    [tree] = TreeMiniBatch(MacroBatch.ingest(items, 32), np.arange(len(items)), cfg)
    rows = {name: value for name, value in tree.tensors.items() if name != PREFIX_TREES}
    with torch.no_grad():
        got, want = (
            forward_for_loss(backend.model, batch, ReadsHidden(), chunked_logits=chunked)[1]["hidden"]
            for batch in (tree.tensors, rows)
        )
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_an_unknown_way_to_share_is_refused():
    with pytest.raises(ConfigError, match=r"prefix_sharing \('trie'\) .*auto, off, tree"):
        cpu_config(prefix_sharing="trie")


def test_grpo_takes_the_same_steps_with_and_without_trees():
    items = branching_items((4, 4), 9)

    def weights(sharing):
        network = tiny_model()
        trainer = Trainer(
            model=network,
            algo=make_grpo(group_size=4),
            batch_source=ListSource(items),
            cfg=cpu_config(prefix_sharing=sharing, minibatches_per_batch=2, epochs_per_batch=2, eps=1e-3),
        )
        trainer.train_sync(3)
        return weights_of(network)

    assert_same_tensors(weights("tree"), weights("off"), atol=1e-4)


@pytest.mark.parametrize("make", [tiny_model, eager])
def test_whether_trees_are_computed_is_decided_when_the_trainer_is_made(make, monkeypatch, caplog):
    """So that what samples from the model, before the first step or after a resume, finds the same
    attention. Making it draws no random number."""
    network, frozen = make(), make()
    cfg = cpu_config(prefix_sharing="auto")
    state = torch.random.get_rng_state()
    with caplog.at_level(logging.INFO, layouts.__name__):
        trainer = Trainer(
            model=network,
            algo=algorithm(),
            batch_source=ListSource(branching_items((4, 4), 1)),
            cfg=cfg,
            reference=FrozenModel(frozen, cfg),
        )
    assert torch.equal(torch.random.get_rng_state(), state)
    expected = PACKED if make is tiny_model else "eager"
    assert get_attention(network) == expected
    assert get_attention(trainer.reference.model) == expected
    said = [record for record in caplog.records if record.name == layouts.__name__]
    assert len(said) == (0 if make is tiny_model else 2)
    monkeypatch.setattr(layouts, "_prepare_for_trees", None)  # nothing is asked any more
    assert (trainer.train_step_sync()["perf/shared_tokens"] > 0) == (make is tiny_model)
