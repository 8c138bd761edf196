"""`ludic train`, `sft`, `train-rm` and `dpo` as one run of two ranks: equal to one process, ended
together by an error, a kill, a hang or a signal."""

import json
import os
import re
import signal

import pytest
from ranked_commands import (
    NETWORK,
    PAIRS,
    PATIENCE_S,
    REWARD,
    Ranks,
    alone,
    has_steps,
    largest_difference,
    ludic_command,
    metrics_of,
    signal_before_step,
    with_sgd,
)
from tiny_recipe import TINY

pytestmark = pytest.mark.integration

SFT = [*NETWORK, "threads=1", "rows=40", "batch_size=6", "epochs=1", "heldout=0.1"]
DPO = [*(setting for setting in PAIRS if not setting.startswith("train_sample")), "warmup.steps=3", "answers=4"]
LONG = ["steps=100000", "epochs=1", "checkpoint.every_n_steps=5"]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"{number}+{number % 7}=", "completion": str(number)}) + "\n" for number in range(24))
    )
    return path


@pytest.mark.parametrize("command", ["train", "sft", "train-rm", "dpo"])
def test_a_run_on_two_ranks_is_that_of_one_process(command, prompts, tmp_path):
    own_data = [
        *TINY,
        *REWARD,
        f"data={prompts}",
        "rollout.prompts=3",
        "inference.batches_ahead=1",
        "trainer.minibatches_per_batch=2",
    ]
    settings = {"train": own_data, "sft": SFT, "train-rm": PAIRS, "dpo": DPO}[command]
    for name, world_size, work in (("one", 1, alone), ("two", 2, with_sgd)):
        with Ranks(
            tmp_path / f"log-{name}", world_size, command, *settings, f"output={tmp_path}", f"name={name}", work=work
        ) as run:
            assert run.wait() == [0] * world_size, run.read_all()
    assert largest_difference(tmp_path / "one", tmp_path / "two") < 1e-6
    one, two = (metrics_of(tmp_path / name) for name in ("one", "two"))
    assert [(line["phase"], line["step"]) for line in one] == [(line["phase"], line["step"]) for line in two]
    for before, after in zip(one, two, strict=True):
        for key in ("train/loss", "train/grad_norm", "train/num_samples", "eval/loss"):
            assert (key in after) == (key in before), key
            assert key not in before or after[key] == pytest.approx(before[key], rel=1e-4, abs=1e-6), key
    assert run.read(1, "out") == run.read(1, "err") == ""  # the second rank is quiet
    assert "Loading torch" in (tmp_path / "two" / "ranks" / "rank_0001.log").read_text()
    files = [{path.name for path in (tmp_path / name).iterdir()} for name in ("one", "two")]
    assert files[1] == files[0] | {"ranks", ".launcher"}


def test_a_rank_that_is_killed_ends_the_other_with_a_named_error(tmp_path):
    with Ranks(tmp_path / "log", 2, "sft", *SFT, *LONG, f"output={tmp_path}", "name=run") as run:
        run.wait_for(has_steps(tmp_path / "run", 3))
        run.kill(1)
        assert run.wait() == [75, -signal.SIGKILL]  # long before any deadline of a phase
        in_collective = "rank 0 lost the others in an exchange between ranks: no sign from rank 1 of 2, which was killed or hangs"
        at_store = "rank 1 of 2 ended without a word: killed from outside"
        assert re.search(f"ludic: rank 0 of 2: ({in_collective}|{at_store})", run.read(0, "err"))
    assert re.search(f"{in_collective}|{at_store}", json.loads((tmp_path / "run" / "progress.json").read_text())["failed"])


def test_a_rank_that_is_stopped_makes_the_other_print_its_stacks_and_end(tmp_path):
    deadlines = ["ranks.step_s=10", "ranks.generation_s=10"]
    with Ranks(tmp_path / "log", 2, "sft", *SFT, *LONG, *deadlines, f"output={tmp_path}", "name=run") as run:
        run.wait_for(has_steps(tmp_path / "run", 3))
        run.kill(1, signal.SIGSTOP)
        run.processes[0].join(timeout=PATIENCE_S)
        assert run.processes[0].exitcode == 75
        said = run.read(0, "err")
        assert re.search("rank 0 of 2: the phase (step|generation) has taken", said)
        assert "Current thread" in said or "Thread 0x" in said


def fails_on_rank_1(environment, *arguments):
    """A source of errors that rank 0 does not have."""
    from ludic.training import Trainer

    original = Trainer._log_step

    def log_step(self, *arguments):
        if environment.rank == 1 and self.current_step == 3:
            raise ValueError("rank 1 is out of luck")
        return original(self, *arguments)

    Trainer._log_step = log_step
    ludic_command(environment, *arguments)


def test_an_error_on_one_rank_ends_all_with_it(tmp_path):
    with Ranks(tmp_path / "log", 2, "sft", *SFT, *LONG, f"output={tmp_path}", "name=run", work=fails_on_rank_1) as run:
        codes = run.wait()
        assert codes == [1, 1], run.read_all()
        assert "ValueError: rank 1 is out of luck" in run.read(1, "err")
        assert re.search("rank 0 of 2: .*rank 1 of 2, on ", run.read(0, "err"))
        assert "ValueError: rank 1 is out of luck" in run.read(0, "err")


def lacks_the_data(environment, *arguments):
    """A host on which the data are missing."""
    given = [argument.replace("rows.jsonl", "gone.jsonl") if environment.rank == 1 else argument for argument in arguments]
    ludic_command(environment, *given)


def test_a_wrong_setting_on_one_rank_leaves_no_folder_and_is_not_retried(tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}+1=", "completion": str(n + 1)}) + "\n" for n in range(20)))
    settings = [*NETWORK, f"data={data}", "heldout=0", f"output={tmp_path}", "name=run"]
    with Ranks(tmp_path / "log", 2, "sft", *settings, work=lacks_the_data) as run:
        assert run.wait() == [78, 78]
        assert "gone.jsonl" in run.read(0, "err")
        assert re.search("setting up .*failed on rank 1 of 2", run.read(0, "err"))
    assert not (tmp_path / "run").exists()


def asked_to_end_before_step_4(environment, signalled, *arguments):
    """Rank `signalled` gets SIGTERM."""
    signal_before_step(environment, 4, signalled, signal.SIGTERM)
    ludic_command(environment, *arguments)


@pytest.mark.parametrize("signalled", [0, 1])
def test_a_signal_to_one_rank_saves_and_ends_all_and_the_run_resumes(signalled, tmp_path):
    settings = [*SFT, "epochs=2", f"output={tmp_path}"]
    with Ranks(tmp_path / "log", 2, signalled, "sft", *settings, "name=run", work=asked_to_end_before_step_4) as run:
        assert run.wait() == [128 + signal.SIGTERM] * 2, run.read_all()
    assert json.loads((tmp_path / "run" / "progress.json").read_text())["phase"] == "sft"
    world_size = 2 - signalled  # a run resumes on any number of ranks; on as many it is the same run
    with Ranks(tmp_path / "again", world_size, "sft", "--resume", str(tmp_path / "run")) as run:
        assert run.wait() == [0] * world_size, run.read_all()
    steps = [line["step"] for line in metrics_of(tmp_path / "run") if "train/loss" in line]
    assert steps == list(range(1, 13))  # 36 rows in batches of 6, twice
    assert json.loads((tmp_path / "run" / "progress.json").read_text())["phase"] == "done"
    if world_size == 1:
        return
    with Ranks(tmp_path / "whole-log", 2, "sft", *settings, "name=whole") as run:
        assert run.wait() == [0, 0], run.read_all()
    assert largest_difference(tmp_path / "run", tmp_path / "whole") == 0.0


def killed_before_step_6(environment, *arguments):
    """Rank 1 is killed, and two steps after a checkpoint are lost, or one if rank 0 ends before it
    has logged the other."""
    signal_before_step(environment, 6, 1, signal.SIGKILL)
    ludic_command(environment, *arguments)


def begun_again(environment, *arguments):
    """The same command line, as an agent of torchrun starts it after a failure elsewhere."""
    os.environ |= {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": "a"}
    ludic_command(environment, *arguments)


def test_ranks_that_are_started_again_resume_what_they_began(tmp_path):
    arguments = ["sft", *SFT, "rows=80", "checkpoint.every_n_steps=3", f"output={tmp_path}", "name=run"]
    with Ranks(tmp_path / "log", 2, *arguments, work=killed_before_step_6) as run:
        assert run.wait() == [75, -signal.SIGKILL]
    with Ranks(tmp_path / "again", 2, *arguments, work=begun_again) as run:
        assert run.wait() == [0, 0], run.read_all()
    steps = [line["step"] for line in metrics_of(tmp_path / "run") if "train/loss" in line]
    assert steps == list(range(1, 13))  # 72 rows in batches of 6
    assert "steps of sft are repeated" in run.read(0, "out")
    with Ranks(tmp_path / "other", 2, *arguments) as run:  # by a launcher that began nothing
        assert set(run.wait()) == {78}
        assert "exists already" in run.read(0, "err")
