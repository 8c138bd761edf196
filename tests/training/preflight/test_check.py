"""Trainer and sampler are compared before the first step: six faults are named, five healthy
set-ups pass."""

import copy
import math

import pytest
import torch
from chat_tokenizers import pairs_tokenizer
from seeded_faults import (
    Faulty,
    byte_policy,
    chat_policy,
    client_of,
    rendered_here,
    sampled_items,
    sampling,
    shifted_ids,
    shifted_logprobs,
    tokenised_again,
)
from training_samples import ListSource, cpu_config, sorting_items, tiny_model, weights_of

from ludic.errors import ConfigError, MismatchError
from ludic.training import Trainer, make_grpo
from ludic.training.backend.torch import TorchBackend
from ludic.training.preflight.check import Preflight


def config(**changes):
    return cpu_config(**{"max_seq_len": 128, "micro_token_budget": 4096, **changes})


async def checked(policy, client, params, *, told=None, **settings):
    """The report on samples drawn through `client`; the trainer has the policy and was told
    `told`."""
    model, tokenizer = policy
    cfg = config(**(told or {}))
    items = await sampled_items(client, params)
    preflight = Preflight(**{"sampling": params, "tokenizer": tokenizer, "client": client, **settings})
    return await preflight(TorchBackend(model, cfg, algo=make_grpo(group_size=4)), cfg, items)


async def caught(*arguments, **settings):
    with pytest.raises(MismatchError) as caught:
        await checked(*arguments, **settings)
    return caught.value


HEALTHY = {
    "temperature 1": ({}, "raw", {}),
    "temperature 0.6": ({"temperature": 0.6}, "processed", {"temperature": 0.6}),
    "top-p, log-probabilities of the whole distribution": ({"top_p": 0.8}, "raw", {}),
    "both, raw, the trainer at temperature 1": ({"temperature": 0.6, "top_p": 0.8}, "raw", {}),
}


@pytest.mark.parametrize("name", HEALTHY)
async def test_a_healthy_setup_passes(name):
    drawn, mode, told = HEALTHY[name]
    policy = byte_policy()
    report = await checked(policy, client_of(*policy, logprobs_mode=mode), sampling(**drawn), told=told)
    assert report.healthy
    assert report.mean < 1e-5
    assert report.num_samples == 12
    assert report.num_tokens > 50


async def test_another_model_sampled_in_half_precision_is_healthy():
    policy = byte_policy(3, hidden_size=32, num_attention_heads=4)
    client = client_of(*policy, copy_model=True, dtype=torch.bfloat16)
    report = await checked(policy, client, sampling())
    assert report.healthy
    assert 1e-4 < report.mean < 0.02  # it is there, and it is no fault


async def test_a_model_trained_and_sampled_in_half_precision_is_healthy():
    model, tokenizer = byte_policy(4)
    policy = model.to(torch.bfloat16), tokenizer
    report = await checked(
        policy, client_of(*policy, logprobs_mode="processed"), sampling(temperature=0.7), told={"temperature": 0.7}
    )
    assert report.healthy


async def test_a_chat_template_is_healthy():
    policy = chat_policy()
    report = await checked(policy, client_of(*policy), sampling())
    assert report.healthy
    assert report.mean < 1e-5


async def test_raw_log_probabilities_at_temperature_06_are_named():
    policy = byte_policy()
    error = await caught(policy, client_of(*policy, logprobs_mode="raw"), sampling(temperature=0.6), told={"temperature": 0.6})
    assert "before temperature (raw)" in str(error)
    assert "processed_logprobs" in str(error)
    assert error.report.mean > 0.02
    assert error.report.tried[error.report.cause.name] < 1e-5


async def test_a_temperature_that_the_trainer_was_not_told_is_named():
    policy = byte_policy()
    error = await caught(policy, client_of(*policy, logprobs_mode="processed"), sampling(temperature=0.6))
    assert "set TrainerConfig.temperature to 0.6" in str(error)


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.98])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_renormalisation_over_top_p_is_named(top_p, temperature):
    policy = byte_policy()
    params = sampling(top_p=top_p, temperature=temperature)
    error = await caught(policy, client_of(*policy, logprobs_mode="processed"), params, told={"temperature": temperature})
    assert f"renormalised over the tokens within top_p {top_p:g}" in str(error)
    assert error.report.tried[error.report.cause.name] < 1e-5


@pytest.mark.parametrize("change", [shifted_logprobs, shifted_ids])
async def test_what_is_shifted_by_one_is_named(change):
    policy = byte_policy()
    error = await caught(policy, Faulty(client_of(*policy), change=change), sampling())
    assert "shifted by one" in str(error)


async def test_another_chat_template_on_the_server_is_named_by_its_prompt_ids():
    """The server renders the messages and echoes its own ids: the numbers agree, and the model
    is trained on another format."""
    model, tokenizer = chat_policy()
    other = copy.deepcopy(tokenizer)
    other.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}>>"
    error = await caught((model, tokenizer), client_of(model, other), sampling())
    assert "another chat template" in str(error)
    assert "'[user]" in str(error)
    assert "<|im_start|>user" in str(error)
    assert error.report.mean < 1e-5


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content }}{% endfor %}",  # one that is tried
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}>>",  # one that nobody thinks of
    ],
)
async def test_another_chat_template_behind_ids_made_here_is_named(template):
    """The client reports the ids that it rendered, the server read others."""
    model, tokenizer = chat_policy()
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    client = Faulty(client_of(model, other), change=rendered_here(tokenizer))
    error = await caught((model, tokenizer), client, sampling())
    assert "another chat template" in str(error)
    assert error.report.mean > 0.02


async def test_tokenised_text_is_named():
    """A tokenizer whose pieces merge: what was sampled digit by digit is fewer, larger pieces
    when its text is tokenised."""
    tokenizer = pairs_tokenizer()
    model = tiny_model(1, vocab_size=len(tokenizer))
    client = Faulty(client_of(model, tokenizer), change=tokenised_again(tokenizer))
    error = await caught((model, tokenizer), client, sampling())
    assert "tokenised again" in str(error)


@pytest.mark.parametrize("from_ids", [True, False])
async def test_stale_weights_are_named(from_ids):
    model, tokenizer = byte_policy(0)
    stale, _ = byte_policy(1)
    client = Faulty(client_of(stale, tokenizer), from_ids=from_ids)
    error = await caught((model, tokenizer), client, sampling())
    assert "stale weights, or another model" in str(error)
    assert ("samples drawn from token ids" in error.report.tried) == from_ids


async def test_the_table_shows_the_worst_tokens_with_both_numbers():
    model, tokenizer = byte_policy(0)
    error = await caught((model, tokenizer), client_of(byte_policy(1)[0], tokenizer), sampling())
    worst = error.report.worst
    assert len(worst) == 8
    gaps = [abs(w.sampler_logp - w.trainer_logp) for w in worst]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] == pytest.approx(error.report.max)
    assert f"{worst[0].sampler_logp:.4f}" in str(error)
    assert str(worst[0].token_id) in str(error)


def trainer_of(preflight, **options):
    return Trainer(
        model=tiny_model(),
        algo=make_grpo(group_size=4),
        batch_source=ListSource(sorting_items(8)),
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


def test_the_comparison_is_made_once_and_kept():
    preflight = Preflight(threshold=100.0)
    trainer = trainer_of(preflight)
    trainer.train_step_sync()
    first = preflight.report
    assert first.healthy
    assert math.isfinite(first.mean)
    assert set(first.to_dict()) == {"mean", "max", "num_tokens", "num_samples"}
    trainer.train_step_sync()
    assert preflight.report is first


def test_settings_without_meaning_are_refused():
    with pytest.raises(ConfigError, match="threshold"):
        Preflight(threshold=0.0)
    with pytest.raises(ConfigError, match="num_samples"):
        Preflight(num_samples=0)


async def test_prompts_that_the_client_clipped_are_no_sign_of_another_template():
    """The messages that a sample keeps are those that the agent gave; the client sent fewer
    characters of them."""
    from types import SimpleNamespace

    from ludic.training.preflight.causes import CauseFinder

    _, tokenizer = chat_policy()
    message = {"role": "user", "content": "a long question"}
    item = SimpleNamespace(
        meta={"chat_prompt_messages": [message], "prompt_length": 3}, input_ids=[1, 2, 3, 4], action_mask=[0, 0, 0, 1]
    )
    found = SimpleNamespace(items=[item])
    named = [
        CauseFinder(None, None, None, tokenizer, SimpleNamespace(prompts_clipped=clipped)).check_prompts(found)
        for clipped in (0, 1)
    ]
    assert named[0] is not None
    assert named[1] is None
