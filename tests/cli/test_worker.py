"""`ludic worker`: what it refuses, and the exit statuses by which a supervisor decides."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ludic.cli.app import app
from ludic.errors import CheckpointError, ConfigError, OwnershipLost, QueueDataLost, QueueError, QueueRefused
from ludic.recipes.compose import compose
from ludic.runs.directory import RunDirectory
from ludic.runs.exit_status import exit_status


def refused(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code in (1, 2), result.output
    return " ".join(result.output.split())


@pytest.mark.parametrize("role", ["actor", "trainer"])
def test_a_folder_without_a_run_is_refused(tmp_path: Path, role: str) -> None:
    assert "is not the folder of a run" in refused("worker", role, tmp_path)


def test_a_run_without_actors_is_refused_with_the_remedy(tmp_path: Path) -> None:
    directory = RunDirectory.begin(compose(["sort", f"output={tmp_path}", "name=run"]))
    directory.release()
    assert re.search("without actors; .*place.actors=N", refused("worker", "actor", directory.path))


def test_an_actor_of_another_version_of_ludic_is_refused(tmp_path: Path) -> None:
    directory = RunDirectory.begin(compose(["sort", "place.actors=1", f"output={tmp_path}", "name=run"]))
    progress = directory.read_progress()
    assert progress.versions is not None
    progress.versions["ludic"] = "0.0.1"
    directory.write_progress(progress)
    directory.release()
    said = refused("worker", "actor", directory.path)
    assert "the run began with ludic 0.0.1" in said
    assert "install the same version" in said


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (QueueError("no answer"), 75),
        (QueueDataLost("gone"), 75),
        (QueueRefused("a wrong password"), 78),
        (OwnershipLost("another trainer"), 78),
        (ConfigError("wrong"), 2),
        (CheckpointError("damaged"), 1),
    ],
)
def test_the_exit_status_says_whether_a_restart_may_help(error: Exception, status: int) -> None:
    assert exit_status(error) == status
