"""A command that starts the processes of its run and watches them: what it prints, leaves behind
and ends with. The processes are scripted, but for the last test."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from commands import NETWORK, same_weights
from forked_run import Forked, wait_until_exists
from processes import is_running
from scripted_place import ScriptedPlace
from typer.testing import CliRunner

from ludic.cli.app import app
from ludic.errors import LaunchError
from ludic.launch.torchrun import STOP_VARIABLE
from ludic.runs import launching
from ludic.runs.directory import RunDirectory, SFTDirectory

SFT = [*NETWORK, "threads=1", "rows=40", "batch_size=6", "epochs=1", "heldout=0.1"]


class Stage(ScriptedPlace):
    """Each start of a trainer plays the next of `acts`: what it writes, and how it ends."""

    def __init__(self, *acts):
        super().__init__(time.monotonic)
        self.acts, self.planned, self.folder = list(acts), [], None

    def open(self, section, processes, folder):
        self.planned, self.folder = list(processes), folder
        return self

    def start(self, process):
        super().start(process)
        if process.role == "trainer":
            text, code = self.acts.pop(0)
            log = self.folder / "workers" / f"{process.name}.log"
            log.parent.mkdir(exist_ok=True)
            with log.open("a") as file:
                file.write(text)
            self.end(process.name, code=code)


@pytest.fixture
def play(tmp_path, monkeypatch):
    def play(command, *arguments, acts):
        stage = Stage(*acts)
        monkeypatch.setattr(launching, "open_place", stage.open)
        result = CliRunner().invoke(app, [command, *arguments])
        return result, stage

    return play


def new(tmp_path, *more):
    return [*SFT, f"output={tmp_path}", "name=run", *more]


def test_what_the_trainer_writes_is_shown_and_a_failed_one_is_restarted(tmp_path, play):
    result, stage = play("sft", *new(tmp_path, "ranks=2"), acts=[("first\n", 75), ("second\n", 0)])
    assert result.exit_code == 0, result.output
    assert [name for _, name in stage.starts] == ["trainer", "trainer"]
    lines = result.output.splitlines()
    assert lines[0].endswith("run: 2 trainers on local")
    assert [line for line in lines if line in ("first", "second")] == ["first", "second"]
    assert any("trainer ended with status 75" in line for line in lines)
    assert stage.planned[0].argv[-3:] == ("worker", "trainer", str(tmp_path / "run"))
    assert "--nproc-per-node=2" in stage.planned[0].argv
    SFTDirectory.resume(tmp_path / "run").release()  # nothing holds it any more


@pytest.mark.parametrize("code", [1, 2, 78])  # 1: of a bug, after which the trainer is started again
def test_a_new_run_that_fails_before_its_first_step_leaves_no_folder(tmp_path, play, code):
    result, _ = play("sft", *new(tmp_path, "ranks=2", "place.restarts=0"), acts=[("ludic: wrong\n", code)])
    assert result.exit_code == code
    assert "ludic: wrong" in result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [75, 137, 143])
def test_a_run_that_may_succeed_later_is_kept_and_resumed_with_the_same_processes(tmp_path, play, code):
    arguments = new(tmp_path, "ranks=2", "place.restarts=0")
    result, _ = play("sft", *arguments, acts=[("", code)])
    assert result.exit_code == code
    again, stage = play("sft", "--resume", str(tmp_path / "run"), acts=[("", 0)])
    assert again.exit_code == 0
    assert [process.name for process in stage.planned] == ["trainer"]


def test_trainers_have_the_same_time_to_stop_from_the_command_and_from_their_agent(tmp_path, play, monkeypatch):
    given = []

    class Watched(launching.Supervisor):
        def __init__(self, *arguments, **options):
            given.append(options["stop_grace_s"])
            super().__init__(*arguments, **options)

    monkeypatch.setattr(launching, "Supervisor", Watched)
    _, stage = play("sft", *new(tmp_path, "ranks=2", "place.stop_s=45"), acts=[("", 0)])
    assert given == [45.0]
    assert stage.planned[0].env[STOP_VARIABLE] == "45"


def test_the_device_of_a_launched_run_is_left_open_and_any_may_resume_it(tmp_path, play):
    play("sft", *new(tmp_path, "ranks=2", "place.restarts=0"), acts=[("", 75)])
    config = tmp_path / "run" / "config.yaml"
    text = config.read_text()
    assert "model_device: auto\n" in text
    for device in ("cuda", "cpu"):  # what a process of it chooses, on two machines
        config.write_text(text.replace("model_device: auto", f"model_device: {device}"))
        result, _ = play("sft", "--resume", str(tmp_path / "run"), acts=[("", 75)])
        assert result.exit_code == 75, result.output


def test_a_resumed_run_may_have_other_processes(tmp_path, play):
    play("sft", *new(tmp_path, "ranks=2", "place.restarts=0"), acts=[("", 75)])
    config, resume = tmp_path / "run" / "config.yaml", ["sft", "--resume", str(tmp_path / "run")]
    before = config.read_text()
    result, stage = play(*resume, "ranks=4", "place=ray", acts=[("", 75)])
    assert result.exit_code == 75, result.output
    assert "--nproc-per-node=4" in stage.planned[0].argv
    assert config.read_text() == before.replace("trainers: 2", "trainers: 4").replace("'on': local", "'on': ray")
    for wrong in ("place.nodes=3", "seed=9", "name=other", "place.actors=2", "trainer.lr=1"):
        kept = config.read_text()
        result, stage = play(*resume, wrong, acts=[])
        assert result.exit_code == 2, result.output
        assert (stage.starts, config.read_text()) == ([], kept)


def test_actors_may_come_and_go_but_not_begin_on_resume(tmp_path, play):
    arguments = [*NETWORK, "threads=1", f"output={tmp_path}", "name=run", "trainers=2", "place.restarts=0"]
    play("train", "sort", *arguments, "actors=1", acts=[("", 75)])
    resume = ["train", "--resume", str(tmp_path / "run")]
    result, stage = play(*resume, "actors=3", acts=[("", 75)])
    assert result.exit_code == 75, result.output
    assert sum(process.role == "actor" for process in stage.planned) == 3
    result, _ = play(*resume, "actors=0", acts=[])
    assert result.exit_code == 2
    assert "place.actors is 0, but the run began with 1; restore it" in " ".join(result.output.split())
    result, _ = play(*resume, "ranks.timeout_s=-1", acts=[])
    assert result.exit_code == 2
    assert "timeout_s: -1" not in (tmp_path / "run" / "config.yaml").read_text()


def test_a_place_without_room_is_an_error_that_leaves_no_folder(tmp_path, monkeypatch):
    def refuse(*_):
        raise LaunchError("no room within 60 s")

    monkeypatch.setattr(launching, "open_place", refuse)
    result = CliRunner().invoke(app, ["sft", *new(tmp_path, "place=ray")])
    assert result.exit_code == 1
    assert "no room within 60 s" in result.output
    assert list(tmp_path.iterdir()) == []


def test_a_second_launch_of_a_run_is_refused(tmp_path, play):
    play("sft", *new(tmp_path, "ranks=2", "place.restarts=0"), acts=[("", 75)])
    held = launching.RunLock(tmp_path / "run", launching.LAUNCH_LOCK)
    result, stage = play("sft", "--resume", str(tmp_path / "run"), acts=[])
    held.release()
    assert result.exit_code == 1
    assert "is in use by process" in result.output
    assert stage.starts == []


def test_the_actors_of_a_run_find_its_queue_open(tmp_path, play):
    arguments = [*NETWORK, "threads=1", f"output={tmp_path}", "name=run", "trainers=2", "actors=2"]
    result, stage = play("train", "sort", *arguments, acts=[("", 0)])
    assert result.exit_code == 0, result.output
    assert [process.name for process in stage.planned] == ["trainer", "actor0", "actor1"]
    assert (tmp_path / "run" / "run_id").is_file()
    assert (tmp_path / "run" / "queue.sqlite").is_file()


def test_a_slurm_job_is_written_and_not_started(tmp_path, play):
    arguments = new(tmp_path, "place=slurm", "trainers=4", "place.nodes=2", "place.slurm_options=['--partition=gpu']")
    result, stage = play("sft", *arguments, acts=[])
    assert result.exit_code == 0, result.output
    assert "submit it with `sbatch " in result.output
    assert re.search(r"No GPU .*on slurm; set place\.trainer_gpus=1, ", " ".join(result.output.split()))
    assert stage.planned == []
    script = (tmp_path / "run" / "job.sh").read_text()
    assert "#SBATCH --nodes=2\n" in script
    assert "#SBATCH --partition=gpu\n" in script
    assert script.count("\nkeep trainer") == 2
    assert json.loads((tmp_path / "run" / "progress.json").read_text())["phase"] == "sft"


@pytest.mark.integration
def test_two_trainers_save_and_end_after_a_signal_to_the_command(tmp_path):
    run = tmp_path / "run"
    settings = [*SFT, "steps=100000", f"output={tmp_path}", "name=run", "ranks=2", "checkpoint.every_n_steps=5"]
    with Forked("sft", *settings) as command:
        wait_until_exists(run / "checkpoints" / "latest.json")  # both ranks train
        pids = [process["pid"] for process in json.loads((run / "launch.json").read_text())["processes"]]
        assert command.end(signal.SIGTERM) == 128 + signal.SIGTERM
    assert not any(is_running(pid) for pid in pids)
    ends = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event["code"] for event in ends if event["event"] == "end"] == [143]  # of the agent: its ranks saved
    assert any((run / "checkpoints").rglob("manifest.json"))
    assert RunDirectory(run).read_progress().failed is None
    assert os.path.isdir(run / "ranks")


@pytest.mark.slow
def test_a_run_whose_rank_is_killed_is_the_undisturbed_run(tmp_path):
    settings = [*SFT, "rows=400", "epochs=4", f"output={tmp_path}", "ranks=2", "checkpoint.every_n_steps=5"]
    with Forked("sft", *settings, "name=whole") as command:
        assert command.end() == 0
    run = tmp_path / "run"
    with Forked("sft", *settings, "name=run") as command:
        wait_until_exists(run / "checkpoints" / "latest.json")
        (agent,) = [process["pid"] for process in json.loads((run / "launch.json").read_text())["processes"]]
        os.kill(int(Path(f"/proc/{agent}/task/{agent}/children").read_text().split()[1]), signal.SIGKILL)
        assert command.end() == 0
    assert same_weights(run, tmp_path / "whole")
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event["code"] for event in events if event["event"] == "end"] == [137, 0]  # of the agent: its rank was killed
