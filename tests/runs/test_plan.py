"""The processes that a recipe asks for."""

from pathlib import Path

import pytest

from ludic.errors import ConfigError
from ludic.launch.process import PYTHON, check_processes
from ludic.launch.torchrun import ENV, STOP_VARIABLE
from ludic.recipes.compose import compose
from ludic.recipes.epochs_schema import compose_sft
from ludic.runs.launching import describe_lacking_gpus, fit_job, plan_processes


def test_a_run_without_actors_is_its_trainer(tmp_path: Path) -> None:
    (trainer,) = plan_processes(compose(["sort"]), tmp_path)
    assert (trainer.name, trainer.role) == ("trainer", "trainer")
    assert trainer.argv == (PYTHON, "-m", "ludic.cli", "worker", "trainer", str(tmp_path))


def test_each_actor_has_a_name_and_the_folder_of_the_run(tmp_path: Path) -> None:
    planned = plan_processes(compose(["sort", "place.actors=3", "place.restarts=5"]), tmp_path)
    check_processes(planned)
    assert [process.name for process in planned] == ["trainer", "actor0", "actor1", "actor2"]
    assert planned[2].argv == (PYTHON, "-m", "ludic.cli", "worker", "actor", str(tmp_path), "--name", "actor1")
    assert {process.restarts for process in planned} == {5}


def test_trainers_are_the_ranks_of_one_agent_on_each_machine(tmp_path: Path) -> None:
    settings = ["place=ray", "trainers=8", "place.nodes=2", "place.min_nodes=1", "place.trainer_gpus=1", "ranks.port=29555"]
    planned = plan_processes(compose(["sort", *settings, "ranks.rendezvous_timeout_s=90"]), tmp_path)
    check_processes(planned)
    assert [(process.name, process.role, process.cpus, process.gpus) for process in planned] == [
        ("trainer0", "trainer", 4, 4),
        ("trainer1", "trainer", 4, 4),
    ]
    for node, process in enumerate(planned):
        assert process.argv[-5:] == ("-m", "ludic.cli", "worker", "trainer", str(tmp_path))
        assert f"--rdzv-conf=join_timeout=90,is_host={int(node == 0)}" in process.argv
        assert {"--nproc-per-node=4", "--nnodes=1:2", "--rdzv-endpoint={host:trainer0}:29555"} <= set(process.argv)
        assert process.named_hosts() == {"trainer0"}
        assert dict(process.env) == {**ENV, STOP_VARIABLE: "120"}


def test_servers_listen_to_the_machine_that_all_share_or_at_the_address_of_their_own(tmp_path: Path) -> None:
    settings = ["servers=2", "actors=1", "place.server_gpus=1", "place.server_cpus=3", "place.restarts=9"]
    planned = plan_processes(compose(["sort", *settings]), tmp_path)
    assert [process.name for process in planned] == ["trainer", "server0", "server1", "actor0"]
    command = (PYTHON, "-m", "ludic.cli", "worker", "server", str(tmp_path), "--name", "server1", "--host")
    assert planned[2].argv == (*command, "127.0.0.1")
    assert (planned[2].role, planned[2].cpus, planned[2].gpus, planned[2].restarts) == ("server", 3, 1, 9)
    for place in (["place=ray", "place.address=auto"], ["place=slurm"]):
        planned = plan_processes(compose(["sort", *settings, "queue.url=redis://h:1/0", *place]), tmp_path)
        check_processes(planned)
        assert planned[2].argv == (*command, "{host:server1}")
    planned = plan_processes(compose(["sort", *settings, "place=ray", "place.address=local"]), tmp_path)
    assert planned[2].argv == (*command, "127.0.0.1")


def test_a_supervised_run_has_trainers_and_nothing_else(tmp_path: Path) -> None:
    (trainer,) = plan_processes(compose_sft(["ranks=2"]), tmp_path)
    assert trainer.argv[-5:] == ("-m", "ludic.cli", "worker", "trainer", str(tmp_path))
    assert dict(trainer.env) == {STOP_VARIABLE: "120"}


def test_each_role_has_its_resources(tmp_path: Path) -> None:
    settings = ["actors=1", "place.trainer_cpus=4", "place.actor_cpus=2", "place.actor_gpus=0.5"]
    planned = plan_processes(compose(["sort", *settings]), tmp_path)
    found = [(process.name, process.cpus, process.gpus) for process in planned]
    assert found == [("trainer", 4, 0), ("actor0", 2, 0.5)]


@pytest.mark.parametrize(
    ("settings", "nodes", "cpus", "gpus"),
    [
        (["trainers=4", "place.nodes=2", "place.trainer_gpus=1", "place.trainer_cpus=3"], 2, 6, 2),
        (["trainers=2", "place.nodes=2", "actors=3", "place.actor_cpus=2"], 2, 4, 0),  # 1 + 1 + 2 and 2 + 2
        (["actors=1"], 1, 2, 0),
        (["servers=2", "place.nodes=2", "trainers=2", "place.trainer_gpus=1", "place.server_gpus=1"], 2, 2, 2),
    ],
)
def test_nodes_of_a_job_are_as_small_as_the_processes_allow(tmp_path, settings, nodes, cpus, gpus) -> None:
    recipe = compose(["sort", "place=slurm", *settings])
    job = fit_job(recipe.place, plan_processes(recipe, tmp_path), "run")
    assert (job.nodes, job.cpus_per_node, job.gpus_per_node) == (nodes, cpus, gpus)


def test_ranks_and_the_job_have_the_same_time_to_save(tmp_path: Path) -> None:
    recipe = compose(["sort", "place=slurm", "trainers=2", "place.stop_s=299.5"])
    (agent,) = plan_processes(recipe, tmp_path)
    assert agent.env[STOP_VARIABLE] == "300"
    assert fit_job(recipe.place, [agent], "run").notice_s == 360
    assert plan_processes(compose(["sort", "trainers=2"]), tmp_path)[0].env[STOP_VARIABLE] == "120"


@pytest.mark.parametrize(
    ("settings", "roles"),
    [
        (["place=ray"], "the trainer on ray; set place.trainer_gpus=1, "),
        (["place=slurm", "actors=2"], "the trainer and the actor on slurm; set place.trainer_gpus=1 place.actor_gpus=1, "),
        (["place=ray", "actors=2", "place.trainer_gpus=1"], "the actor on ray; set place.actor_gpus=1, "),
        (["place=ray", "place.trainer_gpus=1", "servers=2", "actors=1"], "the server on ray; set place.server_gpus=1, "),
        (["place=ray", "place.trainer_gpus=1", "actors=2", "inference=vllm"], None),  # its servers have GPUs of their own
        (["place=ray", "trainer.model_device=cpu"], None),
        (["trainers=2", "trainer.model_device=cuda"], None),  # on this machine all are seen
        (["place=ray", "place.trainer_gpus=1"], None),
    ],
)
def test_processes_that_will_see_no_gpu_are_named(tmp_path, settings, roles) -> None:
    recipe = compose(["sort", *settings])
    said = describe_lacking_gpus(recipe, plan_processes(recipe, tmp_path))
    assert (said is None) if roles is None else said.startswith(f"No GPU is reserved for {roles}")


def test_slurm_has_no_shares_of_a_gpu(tmp_path: Path) -> None:
    recipe = compose(["sort", "place=slurm", "actors=1", "place.actor_gpus=0.5"])
    with pytest.raises(ConfigError, match="Slurm has whole ones only"):
        fit_job(recipe.place, plan_processes(recipe, tmp_path), "run")
