"""The gradient of a mini-batch, of text or with images, does not depend on packing, on order, on
which samples of weight zero are run, on whether logits are computed, or on passes of the tower."""

import asyncio
import random
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from image_items import add_pictures, image_item
from image_samples import bind_features
from policy_losses import LOSSES
from preference_samples import reward_model, rm_config, sorted_pairs
from tiny_vision import make_tiny_qwen2_vl
from training_samples import (
    ListSource,
    assert_same_tensors,
    cpu_config,
    dialogues,
    gradients_of,
    sorting_items,
    tiny_model,
    weights_of,
)

from ludic.models.images.processor import find_processor
from ludic.models.packed_attention import PACKED, set_attention
from ludic.training import RLAlgorithm, Trainer, collate_saw_items, make_bradley_terry, make_grpo
from ludic.training.backend.torch import TorchBackend
from ludic.training.batching import tree_batches
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch
from ludic.training.batching.pair_batches import PreferenceMacroBatch, PreferenceMiniBatch
from ludic.training.batching.preference import collate_preference_items
from ludic.training.batching.tree_batches import TreeMiniBatch
from ludic.training.credit_assignment import ConstantCredit
from ludic.training.loss import (
    BradleyTerryLoss,
    TokenClippedSurrogateLoss,
    token_scores,
)

COUNT = 12


@pytest.fixture(autouse=True)
def tiles_of_64_columns(monkeypatch):
    monkeypatch.setattr(token_scores, "TILE_ELEMENTS", 1)


@pytest.fixture(autouse=True)
def every_common_token_is_shared(monkeypatch):
    monkeypatch.setattr(tree_batches, "MIN_SHARED", 1)


@cache
def model(kind="text"):
    if kind == "text":
        return tiny_model()
    seeing, _ = make_tiny_qwen2_vl()
    set_attention(seeing, PACKED)
    return seeing.double()  # its sums are longer: in float32 they round to more than 1e-6


@cache
def samples(kind="text"):
    if kind == "text":
        return tuple(sorting_items(COUNT, seed=3))
    processor, draw = find_processor(model(kind)), random.Random(3)
    one, two = add_pictures(processor, [(16, 16), (16, 16)])
    prompts = [["?", one], ["?", two], ["?", one, "&", two, "!"], ["none?"]]
    items = []
    for index in range(COUNT):
        answer = [draw.randint(97, 122) for _ in range(draw.randint(1, 9))]
        item, _ = image_item(processor, prompts[index % 4], answer, index=index, logps=[-5 - draw.random() for _ in answer])
        item.weight = draw.choice([-1.0, 0.0, 0.5, 1.5])
        items.append(item)
    return tuple(items)


def algorithm(name):
    return RLAlgorithm(name, ConstantCredit(1.0), LOSSES[name])


@cache
def unsplit_gradient(name, kind="text"):
    """One padded batch of all samples, directly through the loss, without a plan, totals or
    skipping."""
    batch = collate_saw_items(samples(kind), pad_token_id=0, device="cpu")
    model(kind).zero_grad(set_to_none=True)
    if kind == "images":
        batch["images"] = bind_features(model(kind), batch["images"])
    loss, _ = algorithm(name).compute_loss(model(kind), batch)
    loss.backward()
    return gradients_of(model(kind)), loss.item()


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(["text", "images"]),
    order=st.permutations(range(COUNT)),
    budget=st.integers(20, 260),
    layout=st.sampled_from(["greedy", "optimal", "padding_free", "trees"]),
    overhead_tokens=st.sampled_from([0, 64, 256]),
    skip=st.booleans(),
    logits=st.sampled_from(["full", "chunked"]),
    patches=st.sampled_from([16, 32]),
)
def test_the_gradient_equals_that_of_the_unsplit_batch(kind, name, order, budget, layout, overhead_tokens, skip, logits, patches):
    expected, expected_loss = unsplit_gradient(name, kind)
    trees = layout == "trees"
    packed = {"prefix_sharing": "tree"} if trees else {"prefix_sharing": "off", "packing": layout}
    sizes = {"max_seq_len": 20, "micro_token_budget": budget, "image_patch_budget": patches}
    cfg = cpu_config(overhead_tokens=overhead_tokens, logits=logits, **sizes, **packed)
    macro = MacroBatch.ingest([samples(kind)[index] for index in order], cfg.max_seq_len)
    skips = skip and LOSSES[name].zero_weight_is_zero_gradient
    mini_batch = (TreeMiniBatch if trees else MiniBatch)(macro, np.arange(COUNT), cfg, skip_zero_weight=skips)
    assert getattr(mini_batch, "has_trees", False) == trees
    backend = TorchBackend(model(kind), cfg, algo=algorithm(name))
    assert backend.shares_prefixes == trees
    model(kind).zero_grad(set_to_none=True)
    result = asyncio.run(backend.forward_backward(mini_batch, totals=mini_batch.totals).result())
    assert result.images.get("images/distinct") == (None if kind == "text" else 2)
    assert_same_tensors(gradients_of(model(kind)), expected, atol=1e-6 * max(1.0, largest(expected)))
    assert result.loss.item() == pytest.approx(expected_loss, rel=1e-5, abs=1e-6)


TURNS = (3, 1, 4, 2)


@cache
def turns():
    return tuple(dialogues(TURNS, seed=5))


@cache
def gradient_of_one_row_a_turn(name):
    batch = collate_saw_items(turns(), pad_token_id=0, device="cpu")
    model().zero_grad(set_to_none=True)
    loss, _ = algorithm(name).compute_loss(model(), batch)
    loss.backward()
    return gradients_of(model()), loss.item()


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    episodes=st.permutations(range(len(TURNS))),
    swapped=st.booleans(),
    budget=st.integers(70, 260),
    packing=st.sampled_from(["greedy", "optimal", "padding_free"]),
    skip=st.booleans(),
    logits=st.sampled_from(["full", "chunked"]),
)
def test_the_gradient_of_merged_turns_equals_that_of_one_row_per_turn(name, episodes, swapped, budget, packing, skip, logits):
    expected, expected_loss = gradient_of_one_row_a_turn(name)
    begins = np.cumsum((0, *TURNS))
    items = [item for episode in episodes for item in turns()[begins[episode] : begins[episode + 1]]]
    if swapped:  # the last turns first: most of them have their own row again
        items = items[::-1]
    cfg = cpu_config(max_seq_len=70, micro_token_budget=budget, packing=packing, logits=logits)
    macro = MacroBatch.ingest(items, cfg.max_seq_len, merge_turns=True)
    skips = skip and LOSSES[name].zero_weight_is_zero_gradient
    mini_batch = MiniBatch(macro, np.arange(len(items)), cfg, skip_zero_weight=skips)
    micro_batches = list(mini_batch)
    assert all(batch.tensors["input_ids"].numel() <= budget for batch in micro_batches)
    assert sum(batch.num_items for batch in micro_batches) == len(mini_batch.rows)
    assert any("turns" in batch.tensors for batch in micro_batches) == (not swapped)
    backend = TorchBackend(model(), cfg, algo=algorithm(name))
    model().zero_grad(set_to_none=True)
    result = asyncio.run(backend.forward_backward(mini_batch, totals=mini_batch.totals).result())
    assert_same_tensors(gradients_of(model()), expected, atol=1e-6 * max(1.0, largest(expected)))
    assert result.loss.item() == pytest.approx(expected_loss, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("packing", ["optimal", "padding_free"])
@pytest.mark.parametrize("name", ["grpo", "gspo", "composite_entropy"])
def test_the_samples_of_a_shared_row_can_be_separated(name, packing):
    cfg = cpu_config(max_seq_len=70, micro_token_budget=1000, packing=packing)
    macro = MacroBatch.ingest(list(turns()), cfg.max_seq_len, merge_turns=True)
    [micro_batch] = MiniBatch(macro, np.arange(len(turns())), cfg)
    assert micro_batch.tensors["turns"].shape == (len(turns()), 3)
    position = {(item.meta["rollout_id"], item.meta["step_index"]): item for item in turns()}
    for index, sample_name in enumerate(micro_batch.sample_names):
        rollout, step = sample_name.split("/")
        alone = collate_saw_items([position[rollout, int(step)]], pad_token_id=0, device="cpu")
        want, _ = algorithm(name).compute_loss(model(), alone)
        got, _ = algorithm(name).compute_loss(model(), micro_batch.row(index).tensors)
        assert got.item() == pytest.approx(want.item(), rel=1e-5, abs=1e-6)


def test_episodes_share_a_row_unless_the_loss_reads_the_logits():
    class ReadsLogits(TokenClippedSurrogateLoss):
        reads_shared_only = False

    def computed(loss, **settings):
        cfg = cpu_config(
            max_seq_len=70,
            micro_token_budget=70,
            packing="padding_free",
            skip_zero_weight=False,
            prefix_sharing="off",
            **settings,
        )
        algo = RLAlgorithm("test", ConstantCredit(1.0), loss)
        trainer = Trainer(model=tiny_model(), algo=algo, batch_source=ListSource(turns()), cfg=cfg)
        return trainer.train_step_sync()["perf/real_tokens"]

    begins = np.cumsum((0, *TURNS))
    merged = sum(len(turns()[end - 1].input_ids) for end in begins[1:])
    apart = sum(len(item.input_ids) for item in turns())
    assert computed(TokenClippedSurrogateLoss()) == merged < 0.6 * apart
    assert computed(ReadsLogits()) == computed(TokenClippedSurrogateLoss(), merge_turns=False) == apart


def largest(gradients):
    return max(gradient.abs().max().item() for gradient in gradients.values())


def test_the_expected_gradients_are_not_zero():
    for name in LOSSES:
        assert largest(unsplit_gradient(name)[0]) > 1e-3, name
        seeing, _ = unsplit_gradient(name, "images")
        assert largest({part: gradient for part, gradient in seeing.items() if "visual" in part}) > 1e-3, name


class DescentTrainer(Trainer):
    """Gradient descent with learning rate 1, so the step is the gradient."""

    def initialize_optimizer(self):
        return torch.optim.SGD([p for p in self.model.parameters() if p.requires_grad], lr=1.0)


@pytest.mark.parametrize("packing", ["greedy", "optimal", "padding_free"])
@pytest.mark.parametrize("budget", [20, 57, 1000])
def test_a_step_of_the_trainer_equals_the_gradient_of_the_unsplit_batch(packing, budget):
    expected, _ = unsplit_gradient("grpo")
    trained = tiny_model()
    before = weights_of(trained)
    cfg = cpu_config(max_seq_len=20, micro_token_budget=budget, packing=packing, max_grad_norm=None)
    trainer = DescentTrainer(model=trained, algo=algorithm("grpo"), batch_source=ListSource(samples()), cfg=cfg)
    trainer.train_step_sync()
    moved = {name: before[name] - weight for name, weight in weights_of(trained).items()}
    assert_same_tensors(moved, expected, atol=1e-6 * max(1.0, largest(expected)))


def test_leaving_out_samples_of_weight_zero_saves_their_tokens_and_keeps_the_gradient():
    items = sorting_items(16, seed=5)
    tokens = sum(len(item.input_ids) for item in items)
    weightless = sum(len(item.input_ids) for item in items if item.weight == 0)
    assert 0.2 < weightless / tokens < 0.6
    moved, computed = {}, {}
    for skip in (True, False):
        trained = tiny_model()
        before = weights_of(trained)
        cfg = cpu_config(skip_zero_weight=skip, max_grad_norm=None)
        algo = make_grpo(group_size=4)
        trainer = DescentTrainer(model=trained, algo=algo, batch_source=ListSource(items), cfg=cfg)
        stats = trainer.train_step_sync()
        moved[skip] = {name: before[name] - weight for name, weight in weights_of(trained).items()}
        computed[skip] = stats["perf/real_tokens"]
        assert stats["train/zero_weight_skipped"] == (sum(item.weight == 0 for item in items) if skip else 0)
    assert_same_tensors(moved[True], moved[False], atol=1e-6)
    assert computed[False] == tokens
    assert computed[True] == tokens - weightless


def test_an_entropy_term_keeps_samples_of_weight_zero_in_the_forward_pass():
    items = sorting_items(8, seed=5)
    trainer = Trainer(
        model=tiny_model(),
        algo=algorithm("composite_entropy"),
        batch_source=ListSource(items),
        cfg=cpu_config(skip_zero_weight=True),
    )
    stats = trainer.train_step_sync()
    assert stats["train/zero_weight_skipped"] == 0
    assert stats["perf/real_tokens"] == sum(len(item.input_ids) for item in items)


PREFERENCE_LOSSES = {
    "bradley_terry": BradleyTerryLoss(beta=2.0, label_smoothing=0.1),
    "l1": BradleyTerryLoss(regularization_lambda=0.1, regularization_type="l1"),
    "l2": BradleyTerryLoss(regularization_lambda=0.1, score_regularization_lambda=0.01),
}
PAIRS = 7


@cache
def scoring_model():
    return reward_model()


@cache
def pairs():
    return tuple(sorted_pairs(PAIRS, seed=3))


def preference_algorithm(name):
    return RLAlgorithm(name, ConstantCredit(1.0), PREFERENCE_LOSSES[name])


@cache
def unsplit_preference_gradient(name):
    batch = collate_preference_items(pairs(), pad_token_id=0, device="cpu")
    scoring_model().zero_grad(set_to_none=True)
    loss, _ = preference_algorithm(name).compute_loss(scoring_model(), batch)
    loss.backward()
    return gradients_of(scoring_model()), loss.item()


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    order=st.permutations(range(2 * PAIRS)),
    budget=st.integers(46, 300),
    packing=st.sampled_from(["greedy", "optimal"]),
    overhead_tokens=st.sampled_from([0, 64, 256]),
)
def test_the_gradient_of_pairs_equals_that_of_the_unsplit_batch(name, order, budget, packing, overhead_tokens):
    """Samples come in any order, so the two samples of a pair can be far apart."""
    expected, expected_loss = unsplit_preference_gradient(name)
    cfg = rm_config(max_seq_len=23, micro_token_budget=budget, packing=packing, overhead_tokens=overhead_tokens)
    macro = PreferenceMacroBatch.ingest_pairs([pairs()[index] for index in order], cfg.max_seq_len)
    mini_batch = PreferenceMiniBatch(macro, np.arange(2 * PAIRS), cfg)
    for micro_batch in mini_batch:
        meta = micro_batch.tensors["meta"]
        assert micro_batch.tensors["input_ids"].numel() <= budget
        assert meta["pair_id"][::2] == meta["pair_id"][1::2]
        assert meta["role"] == ["chosen", "rejected"] * (micro_batch.num_items // 2)
    backend = TorchBackend(scoring_model(), cfg, algo=preference_algorithm(name))
    scoring_model().zero_grad(set_to_none=True)
    result = asyncio.run(backend.forward_backward(mini_batch, totals=mini_batch.totals).result())
    assert_same_tensors(gradients_of(scoring_model()), expected, atol=1e-6 * max(1.0, largest(expected)))
    assert result.loss.item() == pytest.approx(expected_loss, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("logits", ["full", "chunked"])
def test_both_passes_use_the_temperature(logits):
    """The norm is of the scores that the gradient is taken of: log-probabilities at temperature
    0.5."""

    def gradient(budget):
        cfg = rm_config(max_seq_len=23, micro_token_budget=budget, temperature=0.5, logits=logits)
        algo = make_bradley_terry(beta=0.1, score_type="logprob", regularization_lambda=0.1)
        mini_batch = PreferenceMiniBatch(PreferenceMacroBatch.ingest_pairs(pairs(), cfg.max_seq_len), np.arange(2 * PAIRS), cfg)
        backend = TorchBackend(model(), cfg, algo=algo)
        model().zero_grad(set_to_none=True)
        asyncio.run(backend.forward_backward(mini_batch, totals=mini_batch.totals).result())
        return gradients_of(model()), len(mini_batch)

    (whole, one), (split, several) = gradient(1000), gradient(60)
    assert one == 1 < several
    assert_same_tensors(split, whole, atol=1e-5 * max(1.0, largest(whole)))


def test_both_passes_use_the_same_dropout_masks():
    """With dropout, the norm must be of the scores that the gradient is taken of, so both passes
    must draw the same masks."""

    class Recording(BradleyTerryLoss):
        squares = 0.0

        def compute(self, logits, batch, *, shared=None):
            Recording.squares += (logits[::2] - logits[1::2]).square().sum().item()
            return super().compute(logits, batch, shared=shared)

    model = reward_model(attention_dropout=0.5)
    cfg = rm_config(max_seq_len=23, micro_token_budget=46)
    macro = PreferenceMacroBatch.ingest_pairs(pairs(), cfg.max_seq_len)
    mini_batch = PreferenceMiniBatch(macro, np.arange(2 * PAIRS), cfg)
    assert len(mini_batch) > 3

    def losses(regularization_lambda):
        loss = Recording(regularization_lambda=regularization_lambda)
        Recording.squares = 0.0
        backend = TorchBackend(model, cfg, algo=RLAlgorithm("test", ConstantCredit(), loss))
        torch.manual_seed(1)
        result = asyncio.run(backend.forward_backward(mini_batch, totals=mini_batch.totals).result())
        return result.loss.item(), Recording.squares, torch.rand(1).item()

    plain, squares, random_value = losses(0.0)
    with_norm, squares_again, random_value_again = losses(1.0)
    assert (squares_again, random_value_again) == (squares, random_value)
    assert with_norm - plain == pytest.approx(squares**0.5, rel=1e-5)
