"""Pairs that share their prompt in rows of prefix trees have the scores, losses and gradients of
separate rows, for reward models and for direct preference optimization."""

import asyncio
import logging
import random
import re
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from loss_batches import Bigram
from preference_samples import dpo_config, reward_model, rm_config, with_reference
from small_models import CAUSAL, LLAMA, make_from_config, scoring_model
from torch import nn
from training_samples import ListSource, assert_same_tensors, gradients_of, tiny_model, weights_of

from ludic.models.packed_attention import get_attention
from ludic.models.prefix_trees import PREFIX_TREES
from ludic.training import (
    BradleyTerryLoss,
    CheckpointConfig,
    DPOTrainer,
    FrozenModel,
    RLAlgorithm,
    RMTrainer,
    SAWItem,
    make_dpo,
    preference_batches,
)
from ludic.training.backend.torch import TorchBackend
from ludic.training.batching.pair_batches import PreferenceMacroBatch, PreferenceMiniBatch
from ludic.training.batching.rank_plans import RankShare
from ludic.training.batching.tree_batches import PairTreeMiniBatch
from ludic.training.credit_assignment import ConstantCredit
from ludic.training.loss import CompositeLoss, LossTerm

PAD = 0
REWARD_LOSSES = {
    "plain": BradleyTerryLoss(),
    "smoothed": BradleyTerryLoss(beta=2.0, label_smoothing=0.1),
    "l2": BradleyTerryLoss(regularization_lambda=0.3),
    "l1": BradleyTerryLoss(regularization_lambda=0.3, regularization_type="l1"),
    "squares": BradleyTerryLoss(score_regularization_lambda=0.2),
    "composite": CompositeLoss([LossTerm("a", BradleyTerryLoss()), LossTerm("b", BradleyTerryLoss(beta=3.0), 0.5)]),
}
LOGPROB_LOSSES = {
    "logprob": BradleyTerryLoss(score_type="logprob", beta=0.3),
    "logprob_l2": BradleyTerryLoss(score_type="logprob", beta=0.3, regularization_lambda=0.1),
    "dpo": make_dpo(beta=0.5, label_smoothing=0.1).loss,
    "ipo": make_dpo(beta=0.2, loss_type="ipo").loss,
    "robust": make_dpo(beta=0.5, loss_type="robust", label_smoothing=0.2).loss,
    "likelihood": make_dpo(beta=0.5, nll_coeff=0.5).loss,
}


def sample(pair_id, role, prompt, answer, label=1.0):
    ids = [*prompt, *answer]
    actions = [0] * len(prompt) + [1] * len(answer)
    return SAWItem(ids, [1] * len(ids), actions, 1.0, {"pair_id": pair_id, "role": role, "label": label})


def pairs_of(counts, seed=0):
    """Pairs of one prompt for each count; answers begin alike, some end with the padding token, and
    the first answer is in several pairs."""
    draw, items = random.Random(seed), []
    for group, count in enumerate(counts):
        prompt = [draw.randint(1, 9) for _ in range(draw.randint(8, 14))]
        first = [draw.randint(1, 2) for _ in range(draw.randint(1, 8))]
        for index in range(count):
            answers = [first if index % 2 else [draw.randint(1, 2) for _ in range(draw.randint(1, 8))]]
            answers.append([draw.randint(1, 2) for _ in range(draw.randint(1, 8))] + [PAD] * draw.randint(0, 1))
            label = draw.choice([1.0, 1.0, 0.75])
            draw.shuffle(answers)
            name = f"{group}.{index}"
            items += [sample(name, role, prompt, each, label) for role, each in zip(("chosen", "rejected"), answers, strict=True)]
    return items


def apart(seed=0):
    """A pair without a common prompt."""
    draw = random.Random(seed)
    answers = [[draw.randint(1, 9) for _ in range(10)] for _ in range(2)]
    return [sample(f"apart {seed}", role, each[:2], each[2:]) for role, each in zip(("chosen", "rejected"), answers, strict=True)]


def algorithm(loss):
    return RLAlgorithm("test", ConstantCredit(1.0), loss)


def backward(model, loss, mini_batch, cfg):
    """Gradients, loss and the statistics of micro-batches."""
    backend = TorchBackend(model, cfg, algo=algorithm(loss))
    assert backend.shares_prefixes == (cfg.prefix_sharing != "off")
    model.zero_grad(set_to_none=True)
    result = asyncio.run(backend.forward_backward(mini_batch, totals=mini_batch.totals).result())
    return gradients_of(model), result.loss.item(), result.micro_stats


def macro_of(items, max_seq_len, **options):
    return with_reference(PreferenceMacroBatch.ingest_pairs(items, max_seq_len, **options))


def assert_same_step(model, loss, macro, *, spare=0, max_seq_len=40, **options):
    """The gradient of trees is that of one padded batch. Returns the mini-batch of trees."""
    longest = int(macro.table.lengths.max())
    rows = np.arange(len(macro.items))
    base = {"max_seq_len": longest, "pad_token_id": PAD}
    cfg = rm_config(**base, micro_token_budget=2 * len(rows) * longest, prefix_sharing="off")
    want, want_loss, _ = backward(model, loss, PreferenceMiniBatch(macro, rows, cfg), cfg)
    cfg = rm_config(**base, micro_token_budget=2 * longest + spare, prefix_sharing="tree", **options)
    trees = PairTreeMiniBatch(macro, rows, cfg)
    got, got_loss, _ = backward(model, loss, trees, cfg)
    largest = max(gradient.abs().max().item() for gradient in want.values())
    assert largest > 0
    assert_same_tensors(got, want, atol=1e-5 * max(1.0, largest))
    assert got_loss == pytest.approx(want_loss, rel=1e-5, abs=1e-5)
    return trees


@cache
def scorer():
    return reward_model(pad_token_id=PAD)


@cache
def policy():
    return tiny_model()


LAYOUTS = {
    "counts": st.lists(st.integers(1, 4), min_size=1, max_size=3),
    "seed": st.integers(0, 1000),
    "spare": st.integers(0, 150),
    "limit": st.sampled_from([40, 15]),
    "logits": st.sampled_from(["full", "chunked"]),
}


def check_layout(model, loss, counts, seed, spare, limit, logits):
    macro = macro_of([*pairs_of(counts, seed), *apart(seed)], limit)
    if not macro.num_pairs:
        return
    trees = assert_same_step(model, loss, macro, spare=spare, logits=logits)
    longest, seen = int(macro.table.lengths.max()), []
    for index, micro_batch in enumerate(trees):
        assert micro_batch.tensors[PREFIX_TREES].input_ids.numel() <= 2 * longest + spare
        assert micro_batch.tensors["meta"]["role"] == ["chosen", "rejected"] * (micro_batch.num_items // 2)
        seen += trees.micro_batch_rows(index).tolist()
    assert sorted(seen) == list(range(len(macro.items)))


@pytest.mark.parametrize("name", REWARD_LOSSES)
@settings(max_examples=6, deadline=None)
@given(**LAYOUTS)
def test_a_reward_model_has_the_gradient_of_separate_rows(name, counts, seed, spare, limit, logits):
    check_layout(scorer(), REWARD_LOSSES[name], counts, seed, spare, limit, logits)


@pytest.mark.parametrize("name", LOGPROB_LOSSES)
@settings(max_examples=6, deadline=None)
@given(**LAYOUTS)
def test_a_policy_has_the_gradient_of_separate_rows(name, counts, seed, spare, limit, logits):
    check_layout(policy(), LOGPROB_LOSSES[name], counts, seed, spare, limit, logits)


WINDOWS = {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 0}
SETTINGS = {
    **{name: {} for name in CAUSAL if name not in ("Falcon", "Bloom", "OPT")},
    "OPT": {"dropout": 0.0},  # it has no module for its dropout
    "Qwen3": {"head_dim": 8},
    "Gemma3Text": {"head_dim": 8, "sliding_window": 5},
    "Olmo2": {},
    "Mistral": {"sliding_window": 5},
    "Qwen2 with windows": WINDOWS,
}


@cache
def small(name, form):
    changes = {**SETTINGS[name], **({"num_labels": 1} if form == "ForSequenceClassification" else {})}
    name = name.split()[0]
    network = make_from_config(name, form, {**CAUSAL.get(name, LLAMA), **changes}, 0)
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return network


@pytest.mark.parametrize("form", ["ForSequenceClassification", "ForCausalLM"])
@pytest.mark.parametrize("name", SETTINGS)
@settings(max_examples=2, deadline=None)
@given(counts=st.lists(st.integers(1, 3), min_size=1, max_size=2), seed=st.integers(0, 1000), spare=st.integers(0, 200))
def test_every_architecture_has_the_gradient_of_separate_rows(name, form, counts, seed, spare):
    loss = REWARD_LOSSES["smoothed"] if form == "ForSequenceClassification" else LOGPROB_LOSSES["dpo"]
    assert_same_step(small(name, form), loss, macro_of(pairs_of(counts, seed), 40), spare=spare)


# --- what a micro-batch has


def tree_batches(items, budget=1000, max_seq_len=40, *, share=None, **options):
    macro = macro_of(items, max_seq_len, **options)
    macro = macro if share is None else type(macro)(**{**vars(macro), "share": share})
    cfg = rm_config(max_seq_len=max_seq_len, micro_token_budget=budget, pad_token_id=PAD, prefix_sharing="tree")
    return PairTreeMiniBatch(macro, np.arange(len(macro.items)), cfg)


PROMPT = [9, 8, 7, 6, 5, 4, 3, 2, 1]


def test_the_prompt_of_a_pair_is_computed_once():
    """A prompt of 9 tokens, answers of 3 and 5 that have their first token in common: 9 + 1 + 2 + 4
    = 16 tokens of 26. Cut to 11 tokens, the answers are 2 long and add 1 + 1 + 1: 12 of 22."""
    items = [sample("p", "chosen", PROMPT, [5, 6, 7]), sample("p", "rejected", PROMPT, [5, 1, 2, 3, 4])]
    whole = tree_batches(items)
    assert whole.padding() == {
        "perf/real_tokens": 16.0,
        "perf/shared_tokens": 10.0,
        "perf/padded_tokens": 16.0,
        "perf/padded_tokens_greedy": 28.0,
        "perf/padded_tokens_unpacked": 28.0,
        "perf/micro_batches": 1.0,
    }
    [cut] = tree_batches(items, 22, 11)
    assert cut.tensors[PREFIX_TREES].input_ids.numel() == 12


def test_pairs_of_one_prompt_share_it_and_their_common_answer():
    """Three pairs of one prompt of 9 tokens; the chosen answer is that of all: 9 + 2 + 3 x 2."""
    items = []
    for index in range(3):
        items += [sample(index, "rejected", PROMPT, [index + 1, 0]), sample(index, "chosen", PROMPT, [7, 7])]
    [batch] = tree_batches(items)
    assert batch.tensors[PREFIX_TREES].input_ids.numel() == 17
    assert batch.tensors["meta"]["pair_id"] == [0, 0, 1, 1, 2, 2]
    assert batch.tensors["meta"]["role"] == ["chosen", "rejected"] * 3


def test_a_sample_without_a_partner_is_in_a_micro_batch_of_such():
    items = [*pairs_of((2, 1), 3), sample("lone", "chosen", PROMPT, [1, 2]), sample("other", "rejected", PROMPT, [1, 3])]
    trees = tree_batches(items, require_complete=False)
    kinds = sorted(tuple(sorted(set(batch.tensors["meta"]["pair_id"]))) for batch in trees)
    assert kinds == [("0.0", "0.1", "1.0"), ("lone", "other")]
    macro = macro_of(items, 40, require_complete=False)
    assert_same_step(scorer(), REWARD_LOSSES["plain"], macro)


def test_a_first_pass_is_of_all_pairs():
    """The l2 norm of odd numbers of pairs in several micro-batches needs their sum first."""
    trees = assert_same_step(scorer(), REWARD_LOSSES["l2"], macro_of(pairs_of((3, 3, 3), 5), 40))
    assert len(trees) > 1


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_get_whole_pairs_and_equally_many_micro_batches(world):
    items = [*pairs_of((3, 2, 1, 1), 11), *apart()]
    alone, rows, lengths = tree_batches(items, 90), [], set()
    for rank in range(world):
        part = tree_batches(items, 90, share=RankShare(rank, world))
        lengths.add(len(part))
        assert part.padding()["perf/real_tokens"] == alone.padding()["perf/real_tokens"]
        for index, batch in enumerate(part):
            own = part.micro_batch_rows(index)
            rows += own.tolist()
            assert batch.tensors[PREFIX_TREES].input_ids.numel() <= 90
            assert [row ^ 1 for row in own[::2]] == own[1::2].tolist()
    assert sorted(rows) == list(range(len(items)))
    assert len(lengths) == 1


@pytest.mark.parametrize("form", ["reward", "logprob"])
def test_the_pairs_of_a_tree_can_be_separated(form):
    network, loss = (scorer(), REWARD_LOSSES["plain"]) if form == "reward" else (policy(), LOGPROB_LOSSES["dpo"])
    cfg = rm_config(prefix_sharing="tree", pad_token_id=PAD)
    assert TorchBackend(network, cfg, algo=algorithm(loss)).shares_prefixes
    [batch] = tree_batches(pairs_of((2, 1), 7))
    parts = list(batch.parts())
    assert [part.num_items for part in parts] == [2, 2, 2]
    for part in parts:
        [name] = set(part.tensors["meta"]["pair_id"])
        macro = macro_of([item for item in pairs_of((2, 1), 7) if item.meta["pair_id"] == name], 40)
        [alone] = PreferenceMiniBatch(macro, np.arange(2), cfg)
        want, _ = algorithm(loss).compute_loss(network, alone.tensors)
        got, _ = algorithm(loss).compute_loss(network, part.tensors)
        assert got.item() == pytest.approx(want.item(), rel=1e-5, abs=1e-6)


# --- trainers


def rm_trainer(items, *, kind=RMTrainer, model=None, loss=None, source=None, config=None, **options):
    cfg = rm_config(max_seq_len=40, micro_token_budget=120, pad_token_id=PAD, **(config or {}))
    algo = algorithm(loss or REWARD_LOSSES["smoothed"])
    model = model or reward_model(pad_token_id=PAD)
    return kind(model=model, algo=algo, batch_source=source or ListSource(items), cfg=cfg, **options)


def dpo_trainer(items, *, kind=DPOTrainer, model=None, loss=None, source=None, config=None, **options):
    cfg = dpo_config(max_seq_len=40, micro_token_budget=120, pad_token_id=PAD, **(config or {}))
    algo = algorithm(loss or LOGPROB_LOSSES["dpo"])
    source, options = source or ListSource(items), {"pairs": items, **options}
    return kind(model=model or tiny_model(), algo=algo, batch_source=source, cfg=cfg, **options)


TRAINERS = {"reward model": rm_trainer, "dpo": dpo_trainer}


class Descent:
    """Gradient descent with learning rate 1, so that the step is the gradient."""

    def initialize_optimizer(self):
        return torch.optim.SGD([p for p in self.model.parameters() if p.requires_grad], lr=1.0)


class RewardDescent(Descent, RMTrainer):
    pass


class DPODescent(Descent, DPOTrainer):
    pass


@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_step_of_the_trainer_has_the_statistics_of_separate_rows(name, minibatches):
    items = [*pairs_of((3, 2, 2), 7), *apart()]
    steps = {}
    for sharing in ("off", "tree"):
        config = {"max_grad_norm": None, "minibatches_per_batch": minibatches, "prefix_sharing": sharing, "lr": 1e-3}
        kind = RewardDescent if name == "reward model" else DPODescent
        trainer = TRAINERS[name](items, kind=kind, config=config)
        before = weights_of(trainer.model)
        stats = trainer.train_step_sync()
        steps[sharing] = {key: before[key] - weight for key, weight in weights_of(trainer.model).items()}, stats
    (want, plain), (got, shared) = steps["off"], steps["tree"]
    largest = max(value.abs().max().item() for value in want.values())
    if minibatches == 1:
        assert_same_tensors(got, want, atol=1e-5 * max(1.0, largest))
        for key, value in plain.items():
            if not key.startswith("perf/"):
                assert shared[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key
    tokens = sum(len(item.input_ids) for item in items)
    assert shared["perf/real_tokens"] == shared["perf/padded_tokens"] < 0.8 * tokens
    assert shared["perf/real_tokens"] + shared["perf/shared_tokens"] == tokens == plain["perf/real_tokens"]
    assert plain["perf/shared_tokens"] == 0
    assert shared["train/total_pairs"] == plain["train/total_pairs"] == 8
    for key in ("perf/padded_tokens_unpacked", "perf/padded_tokens_greedy"):
        assert shared[key] == plain[key]


def test_a_reward_model_of_single_samples_shares_prefixes():
    """With `rm_pair_aware` off, the loss reads each score by itself."""

    class OfRoles:
        reads_scores_only, normalizer = True, "samples"

        def compute(self, logits, batch):
            signs = logits.new_tensor([1.0 if role == "chosen" else -1.0 for role in batch["meta"]["role"]])
            loss = -torch.nn.functional.logsigmoid(signs * logits[:, 0]).mean()
            return loss, {"loss": loss.detach()}

    items = pairs_of((3, 2), 7)
    steps = {}
    for sharing in ("off", "tree"):
        config = {"max_grad_norm": None, "rm_pair_aware": False, "prefix_sharing": sharing}
        trainer = rm_trainer(items, kind=RewardDescent, loss=OfRoles(), config=config)
        before = weights_of(trainer.model)
        stats = trainer.train_step_sync()
        steps[sharing] = {key: before[key] - weight for key, weight in weights_of(trainer.model).items()}
        assert (stats["perf/shared_tokens"] > 0) == (sharing == "tree")
    assert_same_tensors(steps["tree"], steps["off"], atol=1e-5)


def count_tokens(model, run):
    """The tokens that the model computes while `run` runs."""
    counts = []
    embeddings = model.get_input_embeddings()
    handle = embeddings.register_forward_hook(lambda _, inputs, __: counts.append(inputs[0].numel()))
    run()
    handle.remove()
    return sum(counts)


@pytest.mark.parametrize("name", TRAINERS)
def test_an_evaluation_scores_prompts_once(name):
    train, held_out = pairs_of((2, 1), 2), [*pairs_of((3, 3, 1), 9), *apart(4)]
    measured, tokens = {}, {}
    for sharing in ("off", "tree"):
        trainer = TRAINERS[name](train, eval_items=held_out, config={"prefix_sharing": sharing})
        trainer.train_sync(3)
        trainer.evaluate()  # which tries trees once
        tokens[sharing] = count_tokens(trainer.model, lambda trainer=trainer: measured.update({sharing: trainer.evaluate()}))  # noqa: B023
    assert measured["tree"] == pytest.approx(measured["off"], rel=1e-3, abs=1e-3)
    assert tokens["tree"] < 0.8 * tokens["off"]


def test_the_reference_scores_prompts_once():
    items = pairs_of((3, 3, 1), 9)
    known, tokens = {}, {}
    for sharing in ("off", "tree"):
        frozen = FrozenModel(tiny_model(seed=1), dpo_config(prefix_sharing=sharing))
        assert frozen.computes_trees == (sharing == "tree")  # tries them once

        def run(sharing=sharing, frozen=frozen):
            known[sharing] = dpo_trainer(items, reference=frozen, config={"prefix_sharing": sharing}).reference_logps

        tokens[sharing] = count_tokens(frozen.model, run)
    for item in items:
        torch.testing.assert_close(known["tree"].of_item(item), known["off"].of_item(item), rtol=1e-5, atol=1e-5)
    assert tokens["tree"] < 0.8 * tokens["off"]


def test_adapters_and_their_reference_share_prefixes():
    from ludic.training import LoraSettings

    items = pairs_of((3, 2), 3)
    steps = {}
    for sharing in ("off", "tree"):
        trainer = dpo_trainer(items, config={"prefix_sharing": sharing, "eps": 1e-3}, lora_config=LoraSettings(rank=2))
        stats = [trainer.train_step_sync() for _ in range(3)]
        steps[sharing] = [each["train/loss"] for each in stats], stats[0]["perf/shared_tokens"]
    assert steps["tree"][0] == pytest.approx(steps["off"][0], rel=1e-3)
    assert steps["tree"][1] > 0
    scores = {}
    for sharing in ("off", "tree"):
        trainer = rm_trainer(items, config={"prefix_sharing": sharing, "eps": 1e-3}, lora_config=LoraSettings(rank=2))
        scores[sharing] = [trainer.train_step_sync()["train/loss"] for _ in range(3)]
    assert scores["tree"] == pytest.approx(scores["off"], rel=1e-3)


@pytest.mark.parametrize("name", TRAINERS)
def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(name, tmp_path):
    items = [*pairs_of((3, 2, 2, 1, 3), 4), *apart()]

    def run(folder, steps, resume=None):
        source = preference_batches(items, batch_size=4, seed=3)
        checkpoints = CheckpointConfig(folder, every_n_steps=2)
        trainer = TRAINERS[name](
            items, source=source, checkpoint_config=checkpoints, resume_from=resume, config={"prefix_sharing": "tree"}
        )
        while trainer.current_step < steps:
            stats = trainer.train_step_sync()
        assert stats["perf/shared_tokens"] > 0
        return weights_of(trainer.model)

    whole = run(tmp_path / "whole", 5)
    run(tmp_path / "parts", 2)
    parts = run(tmp_path / "parts", 5, resume=2)
    assert all(torch.equal(whole[key], parts[key]) for key in whole)


# --- what has rows of its own


def eager():
    network = reward_model(pad_token_id=PAD)
    network.set_attn_implementation("eager")
    return network


class ReadsTokens(BradleyTerryLoss):
    """Of a user, who does not say what it reads."""

    reads_scores_only = False


def reads_first_token():
    """A classifier that reads its score elsewhere."""
    network = reward_model(pad_token_id=PAD)
    inner = network.forward
    seen = []
    network.score.register_forward_hook(lambda _, __, output: seen.append(output))

    def forward(*args, **options):
        output = inner(*args, **options)
        output.logits = seen.pop()[:, 0]
        return output

    network.forward = forward
    return network


UNSUPPORTED = {
    "bidirectional": (lambda: scoring_model("Bert"), None, "BertForSequenceClassification .*head reads"),
    "bidirectional head": (lambda: scoring_model("Roberta"), None, "RobertaForSequenceClassification"),
    "eager": (eager, None, "Qwen2ForSequenceClassification is eager, not sdpa"),
    "alibi": (lambda: scoring_model("Bloom"), None, "BloomForSequenceClassification"),
    "loss": (None, ReadsTokens(), "ReadsTokens does not say that it reads_scores_only"),
    "first token": (reads_first_token, None, "score at the last token"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
@pytest.mark.parametrize("sharing", ["tree", "auto"])
def test_unsupported_models_have_rows_of_their_own_and_one_line_says_why(name, sharing, caplog):
    make, loss, reason = UNSUPPORTED[name]
    network = make() if make else reward_model(pad_token_id=PAD)
    before = get_attention(network)
    with caplog.at_level(logging.INFO, "ludic.training.preflight.layouts"):
        trainer = rm_trainer(
            pairs_of((2, 2)), model=network, loss=loss, config={"prefix_sharing": sharing}, eval_items=pairs_of((1,))
        )
        stats = [trainer.train_step_sync() for _ in range(2)]
        trainer.evaluate()
    [line] = [record for record in caplog.records if "sharing prefixes" in record.getMessage()]
    assert re.search(reason, line.getMessage())
    assert line.levelno == (logging.WARNING if sharing == "tree" else logging.INFO)
    assert stats[-1]["perf/shared_tokens"] == 0
    assert name == "loss" or get_attention(network) == before


@pytest.mark.parametrize("name", ["Bigram", "mamba"])
def test_dpo_of_models_without_such_attention_has_rows_of_its_own(name, caplog):
    network = Bigram() if name == "Bigram" else mamba()
    with caplog.at_level(logging.INFO, "ludic.training.preflight.layouts"):
        trainer = dpo_trainer(pairs_of((2, 2)), model=network, config={"prefix_sharing": "tree"})
        assert trainer.train_step_sync()["perf/shared_tokens"] == 0
    [line] = [record for record in caplog.records if "sharing prefixes" in record.getMessage()]
    assert re.search("Bigram is None|MambaForCausalLM", line.getMessage())


def mamba():
    from transformers import MambaConfig, MambaForCausalLM

    torch.manual_seed(0)
    network = MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, initializer_range=0.2))
    network.config._attn_implementation = "sdpa"  # which it has none of
    return network


def test_auto_shares_the_prompts_of_pairs_where_that_pays():
    """Prompts of at least 8 tokens and short answers against pairs with nothing in common."""
    assert rm_trainer(pairs_of((3, 3))).train_step_sync()["perf/shared_tokens"] > 50
    nothing = [item for seed in range(4) for item in apart(seed)]
    assert rm_trainer(nothing).train_step_sync()["perf/shared_tokens"] == 0
