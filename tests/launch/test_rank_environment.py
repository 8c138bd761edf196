"""Which rank a process is, from what torchrun and srun set."""

import doctest

import pytest

from ludic.errors import ConfigError
from ludic.launch import rank_environment
from ludic.launch.rank_environment import RankEnvironment, first_host, read_rank_environment, without_rank

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "MASTER_ADDR": "node7", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "gpu[08-09]",
    "SLURM_JOB_ID": "100001",
    "SLURM_STEP_ID": "2",
}


def test_torchrun_says_the_rank_and_who_serves_the_store():
    assert read_rank_environment(TORCHRUN) == RankEnvironment(5, 16, 1, "node7", 29500)
    by_agent = read_rank_environment({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"})
    assert by_agent == RankEnvironment(5, 16, 1, "node7", 29500, has_store=True, attempt="2")
    elastic = read_rank_environment({**TORCHRUN, "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "a"})
    assert elastic == RankEnvironment(5, 16, 1, "node7", 29500, num_machines=2, run_id="a")


def test_srun_says_the_rank_and_the_first_node_serves_the_store():
    port = 12_000 + (16 * 100_001 + 2) % 16_000
    assert read_rank_environment(SRUN) == RankEnvironment(3, 4, 1, "gpu08", port)
    assert read_rank_environment({**SRUN, "MASTER_ADDR": "head", "MASTER_PORT": "4000"}) == RankEnvironment(3, 4, 1, "head", 4000)
    assert read_rank_environment(SRUN, port=5000) == RankEnvironment(3, 4, 1, "gpu08", 5000)


def test_torchrun_inside_of_a_slurm_step_wins():
    assert read_rank_environment({**SRUN, **TORCHRUN}) == RankEnvironment(5, 16, 1, "node7", 29500)
    assert read_rank_environment({**SRUN, **TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"}) is None


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"WORLD_SIZE": "8"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "a[1-2]"},  # a batch script
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    ],
)
def test_everything_else_is_one_process(environ):
    assert read_rank_environment(environ) is None


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({**TORCHRUN, "RANK": "16"}, r"rank in the environment \(16\) .*below 16"),
        ({**TORCHRUN, "RANK": "x"}, "RANK=x"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "no MASTER_ADDR"),
        (
            {name: value for name, value in SRUN.items() if name != "SLURM_STEP_NODELIST"},
            "SLURM_STEP_NODELIST and MASTER_ADDR are not set",
        ),
    ],
)
def test_an_environment_that_contradicts_itself_is_refused(environ, message):
    with pytest.raises(ConfigError, match=message):
        read_rank_environment(environ)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a", "a"), ("a,b", "a"), ("a[1-3]", "a1"), ("a[07,09],b", "a07"), ("a1,b[2-3]", "a1"), ("r[1-2]n[3-4]", "r1n3"), ("", "")],
)
def test_the_first_host_of_slurms_lists(nodes, first):
    assert first_host(nodes) == first


def test_examples_of_docstrings():
    assert doctest.testmod(rank_environment).failed == 0


@pytest.mark.parametrize("environ", [{**TORCHRUN, "TORCHELASTIC_RUN_ID": "x"}, SRUN])
def test_a_process_that_a_rank_starts_is_no_rank(environ):
    left = without_rank({**environ, "PATH": "/bin"})
    assert read_rank_environment(left) is None
    assert left["PATH"] == "/bin"
    assert "SLURM_JOB_ID" in left or environ is not SRUN  # for programs that ask what job they are in
