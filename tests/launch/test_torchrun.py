"""The command lines of torchrun's agents, as torchrun itself reads them."""

import pytest
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, parse_args

from ludic.errors import ConfigError
from ludic.launch.process import Process
from ludic.launch.torchrun import AGENT, ENV, STOP_VARIABLE, torchrun_argv


def read(argv):
    """(launch configuration, what each rank runs) of a command."""
    assert argv[:3] == ("python", "-m", AGENT)
    config, command, arguments = config_from_args(parse_args(list(argv[3:])))
    return config, [command, *arguments]


def test_one_machine_needs_no_address():
    config, command = read(torchrun_argv(["-m", "ludic.cli", "train", "sort"], ranks=4, max_restarts=2))
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node, config.max_restarts) == (1, 1, 4, 2)
    assert command[-4:] == ["-m", "ludic.cli", "train", "sort"]
    assert "--standalone" in torchrun_argv(["train.py"], ranks=4)


@pytest.mark.parametrize("node", [0, 1])
def test_agents_of_several_machines_meet_at_the_first(node):
    argv = torchrun_argv(
        ["train.py", "--x"],
        ranks=8,
        nodes=2,
        min_nodes=1,
        node=node,
        host="10.0.0.1",
        port=29501,
        run_id="a",
        rendezvous_timeout_s=90,
    )
    config, command = read(argv)
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node, config.run_id) == (1, 2, 8, "a")
    assert (config.rdzv_backend, config.rdzv_endpoint) == ("c10d", "10.0.0.1:29501")
    assert config.rdzv_configs["join_timeout"] == "90"
    assert config.rdzv_configs["is_host"] == str(int(node == 0))
    assert command[-2:] == ["train.py", "--x"]


def test_the_environment_of_agents_leaves_the_store_to_rank_0(monkeypatch):
    for name in ENV:
        monkeypatch.delenv(name, raising=False)
    shares_store = DynamicRendezvousHandler.use_agent_store.fget
    assert shares_store(None)
    for name, value in Process("trainer0", "trainer", ("true",), env=ENV).env.items():
        monkeypatch.setenv(name, value)
    assert not shares_store(None)


def test_all_machines_are_needed_unless_said_otherwise():
    config, _ = read(torchrun_argv(["train.py"], ranks=1, nodes=3, host="a"))
    assert (config.min_nodes, config.max_nodes) == (3, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 0}, r"ranks \(0\)"),
        ({"command": []}, "needs a command"),
        ({"max_restarts": -1}, r"max_restarts \(-1\)"),
        ({"nodes": 2}, "2 nodes the host"),
        ({"nodes": 2, "host": "a", "min_nodes": 3}, r"min_nodes \(3\) .*at most 2"),
        ({"nodes": 2, "host": "a", "node": 2}, r"node \(2\) .*below 2"),
    ],
)
def test_impossible_launches_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        torchrun_argv(**{"command": ["train.py"], "ranks": 1, **changes})


def test_torch_takes_the_time_for_a_stop_from_the_environment(monkeypatch):
    if not hasattr(LaunchConfig, "shutdown_timeout"):
        pytest.skip("this torch always waits 30 s")
    monkeypatch.setenv(STOP_VARIABLE, "90")
    config, _ = read(torchrun_argv(["train.py"], ranks=2))
    assert config.shutdown_timeout == 90
