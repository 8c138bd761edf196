"""The pair of `builtin/maxent.yaml`: MaxEnt-GRPO and GRPO differ in the algorithm alone."""

from dataclasses import asdict
from typing import Any

import pytest

from ludic.recipes.build import build_algorithm
from ludic.recipes.compose import compose


def differences(left: Any, right: Any, path: str = "") -> set[str]:
    """The paths of the settings that differ."""
    if isinstance(left, dict) and isinstance(right, dict):
        keys = left.keys() | right.keys()
        return {found for key in keys for found in differences(left.get(key), right.get(key), f"{path}.{key}".lstrip("."))}
    return set() if left == right else {path}


def test_the_differences_of_two_trees_are_their_paths() -> None:
    left = {"a": {"b": 1, "c": 2}, "d": None}
    assert differences(left, {"a": {"b": 1, "c": 3}, "d": None, "e": 4}) == {"a.c", "e"}
    assert differences(left, left) == set()


@pytest.mark.parametrize("seed", [0, 7])
def test_the_pair_differs_in_the_algorithm_alone(seed: int) -> None:
    pair = [asdict(compose(["maxent", f"algorithm={name}", f"seed={seed}"])) for name in ("maxent_grpo", "grpo")]
    assert {path.split(".")[0] for path in differences(*pair)} <= {"algorithm", "algorithm_args", "controllers"}
    assert pair[0]["algorithm"] != pair[1]["algorithm"]


def test_without_an_algorithm_the_recipe_has_maxent() -> None:
    assert compose(["maxent"]) == compose(["maxent", "algorithm=maxent_grpo"])


def test_both_clip_alike_and_take_means_over_tokens() -> None:
    losses = [build_algorithm(compose(["maxent", f"algorithm={name}"])).loss for name in ("maxent_grpo", "grpo")]
    assert losses[0] == losses[1]
