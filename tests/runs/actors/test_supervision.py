"""Actors are watched from the trainer's process, and end with it."""

import asyncio
import json
import re
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from memory_log import MemoryLog, unreachable
from scripted_place import ScriptedPlace

from ludic.errors import QueueError
from ludic.launch.process import Process
from ludic.launch.state import LaunchState, ProcessState
from ludic.recipes.compose import compose
from ludic.runs.actors import queue, supervision
from ludic.runs.actors.queue import make_run_id, open_queue
from ludic.runs.actors.supervision import ActorProcesses, WithOwnTrainer, count_placed, run_actors
from ludic.runs.stop_request import Interrupted, StopRequest
from ludic.training import ranks


@pytest.fixture
def place(monkeypatch):
    """A place without processes, where the actors of a run are started."""
    scripted = ScriptedPlace(time.monotonic)
    monkeypatch.setattr(supervision, "LocalPlace", lambda folder: scripted)
    return scripted


async def until(holds):
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.005)


async def until_both_run(place):
    await until(lambda: place.running >= {"actor0", "actor1"} and not place.news)


def launch_of(run):
    launch = json.loads((run / "launch.json").read_text())
    return launch["exit_status"], {process["name"]: process["state"] for process in launch["processes"]}


RECIPE = compose(["sort", "place.actors=2", "place.restarts=1"])
STOP = StopRequest(print)
ACTOR = Process("actor0", "actor", ("act",))


async def test_a_run_without_actors_starts_nothing(tmp_path: Path):
    async with run_actors(compose(["sort"]), tmp_path, print, STOP) as actors:
        assert actors is None
    assert not list(tmp_path.iterdir())


async def test_actors_are_counted_and_end_with_the_trainer(tmp_path: Path, place):
    async with run_actors(RECIPE, tmp_path, print, STOP) as actors:
        await until_both_run(place)
        await until(lambda: actors.measure() == {"actors/alive": 2.0, "actors/restarts": 0.0})
    assert place.stopped == []
    assert place.closed_with is not None
    assert launch_of(tmp_path) == (0, {"trainer": "ended", "actor0": "ended", "actor1": "ended"})


async def test_an_actor_that_fails_is_restarted_and_counted_once(tmp_path: Path, place):
    notes = []
    async with run_actors(RECIPE, tmp_path, notes.append, STOP):
        await until_both_run(place)
        place.end("actor0", code=7)
        await until(lambda: len(place.starts) == 3 and not place.news)
    assert re.search(r"actor0 .*status 7 after 1\.0 s; restarted", notes[0])


def test_a_restart_is_counted_in_one_measurement():
    async def measure():
        inner = ScriptedPlace(time.monotonic)
        place = WithOwnTrainer(inner)
        actors = ActorProcesses(lambda: (len(place.alive), max(0, place.starts - 1)))
        inner.start(ACTOR)
        place.poll()
        counts = [actors.measure()]
        inner.end("actor0", code=1)
        place.poll()
        counts.append(actors.measure())
        inner.start(ACTOR)
        place.poll()
        return [*counts, actors.measure(), actors.measure()]

    found = [(counts["actors/alive"], counts["actors/restarts"]) for counts in asyncio.run(measure())]
    assert found == [(1.0, 0.0), (0.0, 0.0), (1.0, 1.0), (1.0, 0.0)]


def test_placed_actors_are_counted_only_while_a_launcher_watches_them(tmp_path: Path):
    now = [1000.0]

    async def measure(*launches):
        actors = ActorProcesses(lambda: count_placed(tmp_path, now=lambda: now[0]))
        found = []
        for launch in launches:
            launch.write(tmp_path)
            found.append(actors.measure())
        return found

    def launch(*restarts, beat=1000.0, exit_status=None):
        actors = [ProcessState(f"actor{number}", "actor", "running", restarts=count) for number, count in enumerate(restarts)]
        return LaunchState(1, "host", "ray", 0.0, beat, exit_status, [ProcessState("trainer", "trainer", "running"), *actors])

    assert count_placed(tmp_path) is None  # Slurm and Kubernetes write no launch.json
    found = asyncio.run(measure(launch(2, 0), launch(2, 1), launch(2, 1, exit_status=0), launch(2, 1, beat=969.0), launch(2, 3)))
    assert found == [
        {"actors/alive": 2.0, "actors/restarts": 0.0},
        {"actors/alive": 2.0, "actors/restarts": 1.0},
        {},
        {},
        {"actors/alive": 2.0, "actors/restarts": 2.0},
    ]


async def test_without_any_actor_left_the_trainer_learns_it(tmp_path: Path, place):
    async with run_actors(RECIPE, tmp_path, lambda text: None, STOP) as actors:
        await until_both_run(place)
        place.end("actor0", code=78)
        place.end("actor1", code=78)
        error = await asyncio.wait_for(actors.lost, timeout=20)
    assert "every actor has failed" in str(error)
    assert place.closed_with is not None


async def test_servers_are_started_without_actors_and_are_not_counted_as_such(tmp_path: Path, place):
    recipe = compose(["sort", "servers=2"])
    async with run_actors(recipe, tmp_path, lambda text: None, STOP) as processes:
        await until(lambda: place.running >= {"server0", "server1"} and not place.news)
        assert processes.measure() == {"actors/alive": 0.0, "actors/restarts": 0.0}
        assert processes.why_lost() is None
        place.end("server0", code=78)
        place.end("server1", code=78)
        await until(lambda: processes.why_lost() is not None)
    assert re.search("every server .*than place.restarts allows", processes.why_lost())


async def test_gpus_of_the_trainer_are_not_lent(tmp_path: Path, monkeypatch):
    lent = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4,5")
    scripted = ScriptedPlace(time.monotonic)
    monkeypatch.setattr(supervision, "LocalPlace", lambda folder, gpus: lent.extend(gpus) or scripted)
    async with run_actors(compose(["sort", "servers=1", "place.trainer_gpus=1"]), tmp_path, print, STOP):
        await until(lambda: "server0" in scripted.running)
    assert lent == ["4", "5"]


async def test_a_trainer_that_fails_leaves_no_actor(tmp_path: Path, place):
    async def train():
        async with run_actors(RECIPE, tmp_path, print, STOP):
            await until_both_run(place)
            raise RuntimeError("of the trainer")

    with pytest.raises(RuntimeError, match="of the trainer"):
        await train()
    assert not place.running


def queue_of_a_run_that_was_done(recipe, folder):
    """Its run is resumed, and its actors look before the trainer claims it."""
    run = make_run_id(folder)
    log = open_queue(recipe.queue, folder)
    log.claim("before", run=run)
    log.close("before")
    assert log.is_closed()
    return log


async def test_the_queue_of_a_run_that_was_done_is_open_before_an_actor_starts(tmp_path: Path, place):
    log, found = queue_of_a_run_that_was_done(RECIPE, tmp_path), []
    start = place.start
    place.start = lambda process: (found.append(log.is_closed()), start(process))
    async with run_actors(RECIPE, tmp_path, print, STOP):
        await until_both_run(place)
    assert found == [False, False]
    log.claim("trainer", run=make_run_id(tmp_path))  # a claim of the same run is replaced
    log.disconnect()


async def test_the_queue_is_open_for_actors_that_are_started_by_hand(tmp_path: Path):
    recipe = compose(["sort", "queue.url=queue.sqlite"])
    log = queue_of_a_run_that_was_done(recipe, tmp_path)
    async with run_actors(recipe, tmp_path, print, STOP) as actors:
        assert actors is None
        assert not log.is_closed()
    log.disconnect()


async def test_a_queue_that_cannot_be_reached_is_tried_again_until_a_stop_or_the_patience(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(queue, "open_queue", lambda section, folder: MemoryLog(time.monotonic, fail=unreachable))
    recipe, stop = compose(["sort", "place.actors=1", "queue.patience_s=0.05"]), StopRequest(print)
    with pytest.raises(QueueError, match="gave up after"):
        await queue.reopen_queue(recipe.queue, tmp_path, stop)
    recipe.queue.patience_s = 300.0
    stop.signum = 15
    with pytest.raises(Interrupted):
        await queue.reopen_queue(recipe.queue, tmp_path, stop)


@pytest.mark.parametrize("is_stopped", [True, False])
async def test_all_ranks_learn_of_a_stop_while_rank_0_opens_the_queue(tmp_path: Path, monkeypatch, is_stopped):
    told: list[bool] = []

    @contextmanager
    def rank_0_alone(doing: str):
        values: list[bool] = []
        yield values
        told.extend(values)
        values[:] = told

    recipe, stop = compose(["sort", "place.actors=1"]), StopRequest(print)
    stop.signum = 15 if is_stopped else None
    monkeypatch.setattr(ranks, "rank_0_alone", rank_0_alone)
    log = MemoryLog(time.monotonic, fail=unreachable) if is_stopped else MemoryLog(time.monotonic)
    monkeypatch.setattr(queue, "open_queue", lambda section, folder: log)
    for rank in (0, 1):
        monkeypatch.setattr(ranks, "rank", lambda: rank)  # noqa: B023
        with pytest.raises(Interrupted) if is_stopped else nullcontext():
            await queue.reopen_queue(recipe.queue, tmp_path, stop)
    assert told == [not is_stopped]
