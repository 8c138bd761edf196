"""The trainer's side of a run with actors: which versions are kept and asked for, and what ends a
wait for actors."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from gathered import Gathered

from ludic.errors import LaunchError, StopRequested
from ludic.recipes.compose import compose
from ludic.runs.actors.policy_versions import PolicyVersions, list_versions, read_version
from ludic.runs.actors.trainer_side import ActorBatches
from ludic.runs.directory import RunDirectory
from ludic.runs.sampler import Sampler
from ludic.training.credit_assignment import ConstantCredit
from ludic.training.queue.base import Work
from ludic.training.queue.sqlite import SQLiteLog
from ludic.training.types import SAWBatch


class Flag:
    """A stop that is requested once `is_set`."""

    is_set = False

    def __bool__(self):
        return self.is_set


class Lost:
    """Actors of which none is left."""

    def __init__(self):
        self.lost = asyncio.get_running_loop().create_future()
        self.lost.set_result(LaunchError("every actor has failed"))


def batches_of(folder: Path, *settings: str, stop: Any = None, actors: Any = None) -> ActorBatches:
    recipe = compose(["sort", "rollout.prompts=2", "place.actors=1", "inference.batches_ahead=1", *settings])
    return ActorBatches(
        recipe, RunDirectory(folder), folder / "checkpoints", ConstantCredit(1.0), Flag() if stop is None else stop, actors
    )


def publisher_of(batches: ActorBatches, folder: Path) -> Any:
    return batches.follow(Sampler(None, PolicyVersions(folder / "policy"), "small", remote=True)).publisher


def publish(batches: ActorBatches, folder: Path, *versions: int) -> list[int]:
    """Publish these versions. Returns those that are left."""

    async def all_of_them():
        publisher = publisher_of(batches, folder)
        for version in versions:
            await publisher.publish({"x": torch.full((1,), float(version))}, version=version)

    asyncio.run(all_of_them())
    return list_versions(folder / "policy")


def save(folder: Path, step: int, state: dict[str, Any]) -> None:
    path = folder / "checkpoints" / f"step_{step:06d}"
    path.mkdir(parents=True)
    (path / "trainer_state.json").write_text(json.dumps({"step": step, "batch_source": state}))


def test_only_the_version_that_is_asked_for_is_kept(tmp_path: Path) -> None:
    assert publish(batches_of(tmp_path), tmp_path, 0, 1, 2, 3) == [3]


def test_the_versions_that_a_checkpoint_needs_are_kept(tmp_path: Path) -> None:
    batches = batches_of(tmp_path)
    assert publish(batches, tmp_path, 2, 3) == [3]
    state = {**batches.state_dict(), "versions": [[3, 3], [4, 3]]}
    save(tmp_path, 3, state)
    asyncio.run(batches.checkpoint_saved())
    assert publish(batches, tmp_path, 4, 5, 6) == [3, 6]


def test_weights_are_published_only_as_versions_that_are_asked_for(tmp_path: Path) -> None:
    batches = batches_of(tmp_path, "trainer.sync_every_steps=3")
    assert publish(batches, tmp_path, 0, 3) == [3]
    assert publish(batches, tmp_path, 4) == [3]  # of a run that is resumed at step 4
    assert batches.state_dict()["version"] == 3


def test_a_run_that_never_publishes_samples_with_its_first_weights(tmp_path: Path) -> None:
    assert publish(batches_of(tmp_path, "trainer.sync_every_steps=0"), tmp_path, 0, 7) == [0]


def test_a_resumed_run_asks_for_no_version_that_is_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    batches = batches_of(tmp_path)
    state = {**batches.state_dict(), "batch": 5, "version": 5, "versions": [[5, 4], [6, 5]]}
    batches.load_state_dict(state)
    publisher_of(batches, tmp_path)
    batches.begin(5)
    assert "policy/version_4 is gone" in caplog.text
    assert [list(pair) for pair in batches.state_dict()["versions"]] == [[5, 5], [6, 5]]


def test_a_resumed_run_keeps_versions_that_are_there_and_drops_later_ones(tmp_path: Path) -> None:
    for number in (4, 5, 6):
        PolicyVersions(tmp_path / "policy").publish({"x": torch.zeros(1)}, version=number)
    batches = batches_of(tmp_path)
    state = {**batches.state_dict(), "batch": 5, "version": 5, "versions": [[5, 4], [6, 5]]}
    save(tmp_path, 5, state)
    batches.load_state_dict(state)
    publisher_of(batches, tmp_path)
    batches.begin(5)
    assert list_versions(tmp_path / "policy") == [4, 5]
    assert publish(batches, tmp_path, 5) == [4, 5]


async def test_a_request_to_stop_ends_a_wait_for_actors_and_the_queue_can_be_resumed(tmp_path: Path) -> None:
    stop = Flag()
    batches = batches_of(tmp_path, stop=stop)
    waiting = asyncio.create_task(batches.next_batch())
    log = SQLiteLog(tmp_path / "queue.sqlite")
    async with asyncio.timeout(20):
        while not await asyncio.to_thread(log.outstanding):
            await asyncio.sleep(0.01)
    stop.is_set = True
    with pytest.raises(StopRequested):
        await asyncio.wait_for(waiting, 20)
    assert batches.state_dict()["batch"] == 0
    assert [each.work for each in log.outstanding()] == [Work(0, 0), Work(1, 0), Work(2, 0), Work(3, 0)]
    await batches.aclose()
    assert not log.is_closed()


async def test_a_stop_while_rollouts_are_written_leaves_each_line_once_after_a_resume(tmp_path: Path, monkeypatch) -> None:
    stop, writing, go_on = Flag(), threading.Event(), threading.Event()
    batches = batches_of(tmp_path, stop=stop)
    rollouts = RunDirectory(tmp_path).rollouts
    rollouts.parent.mkdir(parents=True, exist_ok=True)

    async def next_batch() -> SAWBatch:
        await asyncio.to_thread(write, "second\n")
        return SAWBatch([])

    def write(line: str) -> None:
        with rollouts.open("a") as file:
            file.write(line)
        writing.set()
        assert go_on.wait(60)

    monkeypatch.setattr(batches._source, "next_batch", next_batch)
    go_on.set()
    await batches.next_batch()
    before = batches.state_dict()
    writing.clear()
    go_on.clear()
    waiting = asyncio.create_task(batches.next_batch())
    assert await asyncio.to_thread(writing.wait, 60)
    stop.is_set = True
    with pytest.raises(StopRequested):
        await asyncio.wait_for(waiting, 60)
    state = batches.state_dict()
    go_on.set()
    assert state == before
    resumed = batches_of(tmp_path)
    resumed.load_state_dict(state)
    assert rollouts.read_text() == "second\n"
    await batches.aclose()


async def test_without_actors_a_wait_for_them_ends(tmp_path: Path) -> None:
    batches = batches_of(tmp_path, actors=Lost())
    with pytest.raises(LaunchError, match="every actor has failed"):
        await asyncio.wait_for(batches.next_batch(), 20)
    await batches.aclose()


def test_the_id_of_a_run_stays(tmp_path: Path) -> None:
    ids = {batches_of(tmp_path).state_dict()["run"] for _ in range(2)}
    assert ids == {(tmp_path / "run_id").read_text().strip()}


def test_the_weights_of_a_sharded_trainer_are_written_while_they_are_gathered(tmp_path: Path) -> None:
    model, batches = torch.nn.Linear(3, 2), batches_of(tmp_path)
    source = Gathered({name: value.detach() for name, value in model.named_parameters()})
    asyncio.run(publisher_of(batches, tmp_path).publish_stream(source, version=3))
    read = read_version(tmp_path / "policy", 3, model)
    assert source.gathered == ["weight", "bias"]
    assert all(torch.equal(read[name], value) for name, value in model.named_parameters())
