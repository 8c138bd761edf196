"""Reinforcement learning: a `Trainer` on the batches of a manager."""

import asyncio
import contextlib
import copy
import itertools
import json
import re
import shutil
from functools import partial

import pytest
from document_samples import ListLogger, generate, make_backend, make_sample
from safetensors.torch import save_file
from stub_sglang import StubSGLang
from training_samples import assert_same_tensors, tiny_model, weights_of

from ludic.distributed.engines import SGLangEngine
from ludic.distributed.push import engine_sessions
from ludic.errors import ConfigTypeError, DataError, NonFiniteError, PublishError, RolloutError
from ludic.files.atomic import read_json
from ludic.rollouts.training import AsyncRolloutManager, DataBuffer, RLTrainingConfig, RolloutConfig, Sample, run_rl_training
from ludic.rollouts.training.loops.rl_loop import (
    advantages_of,
    compute_advantages,
    compute_own_reward,
    compute_reward,
    prepare_grpo_batch,
)
from ludic.rollouts.training.metrics import JSONLLogger
from ludic.rollouts.training.rl_losses import GRPO_LOSS, grpo_loss, ppo_loss
from ludic.rollouts.training.rollout_gen import convert_to_batch
from ludic.training import RLAlgorithm, SampleAttachments, SAWBatch, SAWItem, Trainer, TrainerConfig
from ludic.training.checkpoint import CheckpointManager
from ludic.training.credit_assignment import ConstantCredit
from ludic.training.types import ActorTokenLogps

PROMPTS = [f"question {number}" for number in range(5)]
CONFIG = RLTrainingConfig(num_steps=4, sync_every=2, log_every=2, checkpoint_every=2)


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch):
    monkeypatch.setattr(engine_sessions, "BACKOFF_S", 0.0)


def make_manager(n=2, **changes):
    settings = {"batch_size": 2, "n_samples_per_prompt": n, "generate_fn": generate, "order": "submission", **changes}
    return AsyncRolloutManager(DataBuffer(PROMPTS), RolloutConfig(**settings))


async def run(backend, manager, engines=(), config=CONFIG, **options):
    return await run_rl_training(backend, manager.data_buffer, manager, list(engines), config, **options)


class SourceByHand:
    """The same batches; the advantages of two members are relative to their mean."""

    def __init__(self, manager):
        self.manager = manager

    async def next_batch(self):
        batch = await self.manager.generate_batch(lambda sample: float(sample.metadata["correct"]))
        items = []
        for first, second in zip(batch.samples[::2], batch.samples[1::2], strict=True):
            mean = (first.reward + second.reward) / 2
            items += [self.item(sample, sample.reward - mean) for sample in (first, second)]
        return SAWBatch(items, {"target_rollouts": len(items)})

    @staticmethod
    def item(sample, weight):
        mask = [int(value) for value in sample.loss_mask]
        logps = ActorTokenLogps([logp for logp, action in zip(sample.rollout_log_probs, mask, strict=True) if action])
        meta = {"rollout_id": str(sample.index), "request_meta": {"group_id": sample.group_index}}
        return SAWItem(sample.tokens, [1] * len(mask), mask, weight, meta, SampleAttachments(logps))


@pytest.mark.parametrize("in_thread", [True, False])
async def test_the_loop_ends_with_the_bits_of_a_trainer_written_by_hand(tmp_path, in_thread):
    backend = make_backend(tmp_path, grpo_loss, in_thread=in_thread)
    metrics = await run(backend, make_manager())
    model = tiny_model()
    trainer = Trainer(
        model=model,
        algo=RLAlgorithm("grpo", ConstantCredit(1.0), GRPO_LOSS),
        batch_source=SourceByHand(make_manager()),
        cfg=TrainerConfig(
            lr=1e-2, weight_decay=1e-2, max_grad_norm=None, max_seq_len=128, model_device="cpu", sync_every_steps=0
        ),
    )
    losses = []
    await trainer.train(4, log_fn=lambda stats: losses.append(stats["train/loss"]))
    assert any(losses)
    assert [line["loss"] for line in metrics] == losses
    assert_same_tensors(weights_of(backend.model), weights_of(model))


async def test_metrics_and_the_logger(tmp_path):
    logger = ListLogger()
    metrics = await run(make_backend(tmp_path, ppo_loss), make_manager(), metrics_logger=logger)
    assert [(line["step"], line["optim_step"]) for line in metrics] == [(1, 1), (2, 2), (3, 3), (4, 4)]
    for line in metrics:
        assert {"loss", "grad_norm", "lr", "train/ratio_mean"} <= line.keys()
        assert 0 <= line["min_reward"] <= line["mean_reward"] <= line["max_reward"] <= 1
    assert ([step for step, _ in logger.lines], logger.finished) == ([2, 4], 1)


async def test_a_resumed_run_ends_as_if_it_had_not_stopped(tmp_path):
    whole = make_backend(tmp_path / "whole", ppo_loss)
    expected = await run(whole, make_manager())
    parts, short = tmp_path / "parts", RLTrainingConfig(num_steps=3, checkpoint_every=2)
    await run(make_backend(parts, ppo_loss), make_manager(), config=short)
    resumed = make_backend(parts, ppo_loss, seed=9)
    [last] = await run(resumed, make_manager(), resume=True)
    assert (last["step"], last["loss"], last["mean_reward"]) == (4, expected[3]["loss"], expected[3]["mean_reward"])
    assert_same_tensors(weights_of(resumed.model), weights_of(whole.model))


async def generate_in_part(prompts, seeds):
    """Tokens of an answer count 1/4, 1/2, 3/4, 1, 1/4, ..."""
    samples = await generate(prompts, seeds)
    for sample in samples:
        sample.loss_mask = [value * (1 + place % 4) / 4 for place, value in enumerate(sample.loss_mask)]
    return samples


async def test_masks_with_fractions_are_trained_and_resumed(tmp_path):
    """The first step is that of its batch by column. At step 2 there are groups in the air."""
    make = partial(make_manager, generate_fn=generate_in_part, over_sampling_factor=1.5)
    whole, by_column = (make_backend(tmp_path / name, grpo_loss) for name in ("whole", "by column"))
    metrics = await run(whole, make())
    batch = await make().generate_batch(compute_reward)
    assert any(0 < value < 1 for mask in batch.loss_masks for value in mask)
    loss = (await by_column.forward_backward(prepare_grpo_batch(batch, batch.rewards, CONFIG)))["loss"]
    assert metrics[0]["loss"] == pytest.approx(loss, abs=1e-6)

    shutil.copytree(tmp_path / "whole" / "step_000002", tmp_path / "parts" / "step_000002")
    kept = read_json(tmp_path / "parts" / "step_000002" / "trainer_state.json")["batch_source"]["partial_samples"]
    assert {sample["loss_mask"]["dtype"] for sample in kept} == {"float64"}
    resumed = make_backend(tmp_path / "parts", grpo_loss, seed=9)
    rest = await run(resumed, make(), resume=True)
    assert [line["loss"] for line in rest] == [line["loss"] for line in metrics[2:]]
    assert_same_tensors(weights_of(resumed.model), weights_of(whole.model))


async def test_a_loop_killed_before_its_first_checkpoint_has_each_step_in_its_log_once(tmp_path, monkeypatch):
    """After lines of an earlier run, which stay."""
    config = RLTrainingConfig(num_steps=2, log_every=1, checkpoint_every=1)
    earlier = JSONLLogger(tmp_path)
    earlier.log({"loss": 9.0}, step=7)
    earlier.finish()
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointManager, "save_backend", interrupt)
        with pytest.raises(InterruptedError):
            await run(make_backend(tmp_path, ppo_loss), make_manager(), config=config, metrics_logger=JSONLLogger(tmp_path))
    assert [line["step"] for line in logged(tmp_path)] == [7, 1]
    backend = make_backend(tmp_path, ppo_loss)
    await run(backend, make_manager(), config=config, metrics_logger=JSONLLogger(tmp_path), resume=True)
    assert [line["step"] for line in logged(tmp_path)] == [7, 1, 2]


def interrupt(*arguments, **options):
    raise InterruptedError


@pytest.mark.parametrize("is_saved", [False, True])
async def test_a_loop_killed_beside_a_checkpoint_has_each_step_in_its_log_once(tmp_path, monkeypatch, is_saved):
    """It ends after the line of step 2 and before its checkpoint, or right after the checkpoint."""
    config, saved = RLTrainingConfig(num_steps=4, log_every=1, checkpoint_every=1), CheckpointManager.save_backend
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    await run(make_backend(whole, ppo_loss), make_manager(), config=config, metrics_logger=JSONLLogger(whole))

    def save_until_step_2(self, backend, *, step, metadata=None, critic=None):
        if step < 2 or is_saved:
            saved(self, backend, step=step, metadata=metadata)
        if step == 2:
            raise InterruptedError

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointManager, "save_backend", save_until_step_2)
        with pytest.raises(InterruptedError):
            await run(make_backend(parts, ppo_loss), make_manager(), config=config, metrics_logger=JSONLLogger(parts))
    assert [line["step"] for line in logged(parts)] == [1, 2]
    assert ("metrics_log" in read_json(parts / f"step_{1 + is_saved:06}" / "trainer_state.json")) is True
    resumed = make_backend(parts, ppo_loss, seed=9)
    await run(resumed, make_manager(), config=config, metrics_logger=JSONLLogger(parts), resume=True)
    assert [(line["step"], line["loss"]) for line in logged(parts)] == [(line["step"], line["loss"]) for line in logged(whole)]


async def test_the_last_step_is_logged_before_its_checkpoint(tmp_path):
    """Also where `log_every` would not log it."""
    config = RLTrainingConfig(num_steps=4, log_every=3, checkpoint_every=2)
    await run(make_backend(tmp_path, ppo_loss), make_manager(), config=config, metrics_logger=JSONLLogger(tmp_path))
    assert [line["step"] for line in logged(tmp_path)] == [3, 4]
    size = (tmp_path / "metrics.jsonl").stat().st_size
    marks = [read_json(tmp_path / f"step_00000{step}" / "trainer_state.json")["metrics_log"] for step in (2, 4)]
    assert marks == [0, size]


def logged(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


async def test_a_checkpoint_holds_the_managers_state(tmp_path):
    manager = make_manager(over_sampling_factor=2.0)
    await run(make_backend(tmp_path, grpo_loss), manager)
    state = read_json(tmp_path / "step_000004" / "trainer_state.json")["batch_source"]
    assert (state["step_count"], state["buffer_state"]) == (4, manager.data_buffer.save_state())


class Engine:
    def __init__(self, manager=None, fails_at=None):
        self.manager, self.fails_at, self.loaded = manager, fails_at, []

    async def update_weights_from_checkpoint(self, checkpoint_path):
        name = checkpoint_path.rpartition("/")[2]
        if name == self.fails_at:
            return {"success": False, "error": "no space"}
        with open(f"{checkpoint_path}/config.json") as file:
            assert file.read()
        self.loaded.append(name)
        return {"success": True}


class TensorPublisher:
    def __init__(self):
        self.versions = []

    def publish(self, state_dict, version=None):
        assert len(state_dict) > 3
        self.versions.append(version)


async def test_engines_get_a_folder_every_sync_every_steps_and_at_the_end(tmp_path):
    engine, publisher, seen = Engine(), TensorPublisher(), []

    async def generate_and_note(prompts, seeds, weight_version):
        seen.append(weight_version)
        return await generate(prompts, seeds)

    manager = make_manager(generate_fn=generate_and_note)
    config = RLTrainingConfig(num_steps=5, sync_every=2)
    await run(make_backend(tmp_path, grpo_loss), manager, [engine, publisher], config)
    assert engine.loaded == ["step_000002", "step_000004", "step_000005"]
    assert publisher.versions == [2, 4, 5]
    assert [seen[4 * step] for step in range(5)] == [0, 0, 2, 2, 4]
    published = tmp_path / "published"
    assert sorted(path.name for path in published.iterdir()) == ["step_000004", "step_000005"]
    assert not (published / "step_000005" / "optimizer.safetensors").exists()


async def test_without_engines_samples_have_the_version_of_each_step_also_after_a_resume(tmp_path):
    seen = []

    async def generate_and_note(prompts, seeds, weight_version):
        seen.append(weight_version)
        return await generate(prompts, seeds)

    config = RLTrainingConfig(num_steps=3, checkpoint_every=2)
    await run(make_backend(tmp_path, grpo_loss), make_manager(generate_fn=generate_and_note), config=config)
    assert seen == [0] * 4 + [1] * 4 + [2] * 4
    await run(make_backend(tmp_path, grpo_loss), make_manager(generate_fn=generate_and_note), resume=True)
    assert seen[12:] == [3] * 4
    assert not (tmp_path / "published").exists()


async def test_folders_metadata_samples_and_engines_count_the_steps_of_the_loop(tmp_path):
    seen, engine = [], Engine()

    async def generate_and_note(prompts, seeds, weight_version):
        seen.append(weight_version)
        return await generate(prompts, seeds)

    def numbers(folder):
        metadata = read_json(tmp_path / folder / "metadata.json")
        return metadata["step"], metadata["weight_version"], metadata["optim_step"]

    settings = {"sync_every": 1, "checkpoint_every": 2, "minibatches_per_batch": 2}
    for steps in (3, 4):
        backend, manager = make_backend(tmp_path, ppo_loss), make_manager(generate_fn=generate_and_note)
        await run(backend, manager, [engine], RLTrainingConfig(num_steps=steps, **settings), resume=steps == 4)
        assert (backend.weight_version, backend.current_step) == (steps, 2 * steps)
        for folder in (f"step_{steps:06d}", f"published/step_{steps:06d}"):
            assert numbers(folder) == (steps, steps, 2 * steps)
    assert seen == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert engine.loaded == ["step_000001", "step_000002", "step_000003", "step_000003", "step_000004"]


async def test_an_engine_that_fails_ends_the_run_with_its_error_and_a_finished_logger(tmp_path):
    logger = ListLogger()
    with pytest.raises(PublishError, match="no space"):
        await run(make_backend(tmp_path, grpo_loss), make_manager(), [Engine(fails_at="step_000002")], metrics_logger=logger)
    assert logger.finished == 1


class NumberingBackend:
    """A backend of the user's that numbers its saves."""

    def __init__(self):
        self.saved = []

    def forward_backward(self, batch):
        return {"loss": 1.0}

    def optim_step(self):
        return {"lr": 0.1, "step": 1}

    def save_checkpoint(self, step, metrics):
        self.saved.append(step)
        assert metrics["loss"] == 1.0
        return f"save {len(self.saved)} of step {step}"


async def test_a_backend_of_the_users_own_saves_each_step_once(tmp_path):
    class AnyEngine:
        def __init__(self):
            self.loaded = []

        async def update_weights_from_checkpoint(self, checkpoint_path):
            self.loaded.append(checkpoint_path)
            return {"success": True}

    backend, engine = NumberingBackend(), AnyEngine()
    await run(backend, make_manager(), [engine], RLTrainingConfig(num_steps=5, sync_every=2, checkpoint_every=2))
    assert backend.saved == [2, 4, 5]
    assert engine.loaded == ["save 1 of step 2", "save 2 of step 4", "save 3 of step 5"]
    failed = NumberingBackend()
    with pytest.raises(PublishError, match="no space"):
        await run(failed, make_manager(), [Engine(fails_at="save 1 of step 3")], RARE)
    assert failed.saved == [3]


RARE = RLTrainingConfig(num_steps=4, sync_every=3, checkpoint_every=100)


async def check_resume_equals_a_whole_run(folder, steps):
    """Resume the run in `folder`, of which the first `steps` steps are saved."""
    whole, resumed = make_backend(folder / "whole", ppo_loss), make_backend(folder / "parts", ppo_loss, seed=9)
    await run(whole, make_manager(), [Engine()], RARE)
    rest = await run(resumed, make_manager(), [Engine()], RARE, resume=True)
    assert [line["step"] for line in rest] == list(range(steps + 1, 5))
    assert_same_tensors(weights_of(resumed.model), weights_of(whole.model))


@pytest.mark.parametrize("step", [3, 4])  # within the run, and at its end
async def test_an_engine_that_fails_costs_no_step(tmp_path, step):
    engine = Engine(fails_at=f"step_{step:06d}")
    with pytest.raises(PublishError, match="no space"):
        await run(make_backend(tmp_path / "parts", ppo_loss), make_manager(), [engine], RARE)
    await check_resume_equals_a_whole_run(tmp_path, step)


async def test_a_sampler_that_fails_costs_no_step(tmp_path):
    calls = itertools.count()

    async def fail_in_the_third_batch(prompts, seeds):
        if next(calls) >= 8:
            raise OSError("the sampler is gone")
        return await generate(prompts, seeds)

    manager = make_manager(generate_fn=fail_in_the_third_batch, max_retries=0, outage_patience_s=0.0)
    backend = make_backend(tmp_path, ppo_loss)
    with pytest.raises(RolloutError, match="the sampler is gone"):
        await run(backend, manager, config=RARE)
    trained = weights_of(backend.model)
    resumed = make_backend(tmp_path, ppo_loss, seed=9)
    await resumed.load_checkpoint(tmp_path / "step_000002")
    assert_same_tensors(weights_of(resumed.model), trained)
    rest = await run(resumed, make_manager(), config=RARE, resume=True)  # without the groups that were lost
    assert [line["step"] for line in rest] == [3, 4]


async def test_a_save_that_fails_after_an_engine_leaves_its_error_and_is_logged(tmp_path, monkeypatch, caplog):
    async def fail(self):
        raise OSError("the disk is full")

    monkeypatch.setattr(Trainer, "ensure_checkpoint", fail)
    with pytest.raises(PublishError, match="no space"):
        await run(make_backend(tmp_path, grpo_loss), make_manager(), [Engine(fails_at="step_000003")], RARE)
    assert "step 3 could not be saved" in caplog.text
    assert "the disk is full" in caplog.text


async def test_after_a_loss_that_is_not_finite_nothing_is_saved(tmp_path):
    steps = itertools.count()

    def break_later(logits, labels, loss_mask):
        return logits.mean() * (1.0 if next(steps) < 2 else float("nan"))

    with pytest.raises(NonFiniteError):
        await run(make_backend(tmp_path, break_later), make_manager(), config=RARE)
    assert not list(tmp_path.glob("step_*"))


@pytest.fixture
def sglang(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(weights_of(tiny_model()), folder / "model.safetensors")
    with StubSGLang(folder) as server:
        yield server


async def run_and_disturb(folder, server, disturb):
    """The version that the server has for each call of five batches of four calls, when weights are
    synced every two; `disturb` gets the engine and the number of each call."""
    engine, seen = SGLangEngine(server.url, 60.0), []

    async def generate_and_note(prompts, seeds):
        seen.append(server.version)
        disturb(engine, len(seen))
        return await generate(prompts, seeds)

    manager = make_manager(generate_fn=generate_and_note)
    await run(make_backend(folder, grpo_loss), manager, [engine], RLTrainingConfig(num_steps=5, sync_every=2))
    return seen


async def test_a_server_that_is_restarted_between_two_syncs_has_their_weights_for_the_next_batch(sglang, tmp_path, caplog):
    def restart(_, call):
        if call == 12:  # the last of the third batch
            sglang.restart()

    seen = await run_and_disturb(tmp_path, sglang, restart)
    assert seen == ["default"] * 8 + ["step_000002"] * 8 + ["step_000004"] * 4
    assert re.search("other weights, .*version step_000002 again", caplog.text)


async def test_a_server_that_is_away_for_a_batch_is_named_and_does_not_end_the_run(sglang, tmp_path, caplog):
    def leave(engine, call):
        if call == 12:
            engine.base_url = "http://127.0.0.1:1"
        elif call == 16:
            engine.base_url = sglang.url
            sglang.restart()

    seen = await run_and_disturb(tmp_path, sglang, leave)
    assert seen == ["default"] * 8 + ["step_000002"] * 8 + ["step_000004"] * 4
    assert "lacks the weights of the last sync" in caplog.text
    assert "http://127.0.0.1:1" in caplog.text


async def leave_groups_owed(folder):
    """Train, fail at the sync of step 4, and leave the checkpoint of step 2, as if the run had been
    killed. Returns the calls that had begun and not ended when step 2 was saved."""
    saved, calls, owed = asyncio.Event(), [], []

    class Saved(ListLogger):
        def log(self, metrics, step):
            if step == 2:
                owed.extend(calls[8:])
                saved.set()

    async def generate_until_saved(prompts, seeds):
        calls.append((*prompts, *seeds))
        if len(calls) > 8:  # those of the first two batches have been begun
            await saved.wait()
        return await generate(prompts, seeds)

    manager = make_manager(generate_fn=generate_until_saved, over_sampling_factor=2.0)
    config = RLTrainingConfig(num_steps=4, sync_every=2, checkpoint_every=2, log_every=1)
    with pytest.raises(PublishError, match="no space"):
        await run(make_backend(folder, ppo_loss), manager, [Engine(fails_at="step_000004")], config, metrics_logger=Saved())
    shutil.rmtree(folder / "step_000004")
    return owed


@pytest.mark.parametrize("is_entered", [False, True])
async def test_a_resumed_run_publishes_before_it_goes_on_with_the_groups_that_it_owes(tmp_path, is_entered):
    owed, events = await leave_groups_owed(tmp_path), []

    class SlowEngine:
        async def update_weights_from_checkpoint(self, checkpoint_path):
            for _ in range(20):  # calls that have begun go on meanwhile
                await asyncio.sleep(0)
            events.append(checkpoint_path.rpartition("/")[2])
            return {"success": True}

    async def generate_and_note(prompts, seeds):
        events.append((*prompts, *seeds))
        return await generate(prompts, seeds)

    manager = make_manager(generate_fn=generate_and_note, over_sampling_factor=2.0)
    async with manager if is_entered else contextlib.nullcontext():
        await run(make_backend(tmp_path, ppo_loss), manager, [SlowEngine()], resume=True)
    assert events[0] == "step_000002"
    assert len(owed) == 4
    assert events[1:5] == owed


async def test_the_reward_is_that_of_the_function_else_of_the_sample_else_of_its_correctness(tmp_path):
    async def rewarded(prompts, seeds):
        samples = await generate(prompts, seeds)
        for sample in samples:
            sample.reward, sample.metadata = 3.0, {"correct": True}
        return samples

    async def correct(prompts, seeds):
        return [Sample(**{**make_sample(prompt, 0).__dict__, "metadata": {"correct": True}}) for prompt in prompts]

    for number, (changes, expected) in enumerate(
        [
            ({"generate_fn": rewarded, "reward_fn": lambda sample: 7.0}, 7.0),
            ({"generate_fn": rewarded}, 3.0),
            ({"generate_fn": correct}, 1.0),
        ]
    ):
        config = RLTrainingConfig(num_steps=1)
        [line] = await run(make_backend(tmp_path / str(number), grpo_loss), make_manager(**changes), config=config)
        assert line["mean_reward"] == expected


def own_ratio_loss(logits, labels, loss_mask, old_log_probs):
    raise AssertionError("no batch is complete")


@pytest.mark.parametrize("loss", [ppo_loss, own_ratio_loss])
@pytest.mark.parametrize(
    ("forgotten", "named"), [({1, 3}, r"2 of 4 samples \(sample 1, sample 3\)"), ({0, 1, 2, 3}, "4 of 4 samples")]
)
async def test_samples_without_log_probabilities_are_named_where_the_loss_needs_them(tmp_path, loss, forgotten, named):
    calls = itertools.count()

    async def forget(prompts, seeds):
        number, [sample] = next(calls), await generate(prompts, seeds)
        if number in forgotten:
            sample.rollout_log_probs = None
        return [sample]

    remedy = f"have no rollout_log_probs for {loss.__name__}; .*use grpo_loss"
    with pytest.raises(DataError, match=f"^{named}.* {remedy}"):
        await run(make_backend(tmp_path, loss), make_manager(generate_fn=forget))


async def test_filters_judge_the_reward_that_is_trained(tmp_path):
    groups = []

    def mixed(samples):
        groups.append([sample.reward for sample in samples])
        return len(set(groups[-1])) > 1

    manager = make_manager(filter_fn=mixed, patience=50)
    metrics = await run(make_backend(tmp_path, grpo_loss), manager, config=RLTrainingConfig(num_steps=2))
    assert [line["mean_reward"] for line in metrics] == [0.5, 0.5]
    assert [1.0, 1.0] in groups or [0.0, 0.0] in groups


async def test_data_with_an_end_end_the_run(tmp_path):
    buffer = DataBuffer(PROMPTS, epochs=1)
    manager = AsyncRolloutManager(buffer, RolloutConfig(batch_size=2, generate_fn=generate))
    metrics = await run(make_backend(tmp_path, grpo_loss), manager, config=RLTrainingConfig(num_steps=9))
    assert [line["step"] for line in metrics] == [1, 2, 3]  # two, two and one prompts
    assert (tmp_path / "step_000003").is_dir()


async def test_another_buffer_than_the_managers_is_refused(tmp_path):
    with pytest.raises(ConfigTypeError, match="data_buffer is not rollout_manager's"):
        await run_rl_training(make_backend(tmp_path, grpo_loss), DataBuffer(PROMPTS), make_manager(), [], CONFIG)


async def test_an_entered_manager_stays_entered(tmp_path):
    manager = make_manager()
    async with manager:
        await run(make_backend(tmp_path, grpo_loss), manager, config=RLTrainingConfig(num_steps=1))
        assert manager.is_entered


def test_a_reward_of_exactly_zero_is_the_samples_own_also_after_it_was_saved():
    correct = {"correct": True}
    samples = [Sample("a", metadata=correct), Sample("a", metadata=correct, reward=0.0), Sample("a", reward=0.5)]
    saved = [Sample.from_dict(json.loads(json.dumps(sample.to_dict()))) for sample in samples]
    for each in (samples, [copy.deepcopy(sample) for sample in samples], saved):
        assert [compute_own_reward(sample) for sample in each] == [1.0, 0.0, 0.5]
        assert [sample.has_reward for sample in each] == [False, True, True]


def test_advantages():
    assert compute_advantages([1, 0], baseline=0.5) == [0.5, -0.5]
    auto, literal = RLTrainingConfig(num_steps=1), RLTrainingConfig(num_steps=1, advantage="baseline")
    assert advantages_of([1, 0, 3, 2], ["a", "a", "b", None], auto) == [0.5, -0.5, 3.0, 2.0]
    assert advantages_of([1, 0, 3, 2], ["a", "a", "b", None], literal) == [1.0, 0.0, 3.0, 2.0]
    assert compute_reward(Sample("a", metadata={"correct": True})) == 1.0
    assert compute_reward(Sample("a")) == 0.0


async def test_a_prepared_batch_trains_as_in_the_loop(tmp_path):
    samples = [make_sample(prompt, seed) for prompt in PROMPTS[:2] for seed in range(2)]
    for number, sample in enumerate(samples):
        sample.group_index, sample.index = number // 2, number
    rewards = [compute_reward(sample) for sample in samples]
    batch = prepare_grpo_batch(convert_to_batch(samples), rewards, CONFIG)
    longest = max(len(sample.tokens) for sample in samples)
    assert batch["old_log_probs"].shape == batch["input_ids"].shape == (4, longest)
    assert batch["advantages"].tolist() == advantages_of(rewards, [0, 0, 1, 1], CONFIG)
    metrics = await make_backend(tmp_path, ppo_loss).forward_backward(batch)
    assert metrics["ratio_mean"] > 0
