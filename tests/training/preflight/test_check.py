"""The check before the first step compares trainer and sampler. Six faults are named, five healthy
setups pass."""

import copy
import math

import pytest
import torch
from chat_tokenizers import pairs_tokenizer
from hypothesis import given, strategies as st
from seeded_faults import (
    Faulty,
    byte_policy,
    chat_policy,
    client_of,
    render_prompt_locally,
    retokenise_text,
    sample_items,
    sampling,
    shift_ids,
    shift_logprobs,
)
from training_samples import ListSource, cpu_config, sorting_items, tiny_model, weights_of

from ludic.errors import ConfigError, MismatchError
from ludic.training import Trainer, make_grpo
from ludic.training.backend.torch import TorchBackend
from ludic.training.preflight.check import MOST_TOKENS, Preflight, _select_samples
from ludic.training.types import ActorTokenLogps, SampleAttachments, SAWItem


def config(**changes):
    return cpu_config(**{"max_seq_len": 128, "micro_token_budget": 4096, **changes})


async def run_check(policy, client, params, *, trainer_config=None, **settings):
    """The report on samples drawn through `client`. `trainer_config` is for the trainer."""
    model, tokenizer = policy
    cfg = config(**(trainer_config or {}))
    items = await sample_items(client, params)
    preflight = Preflight(**{"sampling": params, "tokenizer": tokenizer, "client": client, **settings})
    return await preflight(TorchBackend(model, cfg, algo=make_grpo(group_size=4)), cfg, items)


async def expect_mismatch(*arguments, **settings):
    with pytest.raises(MismatchError) as expect_mismatch:
        await run_check(*arguments, **settings)
    return expect_mismatch.value


HEALTHY = {
    "temperature 1": ({}, "raw", {}),
    "temperature 0.6": ({"temperature": 0.6}, "processed", {"temperature": 0.6}),
    "top-p, log-probabilities of the whole distribution": ({"top_p": 0.8}, "raw", {}),
    "both, raw, the trainer at temperature 1": ({"temperature": 0.6, "top_p": 0.8}, "raw", {}),
}


@pytest.mark.parametrize("name", HEALTHY)
async def test_a_healthy_setup_passes(name):
    sampling_changes, mode, trainer_config = HEALTHY[name]
    policy = byte_policy()
    report = await run_check(
        policy, client_of(*policy, logprobs_mode=mode), sampling(**sampling_changes), trainer_config=trainer_config
    )
    assert report.healthy
    assert report.mean < 1e-5
    assert report.num_samples == 12
    assert report.num_tokens > 50


async def test_a_float32_trainer_with_a_half_precision_sampler_is_healthy():
    policy = byte_policy(3, hidden_size=32, num_attention_heads=4)
    client = client_of(*policy, copy_model=True, dtype=torch.bfloat16)
    report = await run_check(policy, client, sampling())
    assert report.healthy
    assert 1e-4 < report.mean < 0.02  # there is a difference, but it is not a fault


async def test_training_and_sampling_in_half_precision_is_healthy():
    model, tokenizer = byte_policy(4)
    policy = model.to(torch.bfloat16), tokenizer
    report = await run_check(
        policy, client_of(*policy, logprobs_mode="processed"), sampling(temperature=0.7), trainer_config={"temperature": 0.7}
    )
    assert report.healthy


async def test_sampling_through_a_chat_template_is_healthy():
    policy = chat_policy()
    report = await run_check(policy, client_of(*policy), sampling())
    assert report.healthy
    assert report.mean < 1e-5


async def test_raw_log_probabilities_at_temperature_06_are_identified():
    policy = byte_policy()
    error = await expect_mismatch(
        policy, client_of(*policy, logprobs_mode="raw"), sampling(temperature=0.6), trainer_config={"temperature": 0.6}
    )
    assert "before temperature (raw)" in str(error)
    assert "processed_logprobs" in str(error)
    assert error.report.mean > 0.02
    assert error.report.tried[error.report.cause.name] < 1e-5


async def test_a_temperature_that_the_trainer_does_not_know_is_identified():
    policy = byte_policy()
    error = await expect_mismatch(policy, client_of(*policy, logprobs_mode="processed"), sampling(temperature=0.6))
    assert "set TrainerConfig.temperature to 0.6" in str(error)


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.98])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_renormalisation_over_top_p_is_identified(top_p, temperature):
    policy = byte_policy()
    params = sampling(top_p=top_p, temperature=temperature)
    error = await expect_mismatch(
        policy, client_of(*policy, logprobs_mode="processed"), params, trainer_config={"temperature": temperature}
    )
    assert f"renormalised over the tokens within top_p {top_p:g}" in str(error)
    assert error.report.tried[error.report.cause.name] < 1e-5


@pytest.mark.parametrize("change", [shift_logprobs, shift_ids])
async def test_values_shifted_by_one_token_are_identified(change):
    policy = byte_policy()
    error = await expect_mismatch(policy, Faulty(client_of(*policy), change=change), sampling())
    assert "shifted by one" in str(error)


async def test_another_chat_template_on_the_server_is_identified_by_its_prompt_ids():
    """The server renders the messages and returns its ids. The log-probabilities agree, but the
    model is trained on another prompt format."""
    model, tokenizer = chat_policy()
    other = copy.deepcopy(tokenizer)
    other.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}>>"
    error = await expect_mismatch((model, tokenizer), client_of(model, other), sampling())
    assert "another chat template" in str(error)
    assert "'[user]" in str(error)
    assert "<|im_start|>user" in str(error)
    assert error.report.mean < 1e-5


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content }}{% endfor %}",  # a template that the check tries
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}>>",  # a template that it does not try
    ],
)
async def test_another_chat_template_behind_locally_rendered_ids_is_identified(template):
    """The client reports the ids that it rendered; the server used others."""
    model, tokenizer = chat_policy()
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    client = Faulty(client_of(model, other), change=render_prompt_locally(tokenizer))
    error = await expect_mismatch((model, tokenizer), client, sampling())
    assert "another chat template" in str(error)
    assert error.report.mean > 0.02


async def test_retokenised_text_is_identified():
    """The tokenizer merges digits, so text that was sampled digit by digit re-tokenises to fewer,
    larger tokens."""
    tokenizer = pairs_tokenizer()
    model = tiny_model(1, vocab_size=len(tokenizer))
    client = Faulty(client_of(model, tokenizer), change=retokenise_text(tokenizer))
    error = await expect_mismatch((model, tokenizer), client, sampling())
    assert "tokenised again" in str(error)


async def test_nan_from_the_trainer_is_no_agreement():
    model, tokenizer = byte_policy()
    client = client_of(copy.deepcopy(model), tokenizer)
    torch.nn.init.constant_(model.lm_head.weight, torch.nan)
    error = await expect_mismatch((model, tokenizer), client, sampling())
    assert error.report.cause.name == "NaN from the trainer"
    assert error.report.mean == error.report.max == math.inf


@pytest.mark.parametrize("from_ids", [True, False])
async def test_stale_weights_are_identified(from_ids):
    model, tokenizer = byte_policy(0)
    stale, _ = byte_policy(1)
    client = Faulty(client_of(stale, tokenizer), from_ids=from_ids)
    error = await expect_mismatch((model, tokenizer), client, sampling())
    assert "stale weights, or another model" in str(error)
    assert ("samples drawn from token ids" in error.report.tried) == from_ids


async def test_the_table_shows_the_worst_tokens_with_both_numbers():
    model, tokenizer = byte_policy(0)
    error = await expect_mismatch((model, tokenizer), client_of(byte_policy(1)[0], tokenizer), sampling())
    worst = error.report.worst
    assert len(worst) == 8
    gaps = [abs(w.sampler_logp - w.trainer_logp) for w in worst]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] == pytest.approx(error.report.max)
    assert f"{worst[0].sampler_logp:.4f}" in str(error)
    assert str(worst[0].token_id) in str(error)


def trainer_of(preflight, items=None, **options):
    return Trainer(
        model=tiny_model(),
        algo=make_grpo(group_size=4),
        batch_source=ListSource(items or sorting_items(8)),
        cfg=cpu_config(),
        preflight=preflight,
        **options,
    )


def test_a_run_stops_before_its_first_step():
    trainer = trainer_of(Preflight())  # the samples' log-probabilities are invented
    before = weights_of(trainer.model)
    with pytest.raises(MismatchError, match="before the first step"):
        trainer.train_step_sync()
    assert trainer.current_step == 0
    assert all(torch.equal(before[name], weight) for name, weight in weights_of(trainer.model).items())


@pytest.mark.parametrize(("version", "is_compared"), [(2, False), (3, True), (None, True)])
def test_samples_of_older_weights_are_not_compared(version, is_compared):
    preflight, items = Preflight(threshold=100.0), sorting_items(8)
    for item in items:
        item.meta["policy_version"] = version
    trainer = trainer_of(preflight, items)
    trainer._step = 3  # as after a resume, with a batch that was sampled ahead
    trainer.train_step_sync()
    assert (preflight.report is not None) == is_compared


def test_the_comparison_runs_once_and_is_kept():
    preflight = Preflight(threshold=100.0)
    trainer = trainer_of(preflight)
    trainer.train_step_sync()
    first = preflight.report
    assert first.healthy
    assert math.isfinite(first.mean)
    assert set(first.to_dict()) == {"mean", "max", "num_tokens", "num_samples"}
    trainer.train_step_sync()
    assert preflight.report is first


@given(st.lists(st.integers(1, 3000), max_size=40), st.integers(1, 32), st.sampled_from([64, 1024, 10_000]))
def test_the_longest_sample_and_at_most_2048_padded_tokens_are_compared(lengths, count, budget):
    logps = SampleAttachments(ActorTokenLogps([]))
    items = [SAWItem([1] * n, [1] * n, [0] * n, 1.0, attachments=logps) for n in lengths]
    selected = _select_samples(items, count, budget)
    usable = [n for n in lengths if 1 < n <= budget]
    assert bool(selected) == bool(usable)
    if usable:
        assert len(selected[0].input_ids) == max(usable)
        assert len(selected) * max(usable) <= max(MOST_TOKENS, max(usable))
        assert len(selected) == min(count, len(usable), max(1, min(budget, MOST_TOKENS) // max(usable)))
        assert len({id(item) for item in selected}) == len(selected)


def test_invalid_settings_are_refused():
    with pytest.raises(ConfigError, match="threshold"):
        Preflight(threshold=0.0)
    with pytest.raises(ConfigError, match="num_samples"):
        Preflight(num_samples=0)


async def test_clipped_prompts_are_not_taken_for_another_template():
    """A sample keeps the messages of the agent; the client sent a shorter version of them."""
    from types import SimpleNamespace

    from ludic.training.preflight.causes import CauseFinder

    _, tokenizer = chat_policy()
    message = {"role": "user", "content": "a long question"}
    meta = {"chat_prompt_messages": [message], "prompt_length": 3}
    item = SimpleNamespace(meta=meta, input_ids=[1, 2, 3, 4], action_mask=[0, 0, 0, 1], images=())
    batch = SimpleNamespace(items=[item])
    named = [
        CauseFinder(None, None, None, tokenizer, SimpleNamespace(prompts_clipped=clipped)).check_prompts(batch)
        for clipped in (0, 1)
    ]
    assert named[0] is not None
    assert named[1] is None


async def test_prompts_with_images_are_not_rendered_again_and_are_continued_with_them():
    from types import SimpleNamespace

    from ludic.training.preflight.causes import CauseFinder
    from ludic.types import ImageSpan, TokenTrace

    _, tokenizer = chat_policy()
    span = ImageSpan("0" * 32, 1, 1)
    meta = {"chat_prompt_messages": [{"role": "user", "content": [{"type": "image", "image": "ludic-image:" + "0" * 32}]}]}
    shown = SimpleNamespace(meta=meta, input_ids=[1, 2, 3, 4], action_mask=[0, 0, 0, 1], images=(span,))
    text = SimpleNamespace(meta={}, input_ids=[1, 2], action_mask=[0, 1], images=())
    asked = []

    class Client:
        async def complete_tokens(self, ids, *, sampling=None, seed=None, **given):
            asked.append((ids, given))
            return TokenTrace(ids, [5], [-1.0])

    batch = SimpleNamespace(items=[shown, text])
    finder = CauseFinder(None, SimpleNamespace(temperature=1.0), None, tokenizer, Client())
    assert finder.check_prompts(batch) is None
    await finder._sample_probes(finder.client, batch)
    assert asked == [([1, 2, 3], {"images": (span,)}), ([1], {})]
