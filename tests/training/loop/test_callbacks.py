"""Callbacks of a run: when they are called, what they may ask for, and what a failing one costs."""

import asyncio
import json
import logging
import random

import pytest
import torch
from forked_scripts import run_script
from training_samples import DrawingSource, ListSource, assert_same_tensors, cpu_config, sorting_items, tiny_model, weights_of

from ludic.errors import ConfigError, StopRequested
from ludic.files.atomic import read_json
from ludic.training import Callback, CheckpointConfig, Trainer, make_grpo, make_sft, ranks


class Recorder(Callback):
    """Writes down what it sees, and asks for what `asks` says: (method, step) -> a function of the
    event."""

    def __init__(self, asks=None):
        self.seen, self.asks, self.kept_steps_now = [], asks or {}, ()

    def _see(self, method, event):
        self.seen.append((method, event.step))
        self.last = event
        self.asks.get((method, event.step), lambda event: None)(event)

    def on_step(self, event):
        self._see("step", event)

    async def on_evaluation(self, event):
        await asyncio.sleep(0)
        self._see("evaluation", event)

    def on_checkpoint(self, event):
        self._see("checkpoint", event)

    def on_end(self, event):
        self._see("end", event)

    def state_dict(self):
        return {"seen": len(self.seen)}

    def load_state_dict(self, state):
        self.seen = [("before", None)] * state["seen"]


class Evaluator:
    async def eval(self, **_):
        return [], {"loss": 0.5}


def trainer_of(*callbacks, folder=None, every=0, steps=None, config=None, **options):
    places = None if folder is None else CheckpointConfig(folder, every_n_steps=every, max_to_keep=2)
    return Trainer(
        model=options.pop("model", None) or tiny_model(),
        algo=make_sft(),
        batch_source=options.pop("source", None) or ListSource(sorting_items(2)),
        cfg=cpu_config(**(config or {})),
        checkpoint_config=places,
        callbacks=callbacks,
        **options,
    )


def test_callbacks_see_steps_evaluations_checkpoints_and_the_end_in_order(tmp_path):
    seen = Recorder()
    trainer_of(seen, folder=tmp_path, every=2, evaluator=Evaluator(), config={"eval_every_n_steps": 2}).train_sync(3)
    assert seen.seen == [
        *[("step", 1), ("step", 2), ("checkpoint", 2), ("evaluation", 2)],
        *[("step", 3), ("checkpoint", 3), ("end", 3)],  # the last checkpoint comes before the end
    ]
    assert seen.last.reason == "step 3 was the last one"


def test_the_last_checkpoint_comes_before_the_end_which_finds_it(tmp_path):
    found = []

    class Finder(Callback):
        def on_end(self, event):
            found.append(event.trainer.checkpointer.find().name)

    trainer_of(Finder(), folder=tmp_path, every=2).train_sync(3)
    assert found == ["step_000003"]


def test_events_have_the_statistics_the_batch_and_the_checkpoint(tmp_path):
    events = {}

    class Keeper(Callback):
        def on_step(self, event):
            events["step"] = event

        def on_evaluation(self, event):
            events["evaluation"] = event

        def on_checkpoint(self, event):
            events["checkpoint"] = event

    trainer = trainer_of(Keeper(), folder=tmp_path, every=1, evaluator=Evaluator(), config={"eval_every_n_steps": 1})
    trainer.train_sync(1)
    assert events["step"].stats["train/loss"] > 0
    assert len(events["step"].batch.items) == 2
    assert events["evaluation"].stats == {"eval/loss": 0.5}
    assert events["checkpoint"].checkpoint == tmp_path / "step_000001"
    assert all(event.trainer is trainer for event in events.values())


def test_a_stop_ends_the_run_with_a_checkpoint_and_its_reason(tmp_path):
    seen = Recorder({("step", 2): lambda event: event.stop("enough")})
    trainer = trainer_of(seen, folder=tmp_path)
    trainer.train_sync(5)
    assert trainer.current_step == 2
    assert (trainer.callbacks.stop.callback, trainer.callbacks.stop.reason, trainer.callbacks.stop.step) == (
        "Recorder",
        "enough",
        2,
    )
    assert seen.seen == [("step", 1), ("step", 2), ("checkpoint", 2), ("end", 2)]
    assert seen.last.reason == "enough"
    state = read_json(tmp_path / "step_000002" / "trainer_state.json")["callbacks"]
    assert state["stop"] == {"callback": "Recorder", "reason": "enough", "step": 2, "of_steps": 5}


@pytest.mark.parametrize("method", ["evaluation", "checkpoint"])
def test_a_stop_after_the_checkpoint_was_written_is_in_it(tmp_path, method):
    seen = Recorder({(method, 2): lambda event: event.stop("enough")})
    options = {"folder": tmp_path, "every": 1, "evaluator": Evaluator(), "config": {"eval_every_n_steps": 1}}
    trainer_of(seen, **options).train_sync(5)
    again = Recorder()
    resumed = trainer_of(again, resume_from=2, **options)
    resumed.train_sync(3)
    assert (resumed.current_step, resumed.callbacks.stop.reason) == (2, "enough")
    assert [name for name, _ in again.seen if name == "step"] == []


def test_a_stopped_run_goes_on_when_it_is_asked_for_more_steps(tmp_path):
    stops = {("step", 2): lambda event: event.stop("enough")}
    trainer_of(Recorder(stops), folder=tmp_path).train_sync(5)
    resumed = trainer_of(Recorder(), folder=tmp_path, resume_from=2)
    resumed.train_sync(3)  # to step 5, as before
    assert resumed.current_step == 2
    resumed.train_sync(4)
    assert (resumed.current_step, resumed.callbacks.stop) == (6, None)
    resumed.callbacks.forget_stop()


def test_a_callback_that_fails_is_logged_with_its_traceback_and_the_run_goes_on(tmp_path, caplog):
    def fail(event):
        raise RuntimeError("no room on the whiteboard")

    failing = {(method, step): fail for method in ("step", "evaluation", "checkpoint", "end") for step in range(4)}
    options = {"folder": tmp_path, "every": 1, "evaluator": Evaluator(), "config": {"eval_every_n_steps": 1}}
    bad, good = Recorder(failing), Named(Recorder())
    trainer = trainer_of(bad, good, **options)
    trainer.train_sync(2)
    assert trainer.current_step == 2
    assert (
        bad.seen
        == good.inner.seen
        == [
            *(("step", 1), ("checkpoint", 1), ("evaluation", 1), ("step", 2), ("checkpoint", 2), ("evaluation", 2), ("end", 2)),
        ]
    )
    records = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(records) == len(bad.seen)
    assert all("Recorder" in record.message and record.exc_info[1].args == ("no room on the whiteboard",) for record in records)
    assert (tmp_path / "step_000002" / "manifest.json").is_file()


class Named(Callback):
    """Another name for a recorder."""

    name = "named"

    def __init__(self, inner):
        self.inner = inner
        for method in ("on_step", "on_evaluation", "on_checkpoint", "on_end", "state_dict", "load_state_dict"):
            setattr(self, method, getattr(inner, method))


def test_a_state_that_is_no_json_costs_no_checkpoint(tmp_path, caplog):
    class Odd(Callback):
        def state_dict(self):
            return {"tensor": torch.ones(1)}

        def load_state_dict(self, state):
            raise KeyError("never saved")

    trainer_of(Odd(), folder=tmp_path, every=1).train_sync(1)
    assert "callback Odd cannot be saved" in caplog.text
    assert read_json(tmp_path / "step_000001" / "trainer_state.json")["callbacks"]["states"] == {}
    assert trainer_of(Odd(), folder=tmp_path, resume_from=1).current_step == 1


def test_the_end_is_seen_after_an_error_too():
    class Broken(ListSource):
        async def next_batch(self):
            if self.position == 1:
                raise ValueError("the disk is gone")
            return await super().next_batch()

    seen = Recorder()
    with pytest.raises(ValueError, match="the disk is gone"):
        trainer_of(seen, source=Broken(sorting_items(2))).train_sync(3)
    assert (seen.seen[-1], seen.last.reason) == (("end", 1), "ValueError: the disk is gone")


@pytest.mark.parametrize("steps", [3, None])
def test_a_request_to_stop_saves_a_checkpoint_before_the_end_is_seen(tmp_path, steps):
    class Stopped(ListSource):
        async def next_batch(self):
            if self.position == 1:
                raise StopRequested("Ctrl-C")
            return await super().next_batch()

    seen = Recorder()
    trainer = trainer_of(seen, folder=tmp_path, source=Stopped(sorting_items(2)))
    if steps is None:
        trainer.train_sync()
    else:
        with pytest.raises(StopRequested):
            trainer.train_sync(steps)
    assert seen.seen == [("step", 1), ("checkpoint", 1), ("end", 1)]
    assert (seen.last.reason, seen.last.is_interrupted) == ("StopRequested: Ctrl-C", True)


@pytest.mark.parametrize("ask", [lambda event: event.stop("late"), lambda event: event.save_checkpoint()])
def test_what_is_asked_for_at_the_end_is_refused(tmp_path, caplog, ask):
    trainer = trainer_of(Recorder({("end", 1): ask}), folder=tmp_path)
    trainer.train_sync(1)
    assert "Recorder failed in on_end" in caplog.text
    assert "the run has ended" in caplog.text
    assert trainer.callbacks.stop is None


@pytest.mark.parametrize("at_rank_0", [[], ["Recorder", "named"]])
def test_other_callbacks_than_those_of_rank_0_are_refused(monkeypatch, at_rank_0):
    monkeypatch.setattr(ranks, "ask_rank_0", lambda doing, question: at_rank_0)
    with pytest.raises(ConfigError, match=r"callbacks \['Recorder'\], and rank 0 \["):
        trainer_of(Recorder())


def test_callbacks_that_draw_random_numbers_do_not_change_the_run():
    class Drawing(Callback):
        def on_step(self, event):
            torch.rand(3), random.random()

    weights = []
    for callbacks in ([], [Drawing()]):
        trainer = trainer_of(*callbacks, model=tiny_model(attention_dropout=0.2), source=DrawingSource())
        torch.manual_seed(3)
        random.seed(3)
        trainer.train_sync(2)
        weights.append(weights_of(trainer.model))
    assert_same_tensors(*weights)


def test_a_checkpoint_that_is_asked_for_is_saved_once_and_kept_while_it_is_protected(tmp_path):
    class Holding(Callback):
        kept_steps = (2,)

        def on_step(self, event):
            if event.step == 2:
                event.save_checkpoint()

    trainer_of(Holding(), folder=tmp_path, every=3).train_sync(12)
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_000002", "step_000009", "step_000012"]


class OfAnotherLibrary(Callback):
    def on_step_end(self, *_):
        """Never called."""


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        ("Recorder", "'Recorder' is not .*Callback; .*object"),
        (Recorder, "Recorder'> is not .*Callback; .*object"),
        (OfAnotherLibrary(), "OfAnotherLibrary.on_step_end is never called; .*on_checkpoint, on_end"),
    ],
)
def test_what_would_never_be_called_is_refused(callback, message):
    with pytest.raises(ConfigError, match=message):
        trainer_of(callback)


def test_two_callbacks_of_one_name_and_missing_checkpoints_are_refused():
    class Saving(Callback):
        needs_checkpoints = True

    with pytest.raises(ConfigError, match="two callbacks have the name 'Recorder'"):
        trainer_of(Recorder(), Recorder())
    with pytest.raises(ConfigError, match="the callback 'Saving' needs checkpoints"):
        trainer_of(Saving())


def test_without_callbacks_a_checkpoint_has_nothing_of_them(tmp_path):
    trainer_of(folder=tmp_path, every=1).train_sync(1)
    assert "callbacks" not in read_json(tmp_path / "step_000001" / "trainer_state.json")
    assert make_grpo(group_size=4).name == "grpo"


@pytest.mark.integration
def test_two_ranks_stop_together_and_rank_0_alone_calls(tmp_path):
    ended = {"step": 4, "stop": "eval/loss was not better than 0.4 for 2 evaluations"}
    found = json.loads(run_script("callback_ranks.py", tmp_path).splitlines()[-1])
    assert found["whole"] == [{**ended, "seen": [1, 2, 3, 4]}, {**ended, "seen": []}]
    assert "callbacks [], and rank 0 ['Failing']" in found["unequal"][1]
    assert "callbacks [], and rank 0 ['Failing']" in found["unequal"][0]
    assert found["resumed"] == [{**ended, "seen": []}, {**ended, "seen": []}]
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_000002", "step_000004"]
