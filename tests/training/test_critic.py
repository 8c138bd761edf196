"""The critic: advantages over the turns of an episode, in every layout; what it learns, and that a
resumed run has it bit for bit."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from maxent_batches import gradients_of
from training_samples import (
    DrawingSource,
    ListSource,
    assert_same_tensors,
    branching_items,
    cpu_config,
    dialogues,
    sorting_items,
    tiny_model,
    weights_of,
    without_times,
)

from ludic.errors import CheckpointError, ConfigError
from ludic.training import (
    ActorTokenLogps,
    CheckpointConfig,
    LoraSettings,
    MonteCarloReturn,
    RLAlgorithm,
    SampleAttachments,
    TokenClippedSurrogateLoss,
    Trainer,
    apply_lora,
    as_value_model,
    make_grpo,
    make_ppo,
    make_reinforce,
)
from ludic.training.preparation import prepare
from ludic.training.scoring import own_forward, score_rows
from ludic.types import Rollout, Step

TURNS = (1, 3, 2, 1)


def trainer_of(items, *, critic=None, model=None, cfg=None, **settings):
    algo = make_ppo(**{"normalize_adv": False, **settings})
    config = cpu_config(**{"max_seq_len": 120, "micro_token_budget": 512, **(cfg or {})})
    return Trainer(model=model or tiny_model(), algo=algo, batch_source=ListSource(items), cfg=config, critic=critic)


def with_values(trainer, seed=3):
    """The trainer, with a critic whose last layer is not 0."""
    head = [each for each in trainer.critic.backend.model.modules() if getattr(each, "out_features", 0) == 1][-1]
    torch.manual_seed(seed)
    torch.nn.init.normal_(head.weight)
    torch.nn.init.normal_(head.bias)
    return trainer


def prepared(trainer, items):
    return asyncio.run(prepare(trainer, trainer._ingest(items)))


def columns(trainer, items, name="token_weight"):
    by_row = prepared(trainer, items).macro.token_columns[name]
    return [by_row[row] for row in range(len(items))]


def finished(items, *, terminated=True):
    """The items, of which the last of each episode ended it."""
    last = {item.meta["rollout_id"]: item.meta["step_index"] for item in items}
    return [
        replace(item, meta={**item.meta, "terminated": terminated and last[item.meta["rollout_id"]] == item.meta["step_index"]})
        for item in items
    ]


def test_without_values_and_with_lambda_1_advantages_are_the_returns_of_reinforce():
    items = finished(dialogues(TURNS, seed=5))
    rollouts = {}
    for item in items:
        steps = rollouts.setdefault(item.meta["rollout_id"], Rollout(item.meta["rollout_id"], []))
        steps.steps.append(Step(item.meta["step_index"], "", "", None, item.weight, False, False))
    returns = MonteCarloReturn().compute(list(rollouts.values()))
    for item, advantages in zip(items, columns(trainer_of(items), items), strict=True):
        want = returns[item.meta["rollout_id"], item.meta["step_index"]]
        assert advantages.tolist() == [want] * sum(item.action_mask)


def test_without_values_the_gradient_is_that_of_reinforce():
    items = [
        replace(item, attachments=SampleAttachments(), meta={**item.meta, "terminated": True})
        for item in sorting_items(6, seed=2)
    ]
    model, gradients = tiny_model(), []
    returns = RLAlgorithm("returns", MonteCarloReturn(), TokenClippedSurrogateLoss(0.2, 0.2))
    for algo in (make_ppo(normalize_adv=False, normalizer="samples"), returns, make_reinforce()):
        trainer = Trainer(model=model, algo=algo, batch_source=ListSource(items), cfg=cpu_config(micro_token_budget=512))
        logps = columns_of_sampler(trainer, items)
        own = [replace(item, attachments=logps[row]) for row, item in enumerate(items)]
        macro = prepared(trainer, own).macro
        batch = trainer._make_mini_batch(macro, np.arange(len(own)))
        model.zero_grad(set_to_none=True)
        trainer.backend.forward_backward(batch, totals=batch.totals).wait()
        gradients.append(gradients_of(model))
    assert_same_tensors(*gradients[:2])
    assert_same_tensors(gradients[0], gradients[2], atol=1e-4)  # it weighs sums in another order


def columns_of_sampler(trainer, items):
    """Log-probabilities of the trainer itself, so that every ratio is 1."""
    macro = trainer._ingest(items)
    scored = asyncio.run(score_rows(macro, np.arange(len(items)), trainer.cfg, own_forward(trainer)))
    return [SampleAttachments(ActorTokenLogps(scored[row].tolist())) for row in range(len(items))]


@pytest.mark.parametrize("own_model", [False, True], ids=["head", "model"])
def test_advantages_are_the_same_in_every_layout(own_model):
    items = finished(dialogues(TURNS, seed=1))
    made = []
    for packing, budget, merge in (("greedy", 130, False), ("optimal", 512, True), ("padding_free", 300, True)):
        cfg = {"packing": packing, "micro_token_budget": budget, "merge_turns": merge}
        critic = as_value_model(tiny_model(seed=4)) if own_model else None
        trainer = with_values(trainer_of(items, critic=critic, cfg=cfg, lam=0.9, gamma=0.99))
        made.append(torch.cat(columns(trainer, items)))
    assert made[0].std() > 0.1
    torch.testing.assert_close(made[1], made[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(made[2], made[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("own_model", [False, True], ids=["head", "model"])
def test_advantages_and_the_critics_step_are_the_same_on_prefix_trees(own_model):
    items = branching_items((3, 4), seed=1)
    made = []
    for sharing in ("off", "tree"):
        critic = as_value_model(tiny_model(seed=4)) if own_model else None
        trainer = with_values(trainer_of(items, critic=critic, lam=0.5, critic_lr=1e-2, cfg={"prefix_sharing": sharing}))
        assert bool(trainer.critic.backend.shares_prefixes) == (sharing == "tree")
        made.append([torch.cat(columns(trainer, items)), *weights_of(trainer.critic.backend.model).values()])
    for plain, shared in zip(*made, strict=True):
        torch.testing.assert_close(shared, plain, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dropped", [1, 2], ids=["middle", "last"])
def test_the_reward_of_a_turn_without_tokens_counts_for_the_turns_before_it(dropped):
    """Weights 1, 2 and 4 of three turns; without values, the first turn has their sum."""
    items = [replace(item, weight=weight) for item, weight in zip(finished(dialogues((3,), seed=1)), (1, 2, 4), strict=True)]
    empty, nothing = [0] * len(items[dropped].input_ids), SampleAttachments(ActorTokenLogps([]))
    items[dropped] = replace(items[dropped], action_mask=empty, attachments=nothing)
    first, second = prepared(trainer_of(items, lam=1.0), items).macro.token_columns["token_weight"].values()
    assert set(first.tolist()) == {7.0}
    assert set(second.tolist()) == {4.0 if dropped == 1 else 6.0}


def test_an_episode_that_was_cut_off_goes_on_with_the_value_after_its_last_token():
    items = dialogues((2,), seed=1)

    def advantages(terminated, bootstrap=True):
        trainer = with_values(trainer_of(items, critic_lr=0.0, bootstrap=bootstrap))
        return torch.cat(columns(trainer, finished(items, terminated=terminated)))

    ended_A, cut_A = advantages(True), advantages(False)
    assert torch.equal(advantages(False, bootstrap=False), ended_A)  # the default
    head = with_values(trainer_of(items)).critic.backend.model
    outputs = head(input_ids=torch.tensor([items[-1].input_ids]), attention_mask=torch.ones(1, len(items[-1].input_ids)))
    torch.testing.assert_close(cut_A - ended_A, outputs[0, -1, 0].detach().expand_as(ended_A), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("own_model", [False, True], ids=["head", "model"])
def test_the_critic_learns_to_explain_the_returns(own_model):
    items = [
        replace(item, weight=float(item.input_ids[0] % 2), meta={**item.meta, "terminated": True})
        for item in sorting_items(24, seed=0)
    ]
    critic = as_value_model(tiny_model()) if own_model else None
    policy = tiny_model(hidden_size=64)  # its first layers are random: the head needs many of their features
    trainer = trainer_of(items, critic=critic, model=policy, critic_lr=2e-2, cfg={"lr": 0.0})
    stats = [trainer.train_step_sync() for _ in range(25)]
    assert stats[0]["critic/explained_variance"] == 0.0  # all values are 0
    assert stats[-1]["critic/explained_variance"] > 0.5
    assert stats[-1]["critic/loss"] < 0.5 * stats[0]["critic/loss"]
    assert stats[-1]["critic/return"] == pytest.approx(stats[0]["critic/return"], abs=0.3)


def test_normalised_advantages_have_mean_0_and_deviation_1():
    items = finished(dialogues(TURNS, seed=1))
    advantages = torch.cat(columns(trainer_of(items, normalize_adv=True), items)).double()
    assert abs(float(advantages.mean())) < 1e-6
    assert float(advantages.std(correction=0)) == pytest.approx(1.0, abs=1e-6)


def test_in_the_warm_up_the_critic_alone_is_trained():
    items = finished(sorting_items(8, seed=1))
    trainer = trainer_of(items, critic_warmup_steps=2)
    before = weights_of(trainer.model)
    stats = [trainer.train_step_sync() for _ in range(2)]
    assert_same_tensors(weights_of(trainer.model), before)
    assert stats[1]["train/optimizer_steps"] == 0.0
    assert stats[1]["critic/loss"] < stats[0]["critic/loss"]
    assert trainer.train_step_sync()["train/optimizer_steps"] == 1.0
    assert any(not torch.equal(value, before[name]) for name, value in weights_of(trainer.model).items())


def resumable(folder, kind, seed=0, **options):
    critic = None if kind == "head" else as_value_model(tiny_model(seed))
    if kind == "lora":
        critic = apply_lora(as_value_model(tiny_model(5)), LoraSettings(rank=2))
    return Trainer(
        model=tiny_model(seed),
        algo=make_ppo(lam=0.9, critic_lr=1e-2),
        batch_source=DrawingSource(),
        cfg=cpu_config(minibatches_per_batch=2, epochs_per_batch=2),
        checkpoint_config=CheckpointConfig(folder, every_n_steps=1, max_to_keep=None),
        critic=critic,
        **options,
    )


@pytest.mark.parametrize("kind", ["head", "model", "lora"])
def test_a_resumed_run_has_the_critic_bit_for_bit(tmp_path, kind):
    torch.manual_seed(7)
    whole = resumable(tmp_path, kind)
    stats = [without_times(whole.train_step_sync()) for _ in range(3)]
    resumed = resumable(tmp_path, kind, seed=1, resume_from=2)
    assert [without_times(resumed.train_step_sync())] == stats[2:]
    assert_same_tensors(weights_of(resumed.model), weights_of(whole.model))
    assert_same_tensors(weights_of(resumed.critic.backend.model), weights_of(whole.critic.backend.model))


def test_a_damaged_critic_is_found_and_a_missing_one_is_named(tmp_path):
    resumable(tmp_path, "head").train_sync(1)
    listed = json.loads((tmp_path / "step_000001" / "manifest.json").read_text())["files"]
    assert {"critic/model.safetensors", "critic/optimizer.safetensors"} <= set(listed)
    other = CheckpointConfig(tmp_path / "other", every_n_steps=1)
    Trainer(
        model=tiny_model(), algo=make_grpo(group_size=4), batch_source=DrawingSource(), cfg=cpu_config(), checkpoint_config=other
    ).train_sync(1)
    with pytest.raises(CheckpointError, match="has no folder critic"):
        resumable(tmp_path / "other", "head", resume_from=1)


def test_a_critic_that_does_not_fit_is_refused():
    items = sorting_items(2)
    with pytest.raises(ConfigError, match=r"\(Qwen2ForCausalLM\) must have one output.* not \d+; use as_value_model"):
        trainer_of(items, critic=tiny_model())
    with pytest.raises(ConfigError, match=r"vocabulary \(64 tokens\) must be the policy's \(\d+\); .*same tokenizer"):
        trainer_of(items, critic=as_value_model(tiny_model(vocab_size=64)))
    with pytest.raises(ConfigError, match="grpo has no critic"):
        Trainer(
            model=tiny_model(), algo=make_grpo(group_size=2), batch_source=ListSource(items), critic=as_value_model(tiny_model())
        )
    for name, value in (("gamma", 1.5), ("lam", -0.1), ("critic_lr", -1.0), ("critic_warmup_steps", 0.5), ("value_clip", 0)):
        with pytest.raises(ConfigError, match=rf"{name} \({value}\)"):
            make_ppo(**{name: value})
