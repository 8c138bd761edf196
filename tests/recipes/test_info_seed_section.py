"""The section `info_seed` of a recipe: the algorithm that it makes, and what is refused."""

import pytest

from ludic.errors import ConfigError
from ludic.recipes.build import build_algorithm, build_episodic_task
from ludic.recipes.compose import compose
from ludic.runs.rollouts import check_rollouts, make_training_requests
from ludic.training.info_seed import InfoSeed, seed_of, without_tags
from ludic.training.types import SAWBatch

ON = ["info_seed.num_seeds=3", "info_seed.coeff=0.5", "rollout.group_size=4"]


@pytest.mark.parametrize("algorithm", ["grpo", "maxent_grpo", "reinforce_baseline"])
def test_seeded_answers_are_of_the_group_and_the_loss_has_their_term(algorithm):
    built = build_algorithm(compose(["maxent", f"algorithm={algorithm}", *ON]))
    [term] = [term for term in built.loss.terms if term.name == "seed"]
    assert (term.weight, term.loss.coeff) == (1.0, 0.5)
    assert "seed_id" in built.sample_columns
    if algorithm != "reinforce_baseline":
        assert built.credit_assigner.group_size == 4 + 3
    assert built.preprocess(SAWBatch([])).items == without_tags(SAWBatch([])).items


def test_without_seeds_an_algorithm_is_as_it_was():
    built = build_algorithm(compose(["maxent", "algorithm=grpo"]))
    assert built.rescores is None
    assert built.credit_assigner.group_size == 8


def test_each_problem_is_asked_plainly_and_with_each_seed():
    recipe = compose(["maxent", *ON, "rollout.prompts=2"])
    task = build_episodic_task(recipe)
    requests = make_training_requests(task, recipe.rollout, seed=0, info_seed=InfoSeed(3))()
    assert [seed_of({"request_meta": request.meta}) for request in requests] == [0, 0, 0, 0, 1, 2, 3] * 2
    plain = make_training_requests(task, recipe.rollout, seed=0)()
    assert [request.sampling_seed for request in requests[:4]] == [request.sampling_seed for request in plain[:4]]


def check(recipe):
    build_algorithm(recipe)
    check_rollouts(recipe, build_episodic_task(recipe))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["maxent", "info_seed.coeff=0.5"], r"info_seed\.coeff \(0.5\) needs info_seed\.num_seeds"),
        (["maxent", *ON, "info_seed.eval_samples=-1"], r"info_seed\.eval_samples \(-1\) must be at least 0"),
        (["maxent", *ON, "info_seed.loss=mse"], r"loss \('mse'\) must be"),
        (["tictactoe", *ON], r"info_seed\.num_seeds \(3\) .*one turn"),
        (
            ["maxent", *ON, "rollout.over_sampling_factor=2"],
            r"num_seeds \(3\) .* rollout\.over_sampling_factor; leave one",
        ),
        (["maxent", *ON, "place.actors=2"], r"num_seeds \(3\) .* place\.actors; leave one"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        check(compose(arguments))
