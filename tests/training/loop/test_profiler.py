"""Traces of some steps."""

import gzip
import json

import pytest
import torch
from torch.profiler import profile
from training_samples import ListSource, assert_same_tensors, cpu_config, sorting_items, tiny_model, weights_of

from ludic.errors import ConfigError, StopRequested
from ludic.training import CheckpointConfig, Profiler, Trainer, make_grpo

PHASES = {f"ludic.{name}" for name in ("rollout", "batching", "forward_backward", "forward", "backward", "optimizer")}


def trainer_of(profiler, **options):
    source = ListSource(sorting_items(8, seed=1))
    return Trainer(
        model=tiny_model(), algo=make_grpo(group_size=4), batch_source=source, cfg=cpu_config(), profiler=profiler, **options
    )


def ranges_of(path):
    """Name -> number of the named ranges of a trace."""
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    names = [event["name"] for event in events if str(event.get("name", "")).startswith("ludic.") and event["ph"] == "X"]
    return {name: names.count(name) for name in names}


def is_recording():
    return torch.autograd.profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled()


def test_a_trace_has_the_phases_of_its_steps_and_changes_no_weight(tmp_path):
    notes = []
    profiler = Profiler(2, 3, folder=tmp_path, note=notes.append)
    traced, plain = trainer_of(profiler), trainer_of(None)
    traced.train_sync(4)
    plain.train_sync(4)
    assert_same_tensors(weights_of(traced.model), weights_of(plain.model))
    assert profiler.files == [tmp_path / "step_2-3.rank0.json.gz"] == list(tmp_path.iterdir())
    ranges = ranges_of(profiler.files[0])
    assert ranges.keys() >= PHASES
    assert ranges["ludic.rollout"] == ranges["ludic.optimizer"] == 2
    assert notes == [f"the trace of step 2-3 is in {profiler.files[0]}; open it at https://ui.perfetto.dev"]
    assert not is_recording()


def test_one_step_of_a_loop_of_ones_own_is_traced(tmp_path):
    trainer = trainer_of(Profiler(2, 2, folder=tmp_path))
    for _ in range(3):
        trainer.train_step_sync()
    assert [path.name for path in tmp_path.iterdir()] == ["step_2.rank0.json.gz"]


def test_a_resumed_run_traces_the_steps_that_are_left(tmp_path):
    checkpoints = CheckpointConfig(tmp_path / "checkpoints", every_n_steps=2)
    trainer_of(None, checkpoint_config=checkpoints).train_sync(2)
    profiler = Profiler(1, 4, folder=tmp_path / "profile")
    trainer_of(profiler, checkpoint_config=checkpoints, resume_from=2).train_sync(3)
    assert [path.name for path in profiler.files] == ["step_3-4.rank0.json.gz"]


def test_a_run_that_ends_inside_the_range_writes_what_it_has(tmp_path):
    profiler = Profiler(2, 9, folder=tmp_path)
    trainer_of(profiler).train_sync(3)
    assert [path.name for path in profiler.files] == ["step_2-3.rank0.json.gz"]
    assert not is_recording()


def test_a_step_that_fails_ends_the_recording(tmp_path, monkeypatch):
    profiler = Profiler(2, 9, folder=tmp_path)
    trainer = trainer_of(profiler)
    optimize, calls = trainer._optimize, []

    async def fail_in_step_3(*args, **options):
        calls.append(0)
        if len(calls) == 3:
            raise RuntimeError("broken")
        return await optimize(*args, **options)

    monkeypatch.setattr(trainer, "_optimize", fail_in_step_3)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.train_sync(9)
    assert [path.name for path in profiler.files] == ["step_2.rank0.json.gz"]
    assert not is_recording()
    with profile():  # another recording can begin
        pass


def test_a_stop_inside_the_range_ends_the_recording(tmp_path):
    stops = iter([False, False, True])
    profiler = Profiler(1, 9, folder=tmp_path)
    trainer = trainer_of(profiler, should_stop=lambda: next(stops))
    with pytest.raises(StopRequested):
        trainer.train_sync(9)
    assert [path.name for path in profiler.files] == ["step_1-2.rank0.json.gz"]
    assert not is_recording()


def test_steps_outside_of_the_run_are_reported(tmp_path):
    notes = []
    trainer_of(Profiler(7, 8, folder=tmp_path, note=notes.append)).train_sync(1)
    assert notes == [
        "no step is profiled: 7-8 are not among the steps from 1 to 1 that this run takes; choose some of these (in a recipe "
        "profile.steps)"
    ]
    assert list(tmp_path.iterdir()) == []


def test_a_trace_that_cannot_be_written_does_not_end_the_run(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    profiler = Profiler(1, 1, folder=tmp_path / "file" / "profile")
    trainer = trainer_of(profiler)
    trainer.train_sync(2)
    assert trainer.current_step == 2
    assert profiler.files == []
    assert "could not be written" in caplog.text


@pytest.mark.parametrize(
    ("first", "last", "message"),
    [(0, 1, r"first \(0\) must be at least 1"), (3, 2, r"last \(2\) must be at least 3")],
)
def test_steps_are_counted_from_1(first, last, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        Profiler(first, last, folder=tmp_path)
