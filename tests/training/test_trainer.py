"""The training loop: what it fetches, and when it steps, publishes, evaluates, logs and stops."""

import asyncio
import gc
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from training_samples import ListSource, assert_same_tensors, cpu_config, sorting_items, tiny_model, weights_of

from ludic.errors import ConfigError, EmptyBatchError, NonFiniteError, StopRequested
from ludic.training import (
    ActorTokenLogps,
    CISPOLoss,
    Reducer,
    RequestsExhausted,
    RLAlgorithm,
    SampleAttachments,
    SAWItem,
    TokenClippedSurrogateLoss,
    Trainer,
    TrainerConfig,
    drop_zero_weight_samples,
    make_cispo,
    make_grpo,
    make_gspo,
    make_reinforce,
    make_sft,
)
from ludic.training.backend.torch import TorchBackend
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch
from ludic.training.credit_assignment import ConstantCredit
from ludic.training.loss import CompositeLoss, LossTerm, ReinforceLoss


class Publisher:
    def __init__(self):
        self.published = []

    def publish(self, state_dict, version=None):
        self.published.append((version, {name: tensor.clone() for name, tensor in state_dict.items()}))


class Recorder:
    def __init__(self):
        self.logged = []

    def log(self, step, stats):
        self.logged.append((step, dict(stats)))


class Evaluator:
    def __init__(self, *losses):
        self.losses, self.calls = list(losses), []

    async def eval(self, **settings):
        self.calls.append(settings)
        return [{"record": 1}], {"loss": self.losses[len(self.calls) - 1] if self.losses else 0.5}


def trainer_of(items=None, *, algo=None, source=None, model=None, config=None, **options):
    return Trainer(
        model=model or tiny_model(),
        algo=algo or make_grpo(group_size=4),
        batch_source=source or ListSource(items if items is not None else sorting_items(8)),
        cfg=cpu_config(**(config or {})),
        **options,
    )


def on_policy(items, model):
    """The items with the log-probabilities that the model itself gives, so that every ratio is
    1."""
    cfg = cpu_config()
    macro = MacroBatch.ingest(items, cfg.max_seq_len)
    [rows] = macro.divide(1, seed=0, step=0, epoch=0)
    backend = TorchBackend(model, cpu_config(micro_token_budget=10_000), algo=make_grpo(group_size=4))
    [micro_batch] = MiniBatch(macro, rows, backend.cfg)
    logps = asyncio.run(backend.forward_logprobs(micro_batch).result())
    order = MiniBatch(macro, rows, backend.cfg).plan[0]
    measured = {}
    for place, row in enumerate(order):
        mask = micro_batch.tensors["action_mask"][place, 1:].bool()
        measured[int(row)] = logps[place][mask].tolist()
    return [
        SAWItem(
            item.input_ids,
            item.attention_mask,
            item.action_mask,
            item.weight,
            item.meta,
            SampleAttachments(ActorTokenLogps(measured[row])),
        )
        for row, item in enumerate(items)
    ]


# --- one step


def test_a_step_changes_the_weights_and_is_counted():
    trainer = trainer_of()
    before = weights_of(trainer.model)
    stats = trainer.train_step_sync()
    assert trainer.current_step == 1
    assert stats["train/step"] == 1
    assert all((before[name] != weight).any() for name, weight in weights_of(trainer.model).items() if "embed" in name)
    assert stats["train/num_samples"] == stats["train/target_rollouts"] == stats["train/effective_rollouts"] == 8
    assert stats["train/grad_norm"] > 0


def test_only_trained_parameters_are_in_the_optimizer():
    model = tiny_model()
    model.model.embed_tokens.weight.requires_grad_(False)
    trainer = trainer_of(model=model, config={"weight_decay": 0.5})
    frozen = model.model.embed_tokens.weight.detach().clone()
    trainer.train_step_sync()
    assert torch.equal(model.model.embed_tokens.weight, frozen)
    assert sum(len(group["params"]) for group in trainer.optimizer.param_groups) == len(list(model.parameters())) - 1


def test_a_model_without_trainable_parameters_is_refused():
    model = tiny_model().requires_grad_(False)
    with pytest.raises(ConfigError, match="nothing to train"):
        trainer_of(model=model)


def test_the_gradient_is_clipped_and_its_norm_before_clipping_is_logged():
    norms = {}
    for limit in (None, 1e-3):
        trainer = trainer_of(config={"max_grad_norm": limit})
        clipped = []
        trainer.optimizer.register_step_pre_hook(lambda optimizer, *_, seen=clipped: seen.append(gradient_norm(optimizer)))
        norms[limit] = (trainer.train_step_sync()["train/grad_norm"], clipped[0])
    assert norms[None][0] == pytest.approx(norms[1e-3][0])
    assert norms[None][1] == pytest.approx(norms[None][0], rel=1e-5)
    assert norms[1e-3][1] == pytest.approx(1e-3, rel=1e-3)


def gradient_norm(optimizer):
    squares = [parameter.grad.pow(2).sum() for group in optimizer.param_groups for parameter in group["params"]]
    return torch.stack(squares).sum().sqrt().item()


def test_gradient_checkpointing_does_not_change_the_result():
    weights = []
    for enabled in (False, True):
        trainer = trainer_of(enable_gradient_checkpointing=enabled)
        trainer.train_step_sync()
        assert any(getattr(module, "gradient_checkpointing", False) for module in trainer.model.modules()) is enabled
        weights.append(weights_of(trainer.model))
    assert_same_tensors(*weights, atol=1e-6)
    assert trainer.model.config.use_cache is False


def test_two_trainers_without_a_config_do_not_share_one():
    source = ListSource(sorting_items(4))
    first, second = (Trainer(model=tiny_model(), algo=make_sft(), batch_source=source) for _ in range(2))
    first.cfg.lr = 5.0
    assert second.cfg.lr == TrainerConfig().lr


def test_the_trainer_validates_a_modified_config_again():
    cfg = cpu_config()
    cfg.micro_token_budget = 8
    with pytest.raises(ValueError, match="micro_token_budget"):
        Trainer(model=tiny_model(), algo=make_sft(), batch_source=ListSource([]), cfg=cfg)


def test_long_samples_are_truncated_and_reducers_see_it():
    items = sorting_items(8)
    limit = sorted(len(item.input_ids) for item in items)[4]
    stats = trainer_of(items, config={"max_seq_len": limit}).train_step_sync()
    cut = [item for item in items if len(item.input_ids) > limit]
    assert cut
    assert stats["train/seq_len_truncated_rate"] == len(cut) / 8


def test_samples_of_which_nothing_is_left_count_as_truncated():
    items = sorting_items(4, weight=1.0)
    for long in items[:2]:
        long.input_ids, long.attention_mask = [12] * 40 + [5], [1] * 41
        long.action_mask, long.attachments = [0] * 40 + [1], SampleAttachments(ActorTokenLogps([-1.0]))
    stats = trainer_of(items).train_step_sync()
    assert (stats["train/seq_len_truncated_rate"], stats["train/seq_len_truncated_empty"]) == (0.5, 2)
    assert stats["train/num_samples"] == 2


def test_every_sample_says_whether_it_was_truncated_and_the_sources_sample_is_unchanged():
    items = sorting_items(6)
    limit = sorted(len(item.input_ids) for item in items)[2]
    seen = []
    reducers = {"seen": Reducer("sum", lambda item: seen.append(item.meta["seq_len_truncated"]) or 0)}
    trainer_of(items, config={"max_seq_len": limit}, reducers=reducers).train_step_sync()
    assert sorted(seen) == sorted(len(item.input_ids) > limit for item in items)
    assert not any("seq_len_truncated" in item.meta for item in items)


def test_a_sample_without_remaining_actions_is_dropped_and_not_a_zero_in_the_mean():
    items = sorting_items(4, weight=1.0)
    prompt = [12] * 40
    lost = SAWItem(
        [*prompt, 5], [1] * 41, [0] * 40 + [1], 1.0, {"rollout_id": "lost"}, SampleAttachments(ActorTokenLogps([-1.0]))
    )
    losses = []
    for given in (items, [*items, lost]):
        stats = trainer_of(given).train_step_sync()
        losses.append(stats["train/loss"])
    assert losses[0] == losses[1]
    assert stats["train/seq_len_truncated_empty"] == 1
    assert stats["train/num_samples"] == 4


def test_a_sample_that_never_had_an_action_is_counted_separately():
    silent = SAWItem([5, 6], [1, 1], [0, 0], 1.0, {}, SampleAttachments(ActorTokenLogps([])))
    stats = trainer_of([*sorting_items(4), silent]).train_step_sync()
    assert stats["train/samples_without_actions"] == 1
    assert stats["train/seq_len_truncated_empty"] == 0


# --- several optimizer steps per batch


def test_with_one_step_per_batch_nothing_is_clipped_and_grpo_equals_cispo():
    weights = []
    for make in (make_grpo, make_cispo):
        model = tiny_model()
        items = on_policy(sorting_items(16), model)
        loss = {make_grpo: TokenClippedSurrogateLoss(0.2, 0.2), make_cispo: CISPOLoss(0.2, 0.2, length_normalize=False)}[make]
        trainer = trainer_of(items, model=model, algo=RLAlgorithm("x", ConstantCredit(1.0), loss))
        stats = trainer.train_step_sync()
        assert stats["train/clip_frac"] == 0
        assert stats["train/ratio_mean"] == pytest.approx(1, abs=1e-4)
        assert stats["train/optimizer_steps"] == 1
        weights.append(weights_of(trainer.model))
    assert_same_tensors(*weights, atol=1e-3)


@pytest.mark.parametrize("steps", [{"minibatches_per_batch": 2}, {"epochs_per_batch": 2}])
def test_several_steps_per_batch_clip(steps):
    model = tiny_model()
    items = on_policy(sorting_items(16), model)
    stats = trainer_of(items, model=model, config={"lr": 0.1, **steps}).train_step_sync()
    assert stats["train/optimizer_steps"] == 2
    assert 0 < stats["train/clip_frac"] < 1


def test_groups_are_never_split_and_the_order_depends_only_on_seed_step_and_epoch():
    items = sorting_items(40, group_size=4)
    macro = MacroBatch.ingest(items, 32)
    parts = macro.divide(3, seed=1, step=2, epoch=0)
    assert sorted(row for part in parts for row in part.tolist()) == list(range(40))
    homes = {}
    for index, part in enumerate(parts):
        for row in part:
            homes.setdefault(items[row].meta["request_meta"]["group_id"], set()).add(index)
    assert all(len(home) == 1 for home in homes.values())
    assert [len(part) for part in parts] == [16, 12, 12]
    again = macro.divide(3, seed=1, step=2, epoch=0)
    assert [part.tolist() for part in again] == [part.tolist() for part in parts]
    for other in ({"seed": 2}, {"step": 3}, {"epoch": 1}):
        drawn = macro.divide(3, **{"seed": 1, "step": 2, "epoch": 0, **other})
        assert [part.tolist() for part in drawn] != [part.tolist() for part in parts]


def test_pairs_and_the_steps_of_a_rollout_stay_together():
    items = sorting_items(12)
    for index, item in enumerate(items):
        item.meta["request_meta"] = {}
        if index < 6:
            item.meta["pair_id"] = index // 2
        else:
            item.meta["rollout_id"] = f"episode{index // 3}"
    for seed in range(5):
        for part in MacroBatch.ingest(items, 32).divide(4, seed=seed, step=0, epoch=0):
            rows = set(part.tolist())
            for atom in ({0, 1}, {2, 3}, {4, 5}, {6, 7, 8}, {9, 10, 11}):
                assert atom <= rows or not atom & rows


def test_an_empty_mini_batch_takes_no_optimizer_step():
    items = sorting_items(4)  # one group, so the second mini-batch is empty
    stats = trainer_of(items, config={"minibatches_per_batch": 2}).train_step_sync()
    assert stats["train/optimizer_steps"] == 1


def test_the_rewards_of_all_rollouts_and_of_the_trained_samples_are_logged():
    items = sorting_items(8)
    for item in items:
        item.meta["total_reward"] = 1.0 if item.weight else 0.0
    algo = replace(make_grpo(group_size=4), preprocess=drop_zero_weight_samples)
    trainer = trainer_of(source=ListSource(items, meta={"avg_total_reward": 0.375}), algo=algo)
    stats = trainer.train_step_sync()
    assert (stats["train/avg_sampled_reward"], stats["train/avg_total_reward"]) == (0.375, 1.0)


def test_skipping_samples_of_weight_zero_gives_the_same_weights():
    # Momentum and weight decay act even on a gradient of zero.
    batches = [sorting_items(8), sorting_items(8, weight=0.0), sorting_items(8, weight=0.0)]
    ends = []
    for skips in (True, False):
        trainer = trainer_of(source=ListSource(*batches), config={"weight_decay": 0.5, "lr": 1e-2, "skip_zero_weight": skips})
        stats = [trainer.train_step_sync() for _ in batches]
        assert [line["train/optimizer_steps"] for line in stats] == [1, 1, 1]
        assert [line["train/loss"] for line in stats[1:]] == [0, 0]
        assert [line["train/zero_weight_skipped"] for line in stats[1:]] == ([8, 8] if skips else [0, 0])
        assert [line["perf/real_tokens"] > 0 for line in stats[1:]] == ([False, False] if skips else [True, True])
        ends.append(weights_of(trainer.model))
    assert_same_tensors(*ends, atol=1e-7)


# --- correct statistics


@pytest.mark.parametrize("budget", [40, 64, 1000])
@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("make", [make_grpo, make_cispo, make_gspo])
def test_batch_statistics_depend_neither_on_the_split_nor_on_skipped_samples(make, skips, budget):
    items = sorting_items(12)
    config = {"micro_token_budget": budget, "skip_zero_weight": skips, "lr": 0.0}
    stats = trainer_of(items, algo=make(group_size=4), config=config).train_step_sync()
    weights = np.array([item.weight for item in items])
    assert (weights == 0).any()
    assert stats["train/adv_mean"] == pytest.approx(weights.mean(), abs=1e-6)
    assert stats["train/adv_std"] == pytest.approx(weights.std(), abs=1e-6)
    if make is not make_gspo:
        assert stats["train/avg_action_tokens"] == pytest.approx(np.mean([sum(item.action_mask) for item in items]))


@pytest.mark.parametrize("make", [make_grpo, make_cispo, make_gspo, make_reinforce])
def test_model_statistics_cover_the_samples_that_were_run_for_every_split(make):
    items = sorting_items(12)
    passed = [item for item in items if item.weight]
    keys = ("ratio_mean", "ratio_std", "clip_frac", "kl_actor_policy", "logp_mean")
    found = []
    for given, budget in ((passed, 1000), (items, 1000), (items, 40)):
        config = {"micro_token_budget": budget, "lr": 0.0}
        stats = trainer_of(
            given, algo=make(group_size=4) if make is not make_reinforce else make(), config=config
        ).train_step_sync()
        found.append([stats[f"train/{key}"] for key in keys if f"train/{key}" in stats])
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    assert found[2] == pytest.approx(found[0], rel=1e-4)


def test_a_step_without_signal_reports_no_ratio_instead_of_a_ratio_of_zero():
    stats = trainer_of(sorting_items(4, weight=0.0)).train_step_sync()
    assert stats["train/zero_weight_skipped"] == 4
    assert (stats["train/loss"], stats["train/adv_mean"], stats["train/adv_std"]) == (0, 0, 0)
    assert not {"train/ratio_mean", "train/clip_frac", "train/kl_actor_policy", "train/logp_mean"} & stats.keys()


def test_supervised_training_logs_no_reward():
    items = sorting_items(4, weight=1.0)
    for item in items:
        del item.meta["total_reward"]
    stats = trainer_of(items, algo=make_sft()).train_step_sync()
    assert "train/avg_total_reward" not in stats
    assert stats["train/avg_completion_length"] > 0


def test_a_reducer_that_raises_loses_only_its_own_statistic(caplog):
    reducers = {
        "broken": Reducer("mean", lambda item: item.meta["absent"]),
        "ids": Reducer("sum", lambda item: len(item.input_ids)),
    }
    items = sorting_items(4)
    trainer = trainer_of(items, reducers=reducers)
    stats = trainer.train_step_sync()
    assert trainer.current_step == 1
    assert "train/broken" not in stats
    assert stats["train/ids"] == sum(len(item.input_ids) for item in items)
    assert "reducer broken failed" in caplog.text
    assert "KeyError: 'absent'" in caplog.text


def test_a_reducer_with_the_name_of_a_trainer_statistic_is_refused_before_the_step():
    with pytest.raises(ConfigError, match="the trainer itself logs train/loss"):
        trainer_of(reducers={"loss": Reducer("mean", "total_reward")})


def test_a_reducer_with_the_name_of_a_loss_statistic_does_not_replace_it(caplog):
    plain = trainer_of(sorting_items(4)).train_step_sync()
    named = trainer_of(sorting_items(4), reducers={"clip_frac": Reducer("sum", "completion_length")}).train_step_sync()
    assert named["train/clip_frac"] == plain["train/clip_frac"]
    assert re.search("reducer clip_frac .*statistic of the loss", caplog.text)


def test_a_loss_that_a_loss_reports_is_logged_beside_the_differentiated_one():
    class Penalised:
        def compute(self, logits, batch, *, shared):
            loss = -shared.logp_action().mean()
            return loss + 1.0, {"loss": loss.detach()}

    class Plain(Penalised):
        def compute(self, logits, batch, *, shared):
            loss = super().compute(logits, batch, shared=shared)[0]
            return loss, {"loss": loss.detach()}

    penalised, plain = (
        trainer_of(sorting_items(4), algo=RLAlgorithm("x", ConstantCredit(1.0), loss())).train_step_sync()
        for loss in (Penalised, Plain)
    )
    assert penalised["train/loss"] == plain["train/loss"]
    assert penalised["train/reported_loss"] == pytest.approx(penalised["train/loss"] - 1.0)
    assert "train/reported_loss" not in plain


def test_the_loss_that_an_algorithm_or_a_term_reports_is_logged_under_its_own_name():
    class Own(RLAlgorithm):
        def compute_loss(self, model, batch, **settings):
            loss, _ = super().compute_loss(model, batch, **settings)
            return loss, {"loss": torch.tensor(123.0)}

    def penalised(logits, batch, shared):
        return -shared.logp_action().mean(), {"loss": 7.0}

    own = trainer_of(sorting_items(4), algo=Own("own", ConstantCredit(1.0), penalised)).train_step_sync()
    assert own["train/reported_loss"] == 123.0 != own["train/loss"]
    terms = CompositeLoss([LossTerm("mine", penalised), LossTerm("policy", ReinforceLoss())])
    stats = trainer_of(sorting_items(4), algo=RLAlgorithm("x", ConstantCredit(1.0), terms)).train_step_sync()
    assert stats["train/mine/reported_loss"] == 7.0 != stats["train/mine/loss"]
    assert {name for name in stats if "reported" in name} == {"train/mine/reported_loss"}


def test_completion_lengths_are_logged_with_their_range():
    items = sorting_items(8)
    lengths = [item.meta["completion_length"] for item in items]
    stats = trainer_of(items).train_step_sync()
    found = tuple(stats[f"train/{name}_completion_length"] for name in ("min", "avg", "max"))
    assert found == (min(lengths), sum(lengths) / 8, max(lengths))


# --- what stops a run


def test_a_source_that_keeps_returning_empty_batches_is_an_error():
    source = ListSource([])
    with pytest.raises(EmptyBatchError, match="3 batches in a row"):
        trainer_of(source=source, config={"max_empty_batches": 3}).train_step_sync()
    assert source.position == 3


def test_the_error_says_that_every_sample_was_too_old():
    items = sorting_items(4)
    for item in items:
        item.meta["policy_version"] = -5
    with pytest.raises(EmptyBatchError, match=r"8 samples, 8 .*older than max_lag \(1\)"):
        trainer_of(items, config={"max_lag": 1, "max_empty_batches": 2}).train_step_sync()


def test_a_batch_that_preprocessing_empties_is_replaced_by_the_next():
    source = ListSource(sorting_items(4, weight=0.0), sorting_items(4, weight=1.0))
    algo = make_grpo(group_size=4, drop_zero_weight=True)
    stats = trainer_of(source=source, algo=algo).train_step_sync()
    assert source.position == 2
    assert stats["train/num_samples"] == 4


def test_max_lag_drops_older_samples_and_keeps_those_without_a_version():
    items = sorting_items(4, weight=1.0)
    items[0].meta["policy_version"] = 0
    items[1].meta["policy_version"] = -1
    stats = trainer_of(items, config={"max_lag": 0}).train_step_sync()
    assert stats["train/num_samples"] == 3
    assert stats["train/effective_rollouts"] == 3


@pytest.mark.parametrize("broken", [float("inf"), float("nan")])
def test_a_loss_that_is_not_finite_names_its_samples_and_the_weights_do_not_change(broken):
    class Breaking(RLAlgorithm):
        def compute_loss(self, model, batch, **options):
            loss, stats = super().compute_loss(model, batch, **options)
            return loss * torch.where((batch["input_ids"] == 1).any(), broken, 1.0), stats

    items = sorting_items(8, weight=1.0)
    for row in (2, 5):
        items[row].input_ids[0] = 1
    algo = Breaking("breaking", ConstantCredit(1.0), TokenClippedSurrogateLoss())
    trainer = trainer_of(items, algo=algo)
    before, state = weights_of(trainer.model), trainer.optimizer.state_dict()["state"]
    with pytest.raises(NonFiniteError) as caught:
        trainer.train_step_sync()
    named = str(caught.value)
    assert "r2/0" in named
    assert "r5/0" in named
    assert not any(f"r{row}/0" in named for row in (0, 1, 3, 4, 6, 7))
    assert_same_tensors(weights_of(trainer.model), before)
    assert trainer.optimizer.state_dict()["state"] == state == {}
    assert trainer.current_step == 0


def test_a_gradient_that_is_not_finite_stops_the_step_even_if_the_loss_is():
    class Vertical(RLAlgorithm):
        def compute_loss(self, model, batch, **options):
            loss, stats = super().compute_loss(model, batch, **options)
            return loss + (loss - loss.detach()).abs().sqrt(), stats  # the slope of the root at 0 is infinite

    trainer = trainer_of(algo=Vertical("vertical", ConstantCredit(1.0), TokenClippedSurrogateLoss()))
    before = weights_of(trainer.model)
    with pytest.raises(NonFiniteError, match="gradient norm nan"):
        trainer.train_step_sync()
    assert_same_tensors(weights_of(trainer.model), before)


def test_the_error_says_when_the_weights_were_not_finite_before():
    model = tiny_model()
    with torch.no_grad():
        next(model.parameters())[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="weights were not finite before this step"):
        trainer_of(model=model).train_step_sync()


# --- publishing


def test_weights_are_published_every_n_steps_with_the_step_as_version():
    publisher = Publisher()
    trainer = trainer_of(publisher=publisher, config={"sync_every_steps": 2})
    trainer.train_sync(5)
    assert [version for version, _ in publisher.published] == [2, 4]
    assert publisher.published[0][1].keys() == dict(trainer.model.named_parameters()).keys()


def test_the_published_weights_are_those_after_the_step():
    publisher = Publisher()
    trainer = trainer_of(publisher=publisher)
    trainer.train_step_sync()
    assert_same_tensors(publisher.published[0][1], weights_of(trainer.model))


def test_frozen_and_filtered_parameters_are_not_published():
    publisher, model = Publisher(), tiny_model()
    model.model.embed_tokens.weight.requires_grad_(False)
    trainer = trainer_of(model=model, publisher=publisher, param_filter=lambda name, tensor: tensor.ndim == 2)
    trainer.train_step_sync()
    names = set(publisher.published[0][1])
    assert names
    assert all("norm" not in name and "embed" not in name and "bias" not in name for name in names)


def test_publish_may_be_a_coroutine_function():
    class Slow(Publisher):
        async def publish(self, state_dict, version=None):
            await asyncio.sleep(0)
            super().publish(state_dict, version)

    publisher = Slow()
    trainer_of(publisher=publisher).train_step_sync()
    assert len(publisher.published) == 1


def test_publishing_without_a_publisher_is_an_error(caplog):
    with pytest.raises(ValueError, match="PolicyPublisher"):
        trainer_of(config={"sync_every_steps": 2})
    trainer = trainer_of()  # not requested: the shortest documented example has no publisher
    assert not caplog.records
    trainer = trainer_of(config={"sync_every_steps": 1})  # a documented script sets the default explicitly
    [record] = caplog.records
    assert "without a PolicyPublisher: nothing is published" in record.getMessage()
    trainer.train_sync(1)
    assert trainer.sync_every_steps is None
    assert trainer_of(publisher=Publisher(), config={"sync_every_steps": 0}).sync_every_steps is None


def test_merged_adapters_are_published_and_the_trained_weights_stay_bitwise_equal():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    publisher = Publisher()
    trainer = trainer_of(model=model, publisher=publisher)
    frozen = {name: weight for name, weight in weights_of(model).items() if "base_layer" in name}
    trainer.train_step_sync()
    after = weights_of(model)
    assert_same_tensors({name: after[name] for name in frozen}, frozen)
    published = publisher.published[0][1]
    assert set(published) == {name for name, _ in tiny_model().named_parameters()}
    for name in frozen:
        if name.endswith("weight"):
            module = name.removesuffix(".base_layer.weight")
            low, high = after[f"{module}.lora_A.default.weight"], after[f"{module}.lora_B.default.weight"]
            merged = frozen[name] + model.peft_config["default"].lora_alpha / 2 * high @ low
            plain = published[f"{module.removeprefix('base_model.model.')}.weight"]
            assert (plain - merged).abs().max() < 1e-5
            assert (plain - frozen[name]).abs().max() > 1e-3


def test_adapters_are_unmerged_when_the_publisher_fails():
    from peft import LoraConfig, get_peft_model

    class Failing:
        def publish(self, state_dict, version=None):
            raise ConnectionError("server gone")

    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    trainer = trainer_of(model=model, publisher=Failing())
    with pytest.raises(ConnectionError, match="server gone"):
        trainer.train_step_sync()
    assert not any(module.merged for module in model.modules() if hasattr(module, "merged") and hasattr(module, "lora_A"))


def test_a_resumed_trainer_publishes_before_it_requests_samples(tmp_path):
    from ludic.training import CheckpointConfig

    checkpoints = CheckpointConfig(tmp_path, every_n_steps=1)
    trainer_of(publisher=Publisher(), checkpoint_config=checkpoints).train_sync(2)
    publisher = Publisher()
    trainer_of(publisher=publisher, checkpoint_config=checkpoints, resume_from=2).train_step_sync()
    assert [version for version, _ in publisher.published] == [2, 3]


# --- the loop around the steps


def test_train_without_a_number_ends_when_the_requests_do():
    class Ending(ListSource):
        async def next_batch(self):
            if self.position == 3:
                raise self.end
            return await super().next_batch()

    for end in (RequestsExhausted("done"), StopRequested("stop"), StopAsyncIteration()):
        source = Ending(sorting_items(4))
        source.end = end
        trainer = trainer_of(source=source)
        trainer.train_sync()
        assert trainer.current_step == 3
    for end in (RequestsExhausted("done"), StopRequested("stop")):
        source = Ending(sorting_items(4))
        source.end = end
        with pytest.raises(type(end)):
            trainer_of(source=source).train_sync(5)


def test_log_fn_is_called_every_nth_step_and_may_be_a_coroutine_function():
    seen = []

    async def note(stats):
        await asyncio.sleep(0)
        seen.append(stats["train/step"])

    trainer_of().train_sync(5, log_every=2, log_fn=note)
    assert seen == [2, 4]


def test_steps_that_are_not_logged_return_only_their_number():
    recorder = Recorder()
    trainer = trainer_of(train_logger=recorder, config={"log_every": 2})
    assert trainer.train_step_sync() == {"train/step": 1.0}
    assert "train/loss" in trainer.train_step_sync()
    assert [step for step, _ in recorder.logged] == [2]


def test_a_failing_logger_does_not_end_the_run(caplog):
    class Failing:
        def log(self, step, stats):
            raise ConnectionError("service down")

    trainer = trainer_of(train_logger=Failing())
    trainer.train_sync(2)
    assert trainer.current_step == 2
    assert "the logger failed" in caplog.text


def test_evaluation_runs_at_the_start_and_every_n_steps_and_is_logged_once():
    recorder, evaluator, logged_stats = Recorder(), Evaluator(0.9, 0.8, 0.7), []
    trainer = trainer_of(train_logger=recorder, evaluator=evaluator, config={"eval_at_start": True, "eval_every_n_steps": 2})
    trainer.train_sync(4, eval_log_fn=logged_stats.append)
    assert logged_stats == [
        {"eval/loss": 0.9, "eval/step": 0.0},
        {"eval/loss": 0.8, "eval/step": 2.0},
        {"eval/loss": 0.7, "eval/step": 4.0},
    ]
    kinds = [(step, "train" if "train/loss" in stats else "eval") for step, stats in recorder.logged]
    assert kinds == [(0, "eval"), (1, "train"), (2, "train"), (2, "eval"), (3, "train"), (4, "train"), (4, "eval")]
    assert not any(key.startswith("eval/") for _, stats in recorder.logged if "train/loss" in stats for key in stats)
    assert trainer.last_eval == logged_stats[-1]


def test_the_evaluators_settings_hold_unless_overridden():
    evaluator = Evaluator()
    trainer_of(evaluator=evaluator).eval_sync()
    trainer_of(evaluator=evaluator, config={"eval_concurrency": 7}).eval_sync(max_steps=3)
    assert evaluator.calls[0] == {"reducers": None, "max_steps": None, "timeout_s": None, "concurrency": None}
    assert evaluator.calls[1] == {"reducers": None, "max_steps": 3, "timeout_s": None, "concurrency": 7}


def test_evaluation_gives_records_and_metrics_and_needs_an_evaluator():
    result = trainer_of(evaluator=Evaluator()).eval_sync()
    assert result == {"records": [{"record": 1}], "metrics": {"loss": 0.5}}
    with pytest.raises(ValueError, match="evaluator"):
        trainer_of().eval_sync()


def test_evaluations_without_an_evaluator_warn_and_are_skipped(caplog):
    trainer = trainer_of(config={"eval_every_n_steps": 1, "eval_at_start": True})
    trainer.train_sync(2)
    [record] = caplog.records
    assert "without an evaluator: nothing is evaluated" in record.getMessage()
    assert (trainer.current_step, trainer.last_eval) == (2, {})


def test_training_stops_early_when_evaluations_no_longer_improve():
    evaluator = Evaluator(0.9, 0.5, 0.6, 0.5, 0.1)
    trainer = trainer_of(evaluator=evaluator, config={"eval_every_n_steps": 1, "early_stopping_patience": 2})
    trainer.train_sync(10)
    assert trainer.current_step == 4


def test_early_stopping_counts_evaluations_without_improvement():
    config = {"eval_every_n_steps": 1, "early_stopping_patience": 2, "early_stopping_min_delta": 0.1}
    trainer = trainer_of(evaluator=Evaluator(), config=config)
    # the first is the best; 0.95 is better by less than 0.1; 0.5 is an improvement; then two in a
    # row are not
    found = [trainer._check_early_stopping(value) for value in (1.0, 0.95, 0.5, 0.5, 0.45)]
    assert found == [(False, True), (False, False), (False, True), (False, False), (True, False)]


def test_the_error_of_an_unknown_early_stopping_metric_lists_the_available_ones():
    config = {"eval_every_n_steps": 1, "early_stopping_patience": 1, "early_stopping_metric": "eval_accuracy"}
    with pytest.raises(ConfigError, match=r"eval_accuracy.*loss"):
        trainer_of(evaluator=Evaluator(), config=config).train_sync(1)


def test_the_users_reducers_are_logged():
    reducers = {"right": Reducer("count_true", "total_reward", normalize_by="rollouts")}
    items = sorting_items(8)
    stats = trainer_of(items, reducers=reducers).train_step_sync()
    assert stats["train/right"] == sum(item.meta["total_reward"] for item in items) / 8


def test_phase_durations_sum_to_the_step_and_padding_is_counted():
    stats = trainer_of(config={"packing": "greedy", "micro_token_budget": 64}, publisher=Publisher()).train_step_sync()
    phases = ("rollout", "batching", "forward_backward", "optimizer", "publish")
    assert all(stats[f"perf/{phase}_s"] > 0 for phase in phases)
    assert sum(stats[f"perf/{phase}_s"] for phase in phases) <= stats["perf/step_s"]
    assert stats["perf/real_tokens"] <= stats["perf/padded_tokens"] == stats["perf/padded_tokens_greedy"]
    assert stats["perf/padded_tokens"] <= stats["perf/padded_tokens_unpacked"]


# --- synchronous use


def test_synchronous_methods_in_a_running_loop_say_what_to_await():
    trainer = trainer_of()

    async def inside():
        trainer.train_step_sync()

    with pytest.raises(RuntimeError, match=r"await trainer\.train_step\(\)"):
        asyncio.run(inside())


def test_synchronous_steps_share_one_event_loop_that_closes_with_the_trainer():
    loops = []

    class LoopBound(ListSource):
        async def next_batch(self):
            loops.append(asyncio.get_running_loop())
            return await super().next_batch()

    trainer = trainer_of(source=LoopBound(sorting_items(4)))
    trainer.train_step_sync()
    trainer.train_sync(1)
    assert loops[0] is loops[1]
    del trainer
    gc.collect()
    assert loops[0].is_closed()


async def test_steps_can_be_awaited():
    trainer = trainer_of(algo=make_reinforce())
    assert (await trainer.train_step())["train/step"] == 1
    await trainer.train(2)
    assert trainer.current_step == 3


def test_resuming_requires_a_checkpointer():
    with pytest.raises(ValueError, match="checkpointer"):
        trainer_of(resume_from=3)


def test_bf16_autocast_computes_in_bf16_and_keeps_float32_weights():
    dtypes = set()

    class Watching(RLAlgorithm):
        def compute_loss(self, model, batch, **options):
            dtypes.add(model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.dtype)
            return super().compute_loss(model, batch, **options)

    algo = Watching("watching", ConstantCredit(1.0), TokenClippedSurrogateLoss())
    trainer = trainer_of(algo=algo, config={"mixed_precision_dtype": "bf16"})
    trainer.train_step_sync()
    assert dtypes == {torch.bfloat16}
    assert next(trainer.model.parameters()).dtype == torch.float32
