"""The settings of where the processes of a run are: short forms, and what is refused."""

import pytest

from ludic.errors import ConfigError
from ludic.recipes.actors import check_actors
from ludic.recipes.compose import compose, config_hash
from ludic.recipes.epochs_schema import compose_dpo, compose_rm, compose_sft
from ludic.recipes.processes import needs_launcher


@pytest.mark.parametrize(
    ("short", "long"),
    [
        (["ranks=2"], ["place.trainers=2"]),
        (["trainers=8", "actors=4"], ["place.trainers=8", "place.actors=4"]),
        (["place=slurm"], ["place.on=slurm"]),
        (["place=ray"], ["place.on=ray"]),
        (["place=ray://host:10001"], ["place.on=ray", "place.address='ray://host:10001'"]),
    ],
)
def test_a_short_form_is_the_setting(short, long):
    assert compose(["sort", *short]).place == compose(["sort", *long]).place


def test_a_mapping_is_the_section_of_the_short_name():
    assert compose(["sort", "ranks={timeout_s: 3}"]).ranks.timeout_s == 3.0
    assert compose(["sort", "place={actors: 3}"]).place.actors == 3


def test_supervised_runs_have_the_settings_of_trainers():
    for recipe in (
        compose_sft(["ranks=2", "place=ray"]),
        compose_rm(["ranks=2", "place=ray"]),
        compose_dpo(["ranks=2", "place=ray"]),
    ):
        assert (recipe.place.trainers, recipe.place.on) == (2, "ray")
    with pytest.raises(ConfigError, match=r"there is no setting 'place\.actors'"):
        compose_sft(["actors=2"])
    with pytest.raises(ConfigError, match=r"place\.trainers \(0\) must be at least 1"):
        compose_sft(["ranks=0"])


def test_where_a_run_executes_does_not_change_its_hash():
    assert config_hash(compose(["sort"])) == config_hash(compose(["sort", "place=ray", "trainers=2", "place.trainer_cpus=3"]))
    assert config_hash(compose(["sort"])) != config_hash(compose(["sort", "actors=2"]))
    assert config_hash(compose_sft([])) == config_hash(compose_sft(["ranks=2"]))


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        (["on=cloud"], r"place.on \(cloud\) .*local, ray, slurm"),
        (["address=auto"], r"place.address \(auto\) needs place.on=ray"),
        (["insecure=true"], r"place.insecure \(True\) needs place.on=ray; set that too"),
        (["nodes=2", "trainers=2"], r"place.nodes \(2\) needs place.on=ray or place.on=slurm; .*torchrun"),
        (["on=ray", "nodes=2", "trainers=3"], r"place.trainers \(3\) must be a multiple of place.nodes \(2\)"),
        (["on=ray", "nodes=2", "trainers=2", "min_nodes=3"], r"place.min_nodes \(3\) must be at most place.nodes \(2\)"),
        (["on=ray", "nodes=2", "trainers=2", "min_nodes=0"], r"place.min_nodes \(0\) must be at least 1"),
        (["stop_s=0.5"], r"place.stop_s \(0.5\) must be at least 1"),
        (["nodes=0"], r"place.nodes \(0\) must be at least 1"),
        (["actors=-1"], r"place.actors \(-1\) must be at least 0"),
        (["actor_gpus=1.5"], r"place.actor_gpus \(1.5\) .*whole number, .*less than 1"),
        (["actor_cpus=-1"], r"place.actor_cpus \(-1.0\) must be at least 0"),
        (["slurm_options=['--x']"], r"place.slurm_options \(\['--x'\]\) needs place.on=slurm"),
    ],
)
def test_wrong_settings_are_refused_with_the_rule(settings, rule):
    with pytest.raises(ConfigError, match=rule):
        check_actors(compose(["sort", *(f"place.{setting}" for setting in settings)]))
    if not any("actor" in setting for setting in settings):
        with pytest.raises(ConfigError, match=rule):
            compose_sft([f"place.{setting}" for setting in settings])


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        (["place=ray", "actors=2"], "need a queue on Redis: set queue.url=redis://HOST:6379/0"),
        (["place=slurm", "actors=2", "queue.url=q.sqlite"], "need a queue on Redis"),
    ],
)
def test_processes_that_would_not_find_each_other_are_refused(settings, rule):
    with pytest.raises(ConfigError, match=rule):
        check_actors(compose(["sort", *settings]))
    check_actors(compose(["sort", "place=ray", "place.address=local", "actors=2"]))


def test_servers_of_a_run_are_sampled_from():
    recipe = compose(["sort", "servers=2"])
    assert (recipe.place.servers, recipe.inference.kind) == (2, "vllm")
    check_actors(recipe)
    check_actors(compose(["sort", "servers=2", "actors=2", "inference.weights=disk"]))
    assert not needs_launcher(recipe.place)
    with pytest.raises(ConfigError, match=r"there is no setting 'place\.servers'"):
        compose_sft(["servers=2"])


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        (["inference.url=http://127.0.0.1:8000"], r"place.servers \(2\) .* inference.url; leave one"),
        (["inference=local"], r"place.servers \(2\) .* inference.kind=local; leave one"),
        (["inference.weights=gloo"], r"inference.weights \(gloo\) must be disk with place.servers"),
        (["place.server_gpus=1.5"], r"place.server_gpus \(1.5\) must be a whole number"),
        (["servers=-1"], r"place.servers \(-1\) must be at least 0"),
    ],
)
def test_settings_that_do_not_go_with_servers_are_refused(settings, rule):
    with pytest.raises(ConfigError, match=rule):
        check_actors(compose(["sort", "servers=2", *settings]))


def test_one_process_trains_itself_and_so_does_one_with_actors():
    assert not needs_launcher(compose(["sort"]).place)
    assert not needs_launcher(compose(["sort", "actors=2"]).place)
    assert needs_launcher(compose(["sort", "place=ray"]).place)
    assert needs_launcher(compose(["sort", "trainers=2"]).place)
