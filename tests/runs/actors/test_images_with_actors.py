"""Runs with images and actors: the same as in one process, over a file and over a server."""

import json
import shutil
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from commands import metrics_of, refused, same_weights
from forked_run import Forked, wait_until_exists
from graded_shapes import SETTINGS
from image_spans import draw_picture

from ludic.images.store import ImageStore, use_store
from ludic.models.images.processor import ImageProcessor
from ludic.recipes.compose import compose
from ludic.runs.actors.queue import open_queue
from ludic.training.queue import entries
from ludic.types import ImageSpan, Rollout, Step, TokenTrace

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("images with actors")]  # they share a run


def settings(folder: Path, *more: str) -> list[str]:
    return ["train", *SETTINGS, "trainer.lr=3e-3", f"output={folder}", "name=run", *more]


def samples_of(run: Path) -> list[Any]:
    """What was played, without names and times."""
    lines = (json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines())
    return [
        (line["meta"]["problem_id"], line["total_reward"], step["prev_obs"], step["action"], step["trace"])
        for line in lines
        for step in line["steps"]
    ]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in one process."""
    folder = tmp_path_factory.mktemp("alone")
    with Forked(*settings(folder)) as trainer:
        assert trainer.end() == 0
    assert all(line["train/grad_norm"] > 0 for line in metrics_of(folder / "run") if line["phase"] == "reinforce")
    return folder / "run"


@pytest.mark.parametrize("queue", ["sqlite", "redis"])
def test_a_run_with_actors_is_the_run_in_one_process_although_an_image_is_damaged_on_its_way(
    alone: Path, tmp_path: Path, queue: str, request: pytest.FixtureRequest
) -> None:
    url = "queue.sqlite" if queue == "sqlite" else request.getfixturevalue("redis_server").url
    run = tmp_path / "run"
    with ExitStack() as running:
        trainer = running.enter_context(Forked(*settings(tmp_path, f"queue.url={url}", "queue.prompts_per_entry=2")))
        wait_until_exists(run / "run_id")
        log = open_queue(compose([str(run / "config.yaml")]).queue, run)
        running.callback(log.disconnect)
        digest = deliver_a_damaged_image(log)
        actor = running.enter_context(Forked("worker", "actor", run))
        assert trainer.end() == 0
        assert actor.end() == 0
        [aside] = log.aside()
    assert f"image '{digest}' of the entry is damaged" in aside.reason
    assert samples_of(run) == samples_of(alone)
    assert same_weights(run, alone)
    stored = {path.name: path.read_bytes() for path in (run / "images").glob("*/*")}
    assert stored == {path.name: path.read_bytes() for path in (alone / "images").glob("*/*")}


def deliver_a_damaged_image(log: Any) -> str:
    """Deliver the first entry with one flipped byte in its image. Returns the image's digest."""
    while (lease := log.lease("damaging")) is None:
        time.sleep(0.005)
    with use_store(ImageStore()) as sender:
        digest = sender.add(draw_picture(0))
        trace = TokenTrace([1, 9, 9], [2, 3], [-0.5, -0.25], images=(ImageSpan(digest, 1, 2),))
        steps = [Step(0, "?", "3r", None, 0.5, False, True, {}, trace, ts_ns=1)]
        meta = {"request_meta": {"group_id": "g"}, "policy_version": lease.work.version}
        payload = entries.encode_group(entries.Group.of_lease(lease, [Rollout(f"r{n}", steps, meta) for n in range(8)], 0.1))
    content = entries._DECODER.decode(payload[22:])
    image = bytearray(content.images[digest])
    image[len(image) // 2] ^= 1
    content.images[digest] = bytes(image)
    assert log.deliver(lease, entries.seal(entries.GROUP, content, entries.EntryLimits()))
    return digest


def test_an_actor_with_another_processor_is_refused(alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(alone, run := tmp_path / "run")
    config = (run / "config.yaml").read_text()
    queue = config.index("\nqueue:")
    (run / "config.yaml").write_text(config[:queue] + config[queue:].replace("url: null", "url: queue.sqlite", 1))
    began = json.loads((run / "progress.json").read_text())["images"]["processor"]
    monkeypatch.setattr(ImageProcessor, "fingerprint", "another")  # as with another version of a library
    assert f"began with the processor {began}, and its model has another" in refused("worker", "actor", str(run))
