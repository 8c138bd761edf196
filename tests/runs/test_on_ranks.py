"""Exit statuses of ranks, how their processes end, and the output of ranks other than 0."""

import errno
import logging
import os
import re
import sys

import pytest
import typer
from torch.distributed import HashStore

from ludic.cli.options import report_user_errors
from ludic.errors import CheckpointError, ConfigError, DataError, NonFiniteError, OwnershipLost, QueueError, RankError
from ludic.launch.rank_environment import RankEnvironment
from ludic.recipes.compose import compose, config_hash
from ludic.recipes.epochs_schema import compose_sft
from ludic.recipes.processes import RanksSection, phase_deadlines
from ludic.runs import on_ranks
from ludic.runs.exit_status import rank_exit_status
from ludic.runs.on_ranks import RankLog
from ludic.training import watchdog
from ludic.training.ranks import session
from ludic.training.ranks.rendezvous import Failure, Rendezvous


@pytest.fixture
def two_ranks(monkeypatch):
    """The meetings of two ranks; this process is rank 0. A watchdog of the test is closed."""
    store = HashStore()
    meetings = [Rendezvous(store, rank, 2) for rank in range(2)]
    monkeypatch.setattr(session, "_rendezvous", meetings[0])
    yield meetings
    if watchdog._active is not None:
        watchdog._active.close()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RankError("rank 1 is gone"), 75),
        (RankError("its data are wrong", exit_code=78), 78),
        (QueueError("it does not answer"), 75),
        (OwnershipLost("another trainer has the queue"), 78),
        (ConfigError("steps (-1)"), 78),
        (DataError("row 3"), 78),
        (CheckpointError("all are damaged"), 78),
        (OSError(errno.ENOSPC, "No space left on device"), 78),
        (NonFiniteError("the loss is NaN"), 1),
        (AssertionError("a bug"), 1),
        (KeyboardInterrupt(), 1),
    ],
)
def test_the_exit_status_says_whether_to_start_again(error, status):
    assert rank_exit_status(error) == status


def test_an_error_of_a_rank_says_which_and_has_its_status(monkeypatch, capsys):
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "host", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(typer.Exit) as ended, report_user_errors():
        raise ConfigError("steps (-1) must be at least 0")
    assert ended.value.exit_code == 78
    assert re.search(r"^ludic: rank 1 of 4: steps \(-1\) .*at least 0\n$", capsys.readouterr().err)
    monkeypatch.setenv("RANK", "9")  # the error that an environment like this causes is shown, too
    with pytest.raises(typer.Exit) as ended, report_user_errors():
        raise ConfigError("rank 9 of 4")
    assert ended.value.exit_code == 2


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        (lambda: None, 0, ""),
        (lambda: sys.exit(75), 75, ""),
        (lambda: sys.exit(), 0, ""),
        (lambda: sys.exit("text"), 1, ""),
        (lambda: 1 // 0, 1, "ZeroDivisionError"),
    ],
)
def test_a_rank_ends_without_clean_up(ends, code, said, monkeypatch, capsys):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(on_ranks.logging, "shutdown", lambda: None)
    with on_ranks.ended_as_rank():
        ends()
    assert codes == [code]
    assert said in capsys.readouterr().err


def test_the_end_of_a_rank_with_an_error_has_a_deadline(two_ranks):
    with pytest.raises(OSError, match="full"), on_ranks._watched(RankEnvironment(0, 2, 0, "host", 1), RanksSection()):
        raise OSError("full")
    assert 50 < watchdog.remaining_s(0.0) <= on_ranks.ENDING_S


def test_a_rank_that_outlives_another_ends_with_the_status_of_its_failure(two_ranks):
    two_ranks[1].report_failure(Failure(1, "host1", "the data are wrong", 78))
    with on_ranks._watched(RankEnvironment(0, 2, 0, "host", 1), RanksSection()):
        said, status = watchdog._active._find_failure()
    assert re.search("rank 1 .*host1: the data are wrong", said)
    assert status == 78
    assert watchdog._active is None


def test_a_rank_that_outlives_one_that_was_killed_ends_too_and_says_so_by_itself(two_ranks, monkeypatch):
    """A collective of NCCL would wait for the killed one until its timeout."""
    monkeypatch.setattr(two_ranks[0], "describe_ended", lambda: "rank 1 of 2 ended without a word")
    with on_ranks._watched(RankEnvironment(0, 2, 0, "host", 1), RanksSection()):
        assert watchdog._active._find_failure() == ("rank 1 of 2 ended without a word", 75)


def test_times_of_ranks_are_checked_and_change_no_result():
    recipe = compose(["ranks.timeout_s=30", "ranks.save_s=7"])
    assert config_hash(recipe) == config_hash(compose())
    assert phase_deadlines(recipe.ranks)["save"] == 7
    for make in (compose, compose_sft):
        with pytest.raises(ConfigError, match=r"ranks.step_s \(0.0\) must be above 0"):
            make(["ranks.step_s=0"])
        with pytest.raises(ConfigError, match=r"ranks.port \(70000\) must be at least 1 and at most 65535"):
            make(["ranks.port=70000"])
        with pytest.raises(ConfigError, match=r"ranks.port \(0\) must be at least 1 and at most 65535"):
            make(["ranks.port=0"])


def test_what_is_printed_early_and_late_is_in_one_file_and_only_errors_are_shown(tmp_path, capsys):
    with RankLog(3) as log, log.in_use():
        print("early")
        logging.getLogger("ludic.x").warning("a remark")
        log.open_file(tmp_path / "ranks")
        print("late")
        logging.getLogger("ludic.x").error("a fault")
    content = (tmp_path / "ranks" / "rank_0003.log").read_text()
    assert content.splitlines() == ["early", "a remark", "late", "a fault"]
    out, err = capsys.readouterr()
    assert out == ""
    assert "rank 3: a fault" in err
    assert "a remark" not in err
    assert not isinstance(sys.stdout, RankLog)


def test_a_log_is_continued_and_nothing_is_left_without_a_folder(tmp_path):
    for text in ("first", "second"):
        with RankLog(1) as log:
            log.open_file(tmp_path)
            log.write(f"{text}\n")
    assert (tmp_path / "rank_0001.log").read_text() == "first\nsecond\n"
    with RankLog(2) as log:
        log.write("lost with the run")
    assert len(list(tmp_path.iterdir())) == 1
