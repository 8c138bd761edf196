"""Which run the ranks of torchrun resume when its agents start them again; without a process
group."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ludic.runs import command
from ludic.runs.command import RunCommand
from ludic.runs.directory import RunDirectory
from ludic.training import ranks


class EmptyFolder(RunDirectory):
    """An empty folder in `output`."""

    compose = staticmethod(lambda arguments: SimpleNamespace(output=arguments[0], name=arguments[1]))
    default_name = staticmethod(lambda recipe: "run")

    @classmethod
    def begin(cls, recipe):
        path = Path(recipe.output) / recipe.name
        path.mkdir()
        return cls(path)


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """Begins a run of this name."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "host", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")  # another agent may count differently
    monkeypatch.setattr(ranks, "is_distributed", lambda: True)
    monkeypatch.setattr(command, "resume_run", lambda kind, path, changes, compose: ("its recipe", path))
    return lambda name: RunCommand(EmptyFolder).begin(EmptyFolder.compose([str(tmp_path), name]))


@pytest.fixture
def start(begin, tmp_path, monkeypatch):
    """The folder that ranks of these agents resume; None for a new run."""

    def open_from(*agents, name="one"):
        monkeypatch.setattr(ranks, "gather_json", lambda own: list(agents))
        return RunCommand(EmptyFolder, [str(tmp_path), name]).open(follows=False)[1]

    return open_from


def test_ranks_resume_what_one_of_their_agents_began_also_if_rank_0_has_moved(begin, start, tmp_path):
    assert start("a 1", "b 2") is None
    begin("one")
    assert start("a 1", "b 2") == tmp_path / "one"
    assert start("c 3", "b 2") == tmp_path / "one"  # rank 0 is on a machine that is new
    assert start("c 3") == tmp_path / "one"  # which knows the run from then on
    assert start("d 4") is None


def test_ranks_resume_a_run_in_a_nested_folder(begin, start, tmp_path):
    (tmp_path / "deep").mkdir()
    assert start("a 1", name="deep/one") is None
    begin("deep/one")
    assert start("a 1", name="deep/one") == tmp_path / "deep" / "one"


def test_other_launchers_start_no_ranks_again(begin, start, monkeypatch):
    assert start("a 1") is None
    begin("one")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert start("a 1") is None


def test_two_commands_of_one_launcher_are_two_runs(monkeypatch):
    names = []
    for argument in ("one", "two", "one"):
        monkeypatch.setattr(sys, "argv", ["ludic", "train", argument])
        names.append(command._name_launcher())
    assert names[0] == names[2] != names[1]
