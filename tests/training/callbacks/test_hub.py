"""Checkpoints are pushed to a hub, without holding up the run and without failing it."""

import asyncio
import inspect
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from training_samples import ListSource, cpu_config, sorting_items, tiny_model

from ludic.errors import ConfigError, StopRequested
from ludic.training import CheckpointConfig, PushToHub, Trainer, make_sft
from ludic.training.callbacks import hub as hub_module
from ludic.training.callbacks.hub import OF_THE_RUN

WAIT_S = 60.0


class StubHub:
    """The interface of `huggingface_hub.HfApi`. `gate`: a push waits until it is set."""

    def __init__(self, *, fails=(), gate=None):
        self.calls, self.fails, self.gate, self.started = [], set(fails), gate, threading.Event()

    def create_repo(self, repo_id, *, private, exist_ok):
        self.calls.append(("create", repo_id, private, exist_ok))

    def upload_folder(self, *, repo_id, folder_path, commit_message, ignore_patterns):
        self.started.set()
        if self.gate is not None:
            assert self.gate.wait(WAIT_S)
        if commit_message in self.fails:
            raise ConnectionError("the hub is away")
        files = sorted(path.name for path in Path(folder_path).iterdir() if not any(path.match(rule) for rule in ignore_patterns))
        self.calls.append((commit_message, files))


def trainer_of(folder, hub, *, every=1, resume_from=None, source=None, **options):
    return Trainer(
        model=tiny_model(),
        algo=make_sft(),
        batch_source=source or ListSource(sorting_items(2)),
        cfg=cpu_config(),
        checkpoint_config=CheckpointConfig(folder, every_n_steps=every, max_to_keep=1),
        resume_from=resume_from,
        callbacks=[PushToHub("me/mine", api=hub, **options)],
    )


def test_the_repository_is_made_once_and_gets_the_model_without_the_state_of_the_run(tmp_path):
    hub = StubHub()
    trainer_of(tmp_path, hub).train_sync(1)
    assert hub.calls[0] == ("create", "me/mine", True, True)
    assert hub.calls[1][0] == "step 1"
    assert {"config.json", "model.safetensors"} <= set(hub.calls[1][1])
    assert not {"optimizer.json", "optimizer.safetensors", "trainer_state.json", "manifest.json"} & set(hub.calls[1][1])


def test_training_goes_on_while_a_checkpoint_is_pushed_which_is_kept_meanwhile(tmp_path):
    gate = threading.Event()
    hub = StubHub(gate=gate)
    trainer = trainer_of(tmp_path, hub)
    trainer.train_step_sync()
    assert hub.started.wait(WAIT_S)
    for _ in range(3):
        trainer.train_step_sync()
    assert {path.name for path in tmp_path.glob("step_*")} == {"step_000001", "step_000004", "step_000003"}
    gate.set()
    trainer.train_sync(0)
    assert [call[0] for call in hub.calls] == ["create", "step 1", "step 4"]  # 2 and 3 were left out
    assert hub.calls[-1][1]


def test_a_failed_push_is_logged_and_the_next_one_is_tried(tmp_path, caplog):
    hub = StubHub(fails={"step 1"})
    trainer = trainer_of(tmp_path, hub)
    trainer.train_sync(1)
    trainer.train_sync(1)
    assert re.search("step 1 could not .*pushed to me/mine", caplog.text)
    assert "the hub is away" in caplog.text
    assert [call[0] for call in hub.calls] == ["create", "step 2"]


class Waits:
    """Stands for the clock and the waiting of the module: a wait only moves the clock."""

    def __init__(self, monkeypatch):
        self.now, self.seconds = 1000.0, []
        monkeypatch.setattr(hub_module, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(hub_module, "join_thread", self.join)

    async def join(self, thread, seconds):
        self.seconds.append(seconds)
        self.now += seconds


def test_the_end_waits_for_a_limited_time_in_total(tmp_path, caplog, monkeypatch):
    gate = threading.Event()
    waits = Waits(monkeypatch)
    trainer = trainer_of(tmp_path, StubHub(gate=gate), every=2, end_patience_s=600.0)
    trainer.train_sync(3)
    assert waits.seconds == [600.0]
    assert re.search("step 2 .*not pushed to me/mine within 600 s", caplog.text)
    asyncio.run(trainer.ensure_checkpoint())  # as the commands do after the end
    assert (tmp_path / "step_000003").is_dir()
    assert waits.seconds == [600.0]
    gate.set()


def test_the_event_loop_goes_on_while_the_end_waits(tmp_path, caplog, monkeypatch):
    gate = threading.Event()
    hub, real = StubHub(gate=gate), hub_module.join_thread

    async def join(thread, seconds):
        asyncio.get_running_loop().call_soon(gate.set)
        await real(thread, seconds)

    monkeypatch.setattr(hub_module, "join_thread", join)
    trainer_of(tmp_path, hub, end_patience_s=WAIT_S / 2).train_sync(1)
    assert [call[0] for call in hub.calls] == ["create", "step 1"]
    assert "was not pushed" not in caplog.text


class Stopping(ListSource):
    """Asked to stop after its first batch."""

    async def next_batch(self):
        if self.position == 1:
            raise StopRequested("the run was asked to stop")
        return await super().next_batch()


@pytest.mark.parametrize("steps", [5, None])
def test_a_run_that_is_asked_to_stop_saves_and_waits_for_no_push(tmp_path, monkeypatch, steps):
    gate = threading.Event()
    hub, waits = StubHub(gate=gate), Waits(monkeypatch)
    trainer = trainer_of(tmp_path, hub, every=100, source=Stopping(sorting_items(2)))
    if steps is None:
        trainer.train_sync(steps)
    else:
        with pytest.raises(StopRequested):
            trainer.train_sync(steps)
    assert (tmp_path / "step_000001" / "manifest.json").is_file()
    assert waits.seconds == []
    gate.set()


def test_a_resumed_run_pushes_at_its_end_what_was_not_pushed(tmp_path):
    trainer_of(tmp_path, StubHub(fails={"step 1"})).train_sync(1)
    resumed, again = StubHub(), StubHub()
    trainer_of(tmp_path, resumed, resume_from=1).train_sync(0)
    assert [call[0] for call in resumed.calls] == ["create", "step 1"]
    trainer_of(tmp_path, again, resume_from=1).train_sync(0)
    assert again.calls == []


def test_a_trainer_without_checkpoints_is_refused():
    with pytest.raises(ConfigError, match="'PushToHub' needs checkpoints"):
        Trainer(
            model=tiny_model(),
            algo=make_sft(),
            batch_source=ListSource([]),
            cfg=cpu_config(),
            callbacks=[PushToHub("me/mine", api=StubHub())],
        )


def test_checkpoints_that_are_no_models_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="'PushToHub' needs whole models, not layout=shallow"):
        Trainer(
            model=tiny_model(),
            algo=make_sft(),
            batch_source=ListSource([]),
            cfg=cpu_config(),
            checkpoint_config=CheckpointConfig(tmp_path, layout="shallow"),
            callbacks=[PushToHub("me/mine", api=StubHub())],
        )


def test_the_real_interface_takes_the_arguments_of_the_stub():
    huggingface_hub = pytest.importorskip("huggingface_hub")
    api = huggingface_hub.HfApi
    inspect.signature(api.create_repo).bind(api, "me/mine", private=True, exist_ok=True)
    uploaded = {"repo_id": "me/mine", "folder_path": "f", "commit_message": "m", "ignore_patterns": OF_THE_RUN}
    inspect.signature(api.upload_folder).bind(api, **uploaded)
