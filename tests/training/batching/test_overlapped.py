"""Batches generated while the previous one trains: how stale they are, what an error or a kill
leaves, and that no prompt is lost or repeated."""

import asyncio
import json
import random
import re

import pytest
from hypothesis import given, strategies as st
from training_samples import assert_same_tensors, cpu_config, tiny_model

from ludic.distributed.publisher import LocalPublisher
from ludic.errors import ConfigError
from ludic.inference import InferenceSpec, LocalChatClient, ReturnSpec, SamplingParams
from ludic.models.byte_tokenizer import make_byte_tokenizer
from ludic.runs.rollouts import make_engine, make_request
from ludic.tasks import DigitSort
from ludic.training import CheckpointConfig, RequestsExhausted, SAWBatch, Trainer, make_grpo
from ludic.training.batching.overlapped import GENERATION_S, OverlappedSource
from ludic.training.batching.source import RolloutBatchSource
from ludic.training.rollouts.requests import GRPORequestStrategy, SequenceRequests


class Prompts:
    """Batch k has the prompts 2k and 2k + 1. Generation takes a few iterations of the event loop.
    Positions in `failing` fail the first time."""

    def __init__(self, total=None, failing=(), turns=3):
        self.position, self.total, self.failing, self.turns = 0, total, set(failing), turns
        self.begun, self.running, self.cancelled = [], 0, 0

    async def next_batch(self):
        if self.total is not None and self.position >= self.total:
            raise RequestsExhausted("no prompts left")
        prompts = [self.position, self.position + 1]
        self.position += 2
        self.begun.append(prompts[0])
        self.running += 1
        assert self.running == 1  # one call at a time
        try:
            for _ in range(self.turns):
                await asyncio.sleep(0)
            if prompts[0] in self.failing:
                self.failing.discard(prompts[0])
                raise OSError("the server went away")
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        return SAWBatch([], {"prompts": prompts})

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("max_lag", [0, 1, 2, 3])
async def test_max_lag_batches_are_generated_in_advance(max_lag):
    inner = Prompts()
    source = OverlappedSource(inner, max_lag=max_lag)
    for number in range(4):
        batch = await source.next_batch()
        assert batch.meta["prompts"] == [2 * number, 2 * number + 1]
        assert batch.meta[GENERATION_S] > 0
        await settle()
        assert len(inner.begun) == number + 1 + max_lag
        state = source.state_dict()
        assert state["position"] == 2 * (number + 1)
        assert state.get("states_after_pending", []) == [{"position": 2 * (number + 2 + ahead)} for ahead in range(max_lag)]
    await source.aclose()
    assert source.state_dict()["position"] == 8
    assert (await source.next_batch()).meta["prompts"] == [8, 9]
    await source.aclose()


async def test_no_more_batches_are_generated_than_the_run_needs():
    inner = Prompts()
    source = OverlappedSource(inner, max_lag=2, num_batches=3)
    for _ in range(3):
        await source.next_batch()
    await settle()
    assert inner.begun == [0, 2, 4]
    assert (await source.next_batch()).meta["prompts"] == [6, 7]  # a batch without trainable samples does not count
    await settle()
    assert inner.begun == [0, 2, 4, 6]


async def test_an_error_is_raised_in_place_of_its_batch_which_is_then_generated_again():
    inner = Prompts(failing=[2])
    source = OverlappedSource(inner, max_lag=2)
    assert (await source.next_batch()).meta["prompts"] == [0, 1]
    await settle()
    with pytest.raises(OSError, match="went away"):
        await source.next_batch()
    assert source.state_dict() == {"position": 2}
    assert [(await source.next_batch()).meta["prompts"][0] for _ in range(3)] == [2, 4, 6]
    await source.aclose()


async def test_the_end_of_the_requests_is_raised_after_the_last_batch():
    source = OverlappedSource(Prompts(total=4), max_lag=3)
    assert [(await source.next_batch()).meta["prompts"][0] for _ in range(2)] == [0, 2]
    with pytest.raises(RequestsExhausted):
        await source.next_batch()


async def test_cancelling_next_batch_cancels_the_generation():
    inner = Prompts(turns=10_000)
    source = OverlappedSource(inner, max_lag=1)
    waiting = asyncio.create_task(source.next_batch())
    await settle()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (inner.running, inner.cancelled) == (0, 1)
    assert source.state_dict() == {"position": 0}


async def test_a_state_cannot_be_loaded_while_batches_are_being_generated():
    source = OverlappedSource(Prompts(), max_lag=1)
    await source.next_batch()
    with pytest.raises(ConfigError, match="aclose"):
        source.load_state_dict({"position": 0})
    await source.aclose()
    source.load_state_dict({"position": 6})
    assert (await source.next_batch()).meta["prompts"] == [6, 7]
    await source.aclose()


def test_a_negative_lag_is_refused():
    with pytest.raises(ConfigError, match="max_lag"):
        OverlappedSource(Prompts(), max_lag=-1)


@given(
    max_lag=st.integers(0, 3),
    every=st.integers(1, 3),
    kills=st.lists(
        st.tuples(st.integers(0, 6), st.sampled_from(["fetching", "training", "saved"]), st.integers(0, 12)), max_size=4
    ),
    failing=st.sets(st.integers(0, 9).map(lambda k: 2 * k), max_size=3),
)
def test_a_run_killed_anywhere_and_resumed_trains_every_prompt_exactly_once(max_lag, every, kills, failing):
    """A run of 10 batches with checkpoints. A kill discards everything after the last checkpoint,
    including training."""
    total, saved, remaining_kills = 20, (0, [], {"position": 0}), list(kills)

    async def run_until_killed(inner, kill):
        nonlocal saved
        step, trained, state = saved[0], list(saved[1]), saved[2]
        source = OverlappedSource(inner, max_lag=max_lag, num_batches=total // 2 - step)
        source.load_state_dict(state)
        try:
            while step < total // 2:
                at = kill is not None and step - saved[0] >= kill[0] and kill
                if at and at[1] == "fetching":
                    fetching = asyncio.create_task(source.next_batch())
                    for _ in range(at[2]):
                        await asyncio.sleep(0)
                    fetching.cancel()
                    return False
                try:
                    batch = await source.next_batch()
                except OSError:
                    continue
                for _ in range(at[2] if at else 2):
                    await asyncio.sleep(0)
                if at and at[1] == "training":
                    return False
                trained += batch.meta["prompts"]
                step += 1
                if step % every == 0:
                    saved = (step, list(trained), source.state_dict())
                if at:
                    return False
            saved = (step, trained, source.state_dict())
            return True
        finally:
            for entry in source._pending:  # the process is gone, so nothing is returned to the source
                if entry.task is not None:
                    entry.task.cancel()
            await settle()

    while not asyncio.run(run_until_killed(Prompts(total, failing), remaining_kills.pop(0) if remaining_kills else None)):
        failing = set()
    assert saved[1] == list(range(total))


TASK = DigitSort(digits=3)
PROBLEMS = [TASK.draw(random.Random(seed)) | {"id": str(seed)} for seed in range(24)]


def rollouts(client):
    inference = InferenceSpec(sampling=SamplingParams(temperature=1.0, max_tokens=5), return_=ReturnSpec.for_rl())
    requests = SequenceRequests(
        PROBLEMS,
        batch_size=2,
        build=lambda row: make_request(row[1], inference=inference, seed=row[0]),
        strategy=GRPORequestStrategy(2),
        shuffle=True,
        rng_seed=1,
    )
    engine = make_engine(TASK, client, model_name="tiny", system_prompt=None)
    return RolloutBatchSource(engine=engine, requests_fn=requests, credit_assigner=make_grpo(group_size=2).credit_assigner)


class PromptRecorder:
    """Records the prompts of every batch that is trained."""

    def __init__(self):
        self.problems = []


def make_trainer(folder, seen, *, max_lag, seed=0, **options):
    model = tiny_model(seed)
    client = LocalChatClient(model, make_byte_tokenizer(), copy_model=True)
    source = OverlappedSource(rollouts(client), max_lag=max_lag)
    algo = make_grpo(group_size=2)
    inner = algo.preprocess

    def record_prompts(batch):
        seen.problems.append(sorted({item.meta["problem_id"] for item in batch.items}))
        return inner(batch)

    algo.preprocess = record_prompts
    return Trainer(
        model=model,
        algo=algo,
        batch_source=source,
        publisher=LocalPublisher(client),
        cfg=cpu_config(),
        checkpoint_config=CheckpointConfig(folder, every_n_steps=2, max_to_keep=9),
        **options,
    )


@pytest.mark.parametrize("max_lag", [1, 2])
async def test_samples_are_at_most_max_lag_versions_old(tmp_path, max_lag):
    trainer = make_trainer(tmp_path, PromptRecorder(), max_lag=max_lag)
    lags = []
    await trainer.train(6, log_fn=lambda stats: lags.append(stats["train/policy_lag"]))
    await trainer.batch_source.aclose()
    assert lags[0] == 0
    assert max(lags) <= max_lag
    assert max(lags) > 0  # batches do overlap; by how much depends on which side is slower


@pytest.mark.parametrize("killed_after", [1, 2, 3, 4, 5])
async def test_a_trainer_that_is_killed_and_resumed_trains_every_prompt_once(tmp_path, killed_after):
    seen = PromptRecorder()
    trainer = make_trainer(tmp_path, seen, max_lag=1)
    await trainer.train(killed_after)
    await trainer.batch_source.next_batch()  # fetched, then lost with the process
    saved = killed_after - killed_after % 2
    rest = PromptRecorder()
    resumed = make_trainer(tmp_path, rest, max_lag=1, seed=9, **({"resume_from": saved} if saved else {}))
    await resumed.train(12 - saved)
    trained = [problem for batch in seen.problems[:saved] + rest.problems for problem in batch]
    assert sorted(trained) == sorted(problem["id"] for problem in PROBLEMS)
    for source in (trainer.batch_source, resumed.batch_source):
        await source.aclose()


async def test_the_trainer_computes_in_a_thread_only_when_batches_overlap(tmp_path):
    import threading

    for max_lag in (0, 1):
        trainer = make_trainer(tmp_path / str(max_lag), PromptRecorder(), max_lag=max_lag)
        threads = set()
        step = trainer.backend.optim_step
        trainer.backend.optim_step = lambda step=step, threads=threads, **kw: (
            threads.add(threading.current_thread()),
            step(**kw),
        )[1]
        await trainer.train(2)
        assert (threads == {threading.main_thread()}) == (max_lag == 0)
        await trainer.batch_source.aclose()


def test_a_source_lag_above_the_trainers_max_lag_is_refused(tmp_path):
    source = OverlappedSource(Prompts(), max_lag=2)
    options = {"model": tiny_model(), "algo": make_grpo(group_size=4), "batch_source": source}
    with pytest.raises(ConfigError, match="must be >= 2 at"):
        Trainer(cfg=cpu_config(max_lag=1), **options)
    Trainer(cfg=cpu_config(max_lag=2), **options)


async def test_overlapping_changes_when_batches_are_made_but_not_their_content(tmp_path):
    """With a learning rate of 0 all versions are equal, so the batches equal those of a run without
    overlap."""
    rewards_of_runs = []
    for max_lag in (0, 2):
        trainer = make_trainer(tmp_path / str(max_lag), PromptRecorder(), max_lag=max_lag)
        trainer.backend.optimizer.param_groups[0]["initial_lr"] = 0.0
        random.seed(3)
        losses = []
        await trainer.train(5, log_fn=lambda stats, losses=losses: losses.append(stats["train/avg_total_reward"]))
        await trainer.batch_source.aclose()
        rewards_of_runs.append(losses)
    assert rewards_of_runs[0] == rewards_of_runs[1]


async def trained_weights(folder, steps, **options):
    trainer = make_trainer(folder, PromptRecorder(), max_lag=1, **options)
    await trainer.train(steps - trainer.current_step)
    await trainer.batch_source.aclose()
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


@pytest.mark.parametrize("killed_after", [2, 3, 4, 5])
async def test_a_run_with_a_batch_in_flight_that_is_killed_and_resumed_has_the_same_weights(tmp_path, killed_after):
    whole = await trained_weights(tmp_path / "whole", 7)
    await trained_weights(tmp_path / "killed", killed_after)
    saved = killed_after - killed_after % 2
    resumed = await trained_weights(tmp_path / "killed", 7, seed=9, resume_from=saved)
    assert_same_tensors(resumed, whole)


async def test_a_state_holds_the_generated_batches_and_not_those_that_are_not_finished():
    source = OverlappedSource(Prompts(total=None, turns=3), max_lag=3)
    await source.next_batch()
    while source._pending[0].batch is None:
        await asyncio.sleep(0)
    state = source.state_dict()
    assert {key: state[key] for key in ("position", "states_after_pending")} == {
        "position": 2,
        "states_after_pending": [{"position": 4}],
    }
    resumed = OverlappedSource(Prompts(), max_lag=3)
    resumed.load_state_dict(json.loads(json.dumps(state)))
    assert resumed.state_dict() == state
    assert [(await resumed.next_batch()).meta["prompts"] for _ in range(3)] == [[2, 3], [4, 5], [6, 7]]
    for each in (source, resumed):
        await each.aclose()


async def test_waiting_for_pending_batches_has_a_deadline_and_leaves_them_running(caplog):
    source = OverlappedSource(Prompts(turns=10**6), max_lag=1)
    source._start_next()
    await source.finish_pending(0.01)
    assert re.search(r"within 0\.01 s; .*checkpoint is saved without it", caplog.text)
    assert not source._pending[0].task.done()
    await source.aclose()


async def test_generated_batches_stay_when_generation_is_stopped_and_a_state_can_be_loaded_again():
    source = OverlappedSource(Prompts(), max_lag=2)
    await source.next_batch()
    await source.finish_pending()
    state = source.state_dict()
    source._start_next()
    await asyncio.sleep(0)
    await source.aclose()
    assert source.state_dict() == state
    for _ in range(2):
        source.load_state_dict(state)
    assert [(await source.next_batch()).meta["prompts"] for _ in range(3)] == [[2, 3], [4, 5], [6, 7]]
    await source.aclose()


async def test_a_smaller_lag_takes_no_more_stored_batches_than_it_may_train():
    source = OverlappedSource(Prompts(), max_lag=2)
    await source.next_batch()
    await source.finish_pending()
    resumed = OverlappedSource(Prompts(), max_lag=1)
    resumed.load_state_dict(source.state_dict())
    assert resumed.state_dict()["states_after_pending"] == [{"position": 4}]
    assert [(await resumed.next_batch()).meta["prompts"] for _ in range(2)] == [[2, 3], [4, 5]]
    for each in (source, resumed):
        await each.aclose()


async def test_a_batch_that_json_has_no_form_for_is_generated_again_and_a_warning_says_so(caplog):
    class Objects(Prompts):
        async def next_batch(self):
            batch = await super().next_batch()
            batch.meta["seen_at"] = object()
            return batch

    source = OverlappedSource(Objects(), max_lag=1)
    await source.next_batch()
    await source.finish_pending()
    assert source.state_dict() == {"position": 2}
    assert re.search("meta .*seen_at is a object, .*stored", caplog.text)
    await source.aclose()
