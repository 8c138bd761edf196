"""Processes on a real Ray cluster of this machine: each part of it is killed.

Ray listens on all interfaces, so these tests run in a network namespace with a loopback interface
only, whose processes end with it.
"""

import json
import re
import sys
from pathlib import Path

import pytest
from ray_namespace import run_in_namespace

from ludic.errors import ConfigError, MissingExtraError
from ludic.launch.process import Process
from ludic.launch.ray import RayPlace

SUPPORT = Path(__file__).parents[1] / "support"
KILLS = ["actor0", "trainer", "holder of actor1"]


def play_scenarios(folder, targets):
    """The result of each scenario."""
    done = run_in_namespace([sys.executable, str(SUPPORT / "ray_scenarios.py"), str(folder), *targets], folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(map(json.loads, done.stdout.splitlines()))


@pytest.mark.integration
def test_a_run_on_ray_ends_right_whatever_is_killed_and_unsafe_clusters_are_refused(tmp_path):
    """One test, since clusters take long to start."""
    results = play_scenarios(tmp_path, KILLS)
    local, machines = results["local"], results["machines"]
    assert local["status"] == 0, local
    assert [target for target, _ in local["seconds"]] == KILLS
    assert (local["left"], local["hosts"]) == ([], ["127.0.0.1"])
    assert results["driver"]["left"] == []
    assert machines["status"] == 0, machines
    assert machines["left"] == []
    assert re.search(r"big 64 CPU; .*3 machines \(", results["no room"][1])
    assert "LaunchError" in results["wrong token"][1]
    assert re.search("demands no token, .*run code", results["no token"][1])
    assert {results[name][0] for name in ("no room", "wrong token", "no token")} == {1}


@pytest.mark.slow
def test_the_processes_of_a_machine_that_is_lost_run_on_another(tmp_path):
    """Ray notices a lost machine after 20 s and more."""
    machines = play_scenarios(tmp_path, ["node of actor0"])["machines"]
    assert machines["status"] == 0, machines
    assert [target for target, _ in machines["seconds"]] == ["node of actor0"]
    assert machines["left"] == []


def test_authentication_may_not_be_switched_off_without_saying_so(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ConfigError, match="RAY_AUTH_MODE is disabled, and a token is required"):
        RayPlace([Process("a", "trainer", ("true",))], tmp_path)


def test_the_extra_is_named_where_ray_is_not_installed(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"ludic-rl\[ray\]"):
        RayPlace([Process("a", "trainer", ("true",))], tmp_path)
