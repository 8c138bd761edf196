"""Batches of rank 0 on all ranks: runs on two ranks equal the run on one, and resume on one and on
four."""

import asyncio
import re

import pytest
from rank_processes import on_ranks
from safetensors.torch import load_file
from shared_runs import TRAINERS, PromptSource
from torch.distributed import HashStore
from training_samples import assert_same_tensors, cpu_config, sorting_items, tiny_model

from ludic.errors import CheckpointError, ConfigError, StopRequested
from ludic.training import SharedBatches, Trainer, make_sft, ranks
from ludic.training.batching import shared_batches
from ludic.training.batching.epochs import ItemBatchSource
from ludic.training.batching.overlapped import OverlappedSource
from ludic.training.batching.source import BatchSourceBase, as_batch_source
from ludic.training.ranks.rendezvous import Rendezvous
from ludic.training.types import SAWBatch

OWN_OF_RANK_0 = ("perf/", "ranks/", "train/grad_norm")
"""Statistics that another split changes: seconds, computed tokens, the last digits of the norm."""


def as_is(source):
    return source


def assert_same_run(shared, trainer, losses, folder, step):
    """`shared`: the run of one of the ranks; `trainer`: that of one process."""
    assert shared["losses"] == pytest.approx(losses, abs=1e-6, rel=1e-5)
    weights = load_file(folder / f"step_{step:06d}" / "model.safetensors")
    alone = {name: weight for name, weight in trainer.model.state_dict().items() if name in weights}
    assert_same_tensors(weights, alone, atol=1e-6)


@pytest.mark.integration
def test_runs_on_two_ranks_are_those_of_one_process_and_resume_on_one_and_four(tmp_path):
    everyone = on_ranks(2, "ranks_shared.py", tmp_path, "2", "no")
    for name, make in TRAINERS.items():
        trainer = make(tmp_path / "alone" / name, as_is)
        stats = [trainer.train_step_sync() for _ in range(10)]
        losses = [each["train/loss"] for each in stats]
        for rank in everyone:
            assert_same_run(rank["runs"][name], trainer, losses, tmp_path / name, 10)
        [first, second] = [rank["runs"][name] for rank in everyone]
        assert {key for key in first["stats"] if not key.startswith("ranks/")} == stats[-1].keys()
        for key, value in stats[-1].items():
            if not key.startswith(OWN_OF_RANK_0):
                assert first["stats"][key] == pytest.approx(value, rel=1e-4, abs=1e-5), key
        assert first["stats"]["perf/real_tokens"] == stats[-1]["perf/real_tokens"]
        assert 0 < first["stats"]["ranks/lockstep"] <= 1
        assert first["state"] == trainer.source.state_dict()
        assert second["state"] is None

        resumed = make(tmp_path / name, as_is, resume_from=5)
        again = [resumed.train_step_sync()["train/loss"] for _ in range(5)]
        assert again == pytest.approx(losses[5:], abs=1e-6, rel=1e-5)
        if isinstance(resumed.batch_source, PromptSource):
            assert resumed.batch_source.given == [6, 7, 8, 9, 10]

    (tmp_path / "four").mkdir()
    four = on_ranks(4, "ranks_shared.py", tmp_path / "four", "4", str(tmp_path))
    for name in TRAINERS:
        assert four[0]["runs"][name]["losses"] == pytest.approx(everyone[0]["runs"][name]["losses"][5:], abs=1e-6, rel=1e-5)
        assert four[0]["runs"][name]["state"] == everyone[0]["runs"][name]["state"]
    assert [rank["runs"]["policy"]["given"] for rank in four] == [[6, 7, 8, 9, 10], [], [], []]
    check_errors(everyone)


def check_errors(everyone):
    """What each of two ranks saw where something failed."""
    [first, second] = everyone
    assert first["members"] == second["members"] == [True, 3, 2]  # those of rank 0's source
    assert [kind for kind, *_ in second["errors"]] == [
        *("RequestsExhausted", "StopRequested", "StopAsyncIteration", "DataError", "OSError", "RankError")
    ]
    assert [text for _, text in second["errors"][:5]] == [text for _, text in first["errors"][:5]]
    error, samples = second["patience"]
    assert error[0] == "RankError"
    assert re.search(r"rank 0 \(batch 0\), .*patience_s \(0\.2 s\)", error[1])
    assert (samples, first["patience"][1]) == (2, 2)
    assert first["stop"] == second["stop"] == [9, ["StopRequested", "the run was asked to stop"]]
    assert re.search("is at finished and rank 0 at batch", second["disorder"][1])
    [[impure, failing], [other_impure, other_failing]] = first["impure"], second["impure"]
    assert impure == other_impure
    assert impure[0] == "RankError"
    assert "must not depend on the rank" in impure[1]
    assert failing[0] == "RankError"
    assert re.search("preparing a batch .*rank 1 of 2", failing[1])
    assert other_failing == ["DataError", "no such key"]


def test_on_one_rank_it_is_the_inner_source():
    inner = PromptSource()
    source = SharedBatches(inner)
    batch = asyncio.run(source.next_batch())
    assert isinstance(batch.items[0].input_ids, list)  # nothing was encoded
    assert source.state_dict() == {"position": 1}
    source.load_state_dict({"position": 4})
    assert inner.position == 4
    asyncio.run(source.finish_pending())
    asyncio.run(source.checkpoint_saved())
    assert inner.saved == 1
    asyncio.run(source.aclose())
    trainer = Trainer(model=tiny_model(), algo=make_sft(), batch_source=source, cfg=cpu_config())
    assert trainer._ingest(batch.items).share is None


def test_rank_0_needs_a_source_and_a_positive_patience():
    with pytest.raises(ConfigError, match=r"rank 0 .*all ranks, .*has none"):
        SharedBatches(None)
    with pytest.raises(ConfigError, match=r"patience_s \(0\)"):
        SharedBatches(PromptSource(), patience_s=0)


class SlowSource(BatchSourceBase):
    """Generates until it is released, or cancelled."""

    def __init__(self):
        self.released, self.cancelled, self.begun = asyncio.Event(), False, asyncio.Event()

    async def next_batch(self):
        self.begun.set()
        try:
            await self.released.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return SAWBatch(sorting_items(3), {})


async def test_ranks_wait_for_a_batch_in_progress_but_not_for_long_after_a_stop(monkeypatch):
    monkeypatch.setattr(shared_batches, "STOP_TICK_S", 0.01)
    monkeypatch.setattr(shared_batches, "group_device", lambda: "cpu")
    monkeypatch.setattr(shared_batches, "broadcast_bytes", lambda content, size, device: memoryview(content))

    def make(**options):
        meeting = Rendezvous(HashStore(), 0, 2)
        monkeypatch.setattr(ranks, "current_rendezvous", lambda: meeting)
        return SharedBatches(SlowSource(), **options), meeting

    shared, meeting = make(stop=lambda: False, stop_patience_s=0.05)
    waiting = asyncio.ensure_future(shared.next_batch())
    await shared._inner.begun.wait()
    meeting.request_stop(15)
    with pytest.raises(StopRequested, match=r"batch .*not generated within 0.05 s"):
        await waiting
    assert shared._inner.cancelled
    with pytest.raises(StopRequested, match=r"the run was asked to stop$"):
        await shared.next_batch()

    for options in ({"stop_patience_s": 600.0}, {}):  # a batch that comes in time is not lost
        shared, meeting = make(stop=lambda: False, **options)
        waiting = asyncio.ensure_future(shared.next_batch())
        await shared._inner.begun.wait()
        meeting.request_stop(15)
        await asyncio.sleep(0.1)
        shared._inner.released.set()
        assert len((await waiting).items) == 3
        assert not shared._inner.cancelled


def test_a_source_that_divides_its_samples_returns_all_of_them(monkeypatch):
    alone = ItemBatchSource(sorting_items(7), batch_size=3, seed=1)
    with monkeypatch.context() as two:
        two.setattr(ranks, "world_size", lambda: 2)
        source = ItemBatchSource(sorting_items(7), batch_size=3, seed=1)
    assert source.num_batches_per_epoch == 2  # of 4 samples
    shared = SharedBatches(OverlappedSource(source, max_lag=0))
    assert source.shards_across_ranks is False
    assert source.num_batches_per_epoch == 3
    for _ in range(7):
        [here, there] = [asyncio.run(each.next_batch()).items for each in (alone, shared)]
        assert [item.meta["rollout_id"] for item in here] == [item.meta["rollout_id"] for item in there]
    assert shared.state_dict() == alone.state_dict()


def test_a_source_of_each_rank_that_cannot_return_all_samples_is_refused():
    class OfEachRank:
        shards_across_ranks = True

        async def next_batch(self):
            return SAWBatch([])

    with pytest.raises(ConfigError, match=r"sets shards_across_ranks; .* without SharedBatches"):
        SharedBatches(OfEachRank())
    assert as_batch_source(PromptSource()).divided_by_trainer is False


class Shared(BatchSourceBase):
    """The part of SharedBatches that a checkpoint reads."""

    divided_by_trainer = True

    def __init__(self, position=0):
        self.position = position

    def state_dict(self):
        return {"position": self.position, "pending_batches": "a"}

    def load_state_dict(self, state):
        self.position = state["position"]
        self.pending = state.get("pending_batches")


def states_of(saved, source, world, monkeypatch, rank=0):
    """What `source` loads of the entries `saved` on one of `world` ranks."""
    trainer = Trainer(model=tiny_model(), algo=make_sft(), batch_source=PromptSource(), cfg=cpu_config())
    trainer.batch_source = source
    metadata = {**trainer._run_state(), **saved}
    with monkeypatch.context() as patched:
        patched.setattr(ranks, "world_size", lambda: world)
        patched.setattr(ranks, "rank", lambda: rank)
        trainer._restore_run(metadata)
    return source.position


def test_a_shared_position_is_that_of_the_checkpoint_whatever_the_number_of_ranks(monkeypatch):
    shared = {"batch_source": {"position": 5, "pending_batches": "b"}, "ranks": [{}, {}]}
    for world in (1, 2, 4):
        source = Shared()
        assert states_of(shared, source, world, monkeypatch) == 5
        assert source.pending == "b"
    alone = {"batch_source": {"position": 6}}
    assert states_of(alone, Shared(), 4, monkeypatch) == 6


def test_positions_of_each_rank_are_not_taken_for_a_shared_one(monkeypatch):
    differing = {"ranks": [{"batch_source": {"position": 2}}, {"batch_source": {"position": 7}}]}
    for world in (1, 2, 3):
        with pytest.raises(CheckpointError, match=r"resume on 2 ranks, .*data positions differ"):
            states_of(differing, Shared(), world, monkeypatch)
    equal = {"ranks": [{"batch_source": {"position": 2}}] * 2}
    assert states_of(equal, Shared(), 2, monkeypatch) == 2
    assert states_of(differing, PromptSource(), 2, monkeypatch, rank=1) == 7
