"""Runs that compute no logits have the losses, statistics and gradients of those that do."""

import asyncio
import logging
from contextlib import contextmanager
from functools import cache

import numpy as np
import pytest
import torch
from loss_batches import Bigram
from peft import LoraConfig
from preference_samples import sorted_pairs
from small_models import LLAMA, causal_model, make_from_config
from training_samples import ListSource, assert_same_tensors, cpu_config, dialogues, gradients_of, sorting_items, tiny_model

from ludic.errors import ConfigError
from ludic.models.lora import LoraSettings, apply_lora
from ludic.training import RLAlgorithm, RMTrainerConfig, Trainer, make_grpo
from ludic.training.backend import forward
from ludic.training.backend.forward import CHUNKED_FROM, can_skip_logits
from ludic.training.backend.torch import TorchBackend
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch
from ludic.training.batching.pair_batches import PreferenceMacroBatch, PreferenceMiniBatch
from ludic.training.credit_assignment import ConstantCredit
from ludic.training.evaluators.held_out import HeldOutLoss, PreferenceEvaluator
from ludic.training.loss import (
    BradleyTerryLoss,
    CompositeLoss,
    EntropyBonus,
    Loss,
    LossTerm,
    TokenClippedSurrogateLoss,
    token_scores,
)
from ludic.training.loss.correction import TruncatedImportanceSampling

WITH_ENTROPY = CompositeLoss([LossTerm("pg", TokenClippedSurrogateLoss()), LossTerm("h", EntropyBonus(0.1))])


@pytest.fixture(autouse=True)
def small_tiles_and_no_earlier_warnings(monkeypatch):
    monkeypatch.setattr(token_scores, "TILE_ELEMENTS", 1)
    forward._warn.cache_clear()


@cache
def items():
    return tuple(sorting_items(6, seed=3))


def algorithm(loss=WITH_ENTROPY, **settings):
    return RLAlgorithm("test", ConstantCredit(1.0), loss, **settings)


@contextmanager
def computed_tokens(model):
    """A list that gets how many tokens the output layer computes in each pass inside."""
    seen = []
    hook = model.get_output_embeddings().register_forward_hook(lambda _, __, output: seen.append(output.shape[1]))
    yield seen
    hook.remove()


def backward(model, algo, mini_batch, cfg, *, chunked):
    """Gradients, loss and statistics of a mini-batch, computed without logits if `chunked`."""
    backend = TorchBackend(model, cfg, algo=algo)
    assert backend.skips_logits == (cfg.logits == "chunked")  # the check runs the model, too
    model.zero_grad(set_to_none=True)
    torch.manual_seed(5)  # dropout
    with computed_tokens(model) as tokens:
        result = asyncio.run(backend.forward_backward(mini_batch, totals=mini_batch.totals).result())
    assert tokens
    assert [count == 0 for count in tokens] == [chunked] * len(tokens)
    stats = [{name: float(value) for name, value in micro.items()} for micro in result.micro_stats]
    return gradients_of(model), result.loss.item(), stats


def assert_both_paths_agree(model, algo, make_batch, config, *, chunks=True, **settings):
    """`chunks`: whether logits="chunked" computes no logits, as the loss may need them."""
    results = []
    for path in ("full", "chunked"):
        cfg = config(logits=path, **settings)
        results.append(backward(model, algo, make_batch(cfg), cfg, chunked=chunks and path == "chunked"))
    (full, full_loss, full_stats), (chunked, loss, stats) = results
    largest = max(value.abs().max().item() for value in full.values())
    assert largest > 1e-3
    assert_same_tensors(chunked, full, atol=1e-5 * max(1.0, largest))
    assert loss == pytest.approx(full_loss, rel=1e-5, abs=1e-6)
    assert stats == [pytest.approx(micro, rel=1e-4, abs=1e-5) for micro in full_stats]


def mini_batch_of(samples, *, merge_turns=False):
    def make(cfg):
        return MiniBatch(MacroBatch.ingest(list(samples), cfg.max_seq_len, merge_turns=merge_turns), np.arange(len(samples)), cfg)

    return make


@pytest.mark.parametrize("packing", ["optimal", "padding_free"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_corrections_and_temperature_give_the_same_step(packing, temperature):
    algo = algorithm(correction=TruncatedImportanceSampling(2.0))
    settings = {"max_seq_len": 70, "micro_token_budget": 140, "packing": packing, "temperature": temperature}
    turns = dialogues((3, 1, 2), seed=5)
    assert_both_paths_agree(tiny_model(), algo, mini_batch_of(turns, merge_turns=True), cpu_config, **settings)


@pytest.mark.parametrize("regularization", ["l1", "l2"])
def test_pairs_that_are_scored_by_log_probabilities_give_the_same_step(regularization):
    loss = BradleyTerryLoss(beta=0.1, score_type="logprob", regularization_lambda=0.1, regularization_type=regularization)

    def pairs(cfg):
        macro = PreferenceMacroBatch.ingest_pairs(sorted_pairs(5, seed=3), cfg.max_seq_len)
        return PreferenceMiniBatch(macro, np.arange(10), cfg)

    def config(**settings):
        return RMTrainerConfig(model_device="cpu", max_seq_len=23, micro_token_budget=60, **settings)

    assert_both_paths_agree(tiny_model(), algorithm(loss), pairs, config)


MODELS = {
    "soft cap": lambda: make_from_config(
        "Gemma2", "ForCausalLM", {**LLAMA, "vocab_size": 259, "final_logit_softcapping": 2.0}, 0
    ),
    "scale": lambda: make_from_config(
        "Cohere", "ForCausalLM", {**LLAMA, "vocab_size": 259, "logit_scale": 0.3, "eos_token_id": 1}, 0
    ),
    "divisor": lambda: make_from_config("Granite", "ForCausalLM", {**LLAMA, "vocab_size": 259, "logits_scaling": 3.0}, 0),
    "bias": lambda: causal_model("Phi", vocab_size=259),
    "adapters on the head": lambda: apply_lora(
        tiny_model(tie_word_embeddings=False), LoraSettings(rank=2, target_modules=["q_proj", "lm_head"])
    ),
    "a head that is trained in full": lambda: apply_lora(
        tiny_model(tie_word_embeddings=False), LoraSettings(rank=2, modules_to_save=["lm_head"])
    ),
}


@pytest.mark.parametrize("layout", ["padded", "padding-free turns"])
@pytest.mark.parametrize("name", MODELS)
def test_models_with_more_than_a_product_behind_their_states_give_the_same_step(name, layout, caplog):
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    if layout == "padded":
        assert_both_paths_agree(model, algorithm(), mini_batch_of(items()), cpu_config)
    else:
        settings = {"max_seq_len": 60, "micro_token_budget": 120, "packing": "padding_free", "temperature": 0.6}
        turns = mini_batch_of(dialogues((3, 1, 2), seed=5), merge_turns=True)
        assert_both_paths_agree(model, algorithm(), turns, cpu_config, **settings)
    assert "all logits" not in caplog.text


def test_all_log_probabilities_of_a_forward_pass_are_the_same():
    model = tiny_model()
    full, chunked = (TorchBackend(model, cpu_config(logits=path), algo=algorithm()) for path in ("full", "chunked"))
    assert (full.skips_logits, chunked.skips_logits) == (False, True)
    for micro_batch in mini_batch_of(items())(cpu_config()):
        for options in ({}, {"temperature": 0.5}, {"temperature": 0.5, "top_p": 0.7}):
            want = full.forward_logprobs(micro_batch, **options).wait()
            with computed_tokens(model) as tokens:
                got = chunked.forward_logprobs(micro_batch, **options).wait()
            assert [count == 0 for count in tokens] == ["top_p" not in options]
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        want = full.forward_scores(micro_batch, score_type="logprob").wait()
        with computed_tokens(model) as tokens:
            got = chunked.forward_scores(micro_batch, score_type="logprob").wait()
        assert tokens == [0]
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_evaluations_are_the_same():
    def measured(path):
        measurements, model = {}, tiny_model()
        cfg = RMTrainerConfig(model_device="cpu", max_seq_len=23, micro_token_budget=60, logits=path)
        for evaluator in (
            HeldOutLoss(model, list(items()), cpu_config(logits=path)),
            PreferenceEvaluator(model, sorted_pairs(3), cfg, score_type="logprob"),
        ):
            evaluator.measure()  # the check runs the model, too
            with computed_tokens(model) as tokens:
                measurements |= evaluator.measure()
            assert tokens
            assert [count == 0 for count in tokens] == [path == "chunked"] * len(tokens)
        return measurements

    assert measured("chunked") == pytest.approx(measured("full"), rel=1e-5)


def shapes_of_logits(model, cfg, loss=WITH_ENTROPY):
    """The shapes of what the output layer computes in a training step of two micro-batches."""
    seen = []
    trainer = Trainer(model=model, algo=algorithm(loss), batch_source=ListSource(list(items())), cfg=cfg)
    assert trainer.backend.skips_logits == (cfg.logits == "chunked")  # the check runs the model, too
    trainer.model.get_output_embeddings().register_forward_hook(lambda _, __, out: seen.append(tuple(out.shape[:2])))
    trainer.train_step_sync()
    return seen


def test_a_step_without_logits_computes_none_and_moves_the_weights_alike():
    assert all(tokens == 0 for _, tokens in shapes_of_logits(tiny_model(), cpu_config(logits="chunked", prefix_sharing="off")))
    assert all(
        tokens > 0 for _, tokens in shapes_of_logits(tiny_model(), cpu_config(prefix_sharing="off"))
    )  # auto, and 259 tokens of vocabulary


def test_auto_depends_on_the_largest_micro_batch_and_the_vocabulary():
    model = tiny_model()
    budget = -(-CHUNKED_FROM // 259)
    assert can_skip_logits(model, cpu_config(micro_token_budget=budget))
    assert not can_skip_logits(model, cpu_config(micro_token_budget=budget - 1))
    assert not can_skip_logits(model, cpu_config(micro_token_budget=budget, logits="full"))
    assert not can_skip_logits(model, cpu_config(micro_token_budget=budget, cast_logits_to_fp32=False))


class ReadsPrompts(Loss):
    """Minus the mean log-probability of all tokens, prompts included."""

    reads_shared_only = True

    def compute_from(self, shared):
        loss = -shared.token_logp.mean()
        return loss, {"loss": loss.detach()}


def test_a_loss_may_read_tokens_that_are_no_actions():
    assert_both_paths_agree(tiny_model(), algorithm(ReadsPrompts()), mini_batch_of(items()), cpu_config)


class ReadsLogits(Loss):
    def compute(self, logits, batch, *, shared=None):
        loss = logits.square().mean()
        return loss, {"loss": loss.detach()}


def test_a_loss_that_reads_logits_gets_them_and_one_line_says_so(caplog):
    with caplog.at_level(logging.WARNING):
        assert_both_paths_agree(tiny_model(), algorithm(ReadsLogits()), mini_batch_of(items()), cpu_config, chunks=False)
    assert [record.message.partition(": ")[2] for record in caplog.records] == ["ReadsLogits reads logits"]


def test_an_algorithm_with_a_loss_of_its_own_is_not_asked_for_it():
    class Own(RLAlgorithm):
        def compute_loss(self, model, batch, *, cast_logits_to_fp32=True, totals=None, temperature=1.0):
            return super().compute_loss(model, batch, totals=totals)

    algo = Own("own", ConstantCredit(1.0), TokenClippedSurrogateLoss())
    assert_both_paths_agree(tiny_model(), algo, mini_batch_of(items()), cpu_config, chunks=False)


def shift(_, __, output):
    output.logits = output.logits + torch.arange(output.logits.shape[-1])
    return output


def test_a_model_that_changes_its_logits_in_another_way_uses_all_of_them_and_one_line_says_so(caplog):
    model = tiny_model()
    model.register_forward_hook(shift)
    budget = -(-CHUNKED_FROM // 259)
    with caplog.at_level(logging.WARNING):
        for path in ("auto", "chunked", "chunked"):
            assert not can_skip_logits(model, cpu_config(micro_token_budget=budget, logits=path))
    [record] = caplog.records
    assert "Qwen2ForCausalLM changes its logits behind the output layer" in record.message


def test_a_cap_that_small_logits_hardly_show_is_found():
    model = tiny_model()
    model.register_forward_hook(lambda _, __, output: setattr(output, "logits", torch.tanh(output.logits / 50) * 50))
    assert not can_skip_logits(model, cpu_config(logits="chunked"))


@pytest.mark.parametrize("name", ["soft cap", "scale", "divisor", "bias", "adapters on the head"])
def test_models_in_bfloat16_are_checked_up_to_its_rounding(name, caplog):
    assert can_skip_logits(MODELS[name]().bfloat16(), cpu_config(logits="chunked")), caplog.text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("change", [lambda logits: logits / 0.98, lambda logits: logits.clamp(-59, 59)])
def test_a_change_of_two_percent_is_found_in_half_precision(change, dtype):
    model = tiny_model().to(dtype)
    assert can_skip_logits(model, cpu_config(logits="chunked"))
    model.register_forward_hook(lambda _, __, output: setattr(output, "logits", change(output.logits).to(dtype)))
    assert not can_skip_logits(model, cpu_config(logits="chunked"))


def test_logits_that_are_not_finite_are_named(caplog):
    model = tiny_model()
    torch.nn.init.constant_(model.lm_head.weight, torch.nan)
    assert not can_skip_logits(model, cpu_config(logits="chunked"))
    assert "Qwen2ForCausalLM has logits that are not finite" in caplog.text


@pytest.mark.parametrize("adapters_first", [False, True])
def test_adapters_of_another_kind_use_all_logits_whichever_pass_is_first(adapters_first, caplog):
    """The base without adapters, as a reference, could be computed without logits; the policy could
    not."""
    dora = LoraConfig(r=2, target_modules=["lm_head"], use_dora=True)
    model = apply_lora(tiny_model(tie_word_embeddings=False), dora)
    cfg = cpu_config(logits="chunked")
    mini_batch = mini_batch_of(items())(cfg)
    backend = TorchBackend(model, cfg, algo=algorithm())
    for adapters in (adapters_first, not adapters_first):
        backend.forward_logprobs(next(iter(mini_batch)), adapters=adapters).wait()
    assert not backend.skips_logits
    assert "adapters other than plain LoRA" in caplog.text
    assert backend.forward_backward(mini_batch, totals=mini_batch.totals).wait().loss.isfinite()


def test_the_choice_is_made_with_the_adapters_on():
    model = apply_lora(tiny_model(tie_word_embeddings=False), LoraSettings(rank=2, target_modules=["lm_head"]))
    adapter = model.get_output_embeddings()
    off = []
    adapter.register_forward_hook(lambda module, _, __: off.append(module.disable_adapters))
    cfg = cpu_config(logits="chunked")
    backend = TorchBackend(model, cfg, algo=algorithm())
    backend.forward_logprobs(next(iter(mini_batch_of(items())(cfg))), adapters=False).wait()
    *check, last = off
    assert check
    assert not any(check)
    assert last


def test_a_layer_whose_output_a_hook_changes_is_found():
    model = tiny_model()
    model.lm_head.register_forward_hook(lambda _, inputs, output: output + inputs[0].sum())
    assert not can_skip_logits(model, cpu_config(logits="chunked"))


def test_a_model_without_an_output_layer_uses_its_logits(caplog):
    with caplog.at_level(logging.WARNING):
        assert not can_skip_logits(Bigram(), cpu_config())
        assert not caplog.records
        assert not can_skip_logits(Bigram(), cpu_config(logits="chunked"))
    assert "Bigram has no output layer" in caplog.text


def test_the_check_changes_neither_modes_nor_random_numbers():
    model = tiny_model()
    model.lm_head.eval()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert can_skip_logits(model, cpu_config(logits="chunked"))
    assert torch.equal(torch.get_rng_state(), before)
    assert (model.training, model.lm_head.training) == (True, False)


def test_an_unknown_path_is_refused():
    with pytest.raises(ConfigError, match=r"logits \('some'\) .*auto, full, chunked"):
        cpu_config(logits="some")


def test_a_run_of_a_preset_learns_alike_on_both_paths():
    def weights(path):
        trainer = Trainer(
            model=tiny_model(),
            algo=make_grpo(group_size=4),
            batch_source=ListSource(sorting_items(8)),
            cfg=cpu_config(logits=path, prefix_sharing="off"),  # which would look at logits first
        )
        assert trainer.backend.skips_logits == (path == "chunked")
        with computed_tokens(trainer.model) as tokens:
            trainer.train_sync(num_steps=2)
        assert tokens
        assert [count == 0 for count in tokens] == [path == "chunked"] * len(tokens)
        return {name: value.detach() for name, value in trainer.model.named_parameters()}

    assert_same_tensors(weights("chunked"), weights("full"), atol=1e-3)  # AdamW enlarges the last digit of small gradients
