"""Going on with a run: by one process at a time, with the settings that it was begun with, and
for more steps."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import NETWORK, ludic, metrics_of, refused, same_weights, summary_of, train_until
from killed_commands import killed_at

from ludic.errors import CheckpointError
from ludic.runs.directory import RunDirectory
from ludic.runs.lock import RunLock

TINY = [
    *("threads=1", "warmup.steps=1", "warmup.batch_size=4", "steps=3", "rollout.prompts=2", "rollout.group_size=4"),
    *("rollout.log_every=1", "evaluation.prompts=3", "evaluation.samples_per_prompt=2", *NETWORK),
]
CONSTANT = [
    *TINY,
    "trainer.lr_scheduler_type=null",
    "trainer.warmup_steps=0",
    "trainer.warmup_ratio=null",
    "trainer.lr_min_ratio=0",
]
SFT = [
    "threads=1",
    "rows=40",
    "batch_size=8",
    "heldout=0.1",
    *NETWORK,
    "trainer.lr_scheduler_type=constant_with_warmup",
    "trainer.warmup_steps=1",
]


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a constant learning rate. No test may change it."""
    parent = tmp_path_factory.mktemp("runs")
    ludic("train", *CONSTANT, f"output={parent}", "name=run")
    return parent / "run"


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


@pytest.mark.parametrize("moment", [1, 2])
def test_a_run_killed_before_it_is_begun_leaves_its_name_free(tmp_path: Path, moment: int) -> None:
    arguments = ["sft", *SFT, "steps=1", f"output={tmp_path}", "name=run"]
    assert killed_at(moment, *arguments)
    assert not (tmp_path / "run").exists()
    ludic(*arguments)


def test_a_folder_without_a_run_is_not_said_to_be_one_to_go_on_with(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    said = refused("sft", *SFT, "steps=1", f"output={tmp_path}", "name=run")
    assert "holds no run that --resume could continue" in said


@pytest.mark.parametrize("name", ["../other", "/tmp/other", "a/../../b", "..", ".", "''"])
def test_a_name_does_not_lead_out_of_the_output_folder(tmp_path: Path, name: str) -> None:
    assert "must name a folder in output" in refused("sft", *SFT, "steps=1", f"output={tmp_path}/runs", f"name={name}")
    assert not list(tmp_path.iterdir())


def test_a_folder_is_gone_on_with_by_one_process_which_the_refusal_names(run: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", f"from ludic.runs.lock import RunLock; from pathlib import Path; a = RunLock(Path({str(run)!r}));"
         "print(flush=True); input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert holder.stdout is not None
    holder.stdout.readline()
    before = (run / "metrics.jsonl").read_bytes()
    assert f"is in use by process {holder.pid} on " in refused("train", "--resume", str(run))
    assert (run / "metrics.jsonl").read_bytes() == before
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    assert "is finished" in ludic("train", "--resume", str(run))  # its death has let go


def test_a_lock_is_let_go_when_the_command_ends(tmp_path: Path) -> None:
    first = RunLock(tmp_path)
    with pytest.raises(CheckpointError, match=f"process {os.getpid()} on"):
        RunLock(tmp_path)
    first.release()
    RunLock(tmp_path).release()


@pytest.mark.parametrize(
    ("before", "after", "key"),
    [("lr: 0.0003", "lr: 0.1", "trainer.lr"), ("\nseed: 0", "\nseed: 1", "seed"), ("\nsteps: 3", "\nsteps: 4", "steps")],
)
def test_a_setting_that_was_changed_since_is_refused_by_name(run: Path, before: str, after: str, key: str) -> None:
    config = run / "config.yaml"
    text = config.read_text()
    assert before in text
    config.write_text(text.replace(before, after))
    said = refused("train", "--resume", str(run))
    assert f"config.yaml: {key} is {after.split()[-1]}, but the run began with {before.split()[-1]}" in said


def test_settings_of_what_is_printed_and_kept_may_be_changed(run: Path) -> None:
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("\nlog_every: ", "\nlog_every: 1"))
    assert "is finished" in ludic("train", "--resume", str(run))


def test_a_run_begun_with_the_former_name_of_a_setting_is_resumed_with_its_value(run: Path) -> None:
    for file in ("config.yaml", "progress.json"):
        text = (run / file).read_text()
        assert "batches_ahead" in text
        (run / file).write_text(text.replace("batches_ahead", "max_lag"))
    assert "is finished" in ludic("train", "--resume", str(run))
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("max_lag: 0", "max_lag: 1"))
    said = refused("train", "--resume", str(run))
    assert "inference.batches_ahead is 1, but the run began with 0" in said


def test_a_folder_of_an_older_version_is_gone_on_with(run: Path) -> None:
    progress = json.loads((run / "progress.json").read_text())
    for key in ("recipe", "versions", "failed"):
        del progress[key]
    (run / "progress.json").write_text(json.dumps(progress))
    assert "is finished" in ludic("train", "--resume", str(run))


@pytest.mark.parametrize("content", ["{", "[]", '{"phase": 3, "stage": 4}', "null"])
def test_a_damaged_progress_is_one_line(run: Path, content: str) -> None:
    (run / "progress.json").write_text(content)
    assert "progress.json is damaged" in refused("train", "--resume", str(run))


def test_a_finished_run_goes_on_for_more_steps_as_if_they_had_been_asked_for(run: Path, tmp_path: Path) -> None:
    ludic("train", *CONSTANT, "steps=5", f"output={tmp_path}", "name=whole")
    ludic("train", "--resume", str(run), "steps=5")
    assert same_weights(run, tmp_path / "whole")
    assert [(line["phase"], line["step"], line["train/loss"]) for line in metrics_of(run)] == [
        (line["phase"], line["step"], line["train/loss"]) for line in metrics_of(tmp_path / "whole")
    ]
    found, wanted = summary_of(run), summary_of(tmp_path / "whole")
    assert all(found[key] == wanted[key] for key in ("before", "after", "steps", "config_hash"))
    assert "steps (5) must be more than the 5" in refused("train", "--resume", str(run), "steps=5")


def test_supervised_runs_go_on_for_more_steps_too(tmp_path: Path) -> None:
    ludic("sft", *SFT, "steps=5", f"output={tmp_path}", "name=whole")
    ludic("sft", *SFT, "steps=2", f"output={tmp_path}", "name=run")
    ludic("sft", "--resume", str(tmp_path / "run"), "steps=5")
    assert same_weights(tmp_path / "run", tmp_path / "whole")


def test_more_steps_are_refused_where_the_schedule_depends_on_them(tmp_path: Path) -> None:
    ludic("sft", *SFT, "trainer.lr_scheduler_type=cosine", "steps=2", f"output={tmp_path}", "name=run")
    said = refused("sft", "--resume", str(tmp_path / "run"), "steps=5")
    assert "trainer.lr_scheduler_type (cosine) depends on the number of steps" in said
    assert "A run with trainer.lr_scheduler_type=constant_with_warmup" in said
    assert summary_of(tmp_path / "run")["steps"] == 2


@pytest.mark.parametrize("more", [["seed=1"], ["steps=9", "seed=1"], ["steps=null"], ["steps=1.5"], ["other.yaml"]])
def test_nothing_but_steps_is_taken_with_resume(run: Path, more: list[str]) -> None:
    assert "accepts only steps=N, for more steps" in refused("train", "--resume", str(run), *more)


def test_other_versions_than_at_the_beginning_are_said(run: Path) -> None:
    progress = RunDirectory(run).read_progress()
    assert progress.versions is not None
    assert set(progress.versions) == {"ludic", "python", "torch", "transformers"}
    progress.versions["torch"] = "1.0"
    RunDirectory(run).write_progress(progress)
    assert "began with torch 1.0" in " ".join(ludic("train", "--resume", str(run)).split())


def test_a_run_that_fails_before_its_first_step_leaves_no_folder(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from ludic.cli.app import app

    settings = [*TINY, "warmup.steps=0", "trainer.eval_at_start=true", f"output={tmp_path}", "name=run"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ludic.runs.held_out.HeldOut.measure", _fails)
        result = CliRunner().invoke(app, ["train", *settings])
    assert isinstance(result.exception, ZeroDivisionError)  # a bug is no line: it keeps its traceback
    assert not (tmp_path / "run").exists()


def test_a_run_that_fails_later_says_so_in_its_folder(run: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from ludic.cli.app import app

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ludic.runs.held_out.HeldOut.measure", _fails)
        CliRunner().invoke(app, ["train", "--resume", str(run), "steps=4"])
    assert RunDirectory(run).read_progress().failed == "ZeroDivisionError: by design"
    ludic("train", "--resume", str(run))
    assert RunDirectory(run).read_progress().failed is None


async def _fails(*_: object, **__: object) -> None:
    raise ZeroDivisionError("by design")


def test_a_stopped_run_goes_on_for_more_steps(run: Path, tmp_path: Path) -> None:
    assert train_until("train", 2, [*CONSTANT, f"output={tmp_path}", "name=parts"], phase="reinforce") == 130
    ludic("train", "--resume", str(tmp_path / "parts"), "steps=4")
    ludic("train", "--resume", str(run), "steps=4")
    assert same_weights(run, tmp_path / "parts")


def test_a_summary_says_how_the_run_ended_what_it_trained_and_with_what(finished_run: Path, tmp_path: Path) -> None:
    found = summary_of(finished_run)
    assert (found["status"], found["model"], found["algorithm"]) == ("finished", None, "grpo")
    assert found["versions"] == RunDirectory(finished_run).read_progress().versions
    assert found["episodes"] == {"failed": 0, "retried": 0, "cancelled": 0, "dropped_groups": 0}
    assert train_until("train", 1, [*CONSTANT, f"output={tmp_path}", "name=parts"], phase="reinforce") == 130
    assert summary_of(tmp_path / "parts")["status"] == "interrupted"
    ludic("sft", *SFT, "steps=1", f"output={tmp_path}", "name=sft")
    assert (summary_of(tmp_path / "sft")["status"], summary_of(tmp_path / "sft")["algorithm"]) == ("finished", "sft")


def test_episodes_that_failed_in_training_are_counted_at_the_end(tmp_path: Path) -> None:
    """Every fourth answer cannot be graded: its group is left out, and the summary says how
    many."""
    problems = tmp_path / "rows.jsonl"
    problems.write_text("".join(json.dumps({"prompt": f"{n * 7919 % 100000}>"}) + "\n" for n in range(30)))
    settings = [*TINY, "warmup.steps=0", "steps=2", "rollout.prompts=6", f"data={problems}", "reward=byte_rewards:fails_at_times"]
    model = [f"model={tiny_folder(tmp_path)}", "task.args.max_new_tokens=4", "task.args.num_heldout=3"]
    shown = ludic("train", *settings, *model, f"output={tmp_path}", "name=run")
    lines = [line for line in metrics_of(tmp_path / "run") if "train/loss" in line]
    lost = summary_of(tmp_path / "run")["episodes"]
    assert lost["failed"] == sum(line["train/num_failed_episodes"] for line in lines) > 0
    assert lost["dropped_groups"] > 0
    assert f"{lost['failed']} training episodes failed" in " ".join(shown.split())


def tiny_folder(folder: Path) -> Path:
    from training_samples import TOKENIZER, tiny_model

    tiny_model().save_pretrained(folder / "small")
    TOKENIZER.save_pretrained(folder / "small")
    return folder / "small"
