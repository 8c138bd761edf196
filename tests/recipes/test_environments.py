"""The section `environments`: what an environment takes from the recipe, and what is refused."""

from fractions import Fraction
from pathlib import Path

import pytest

from ludic.errors import ConfigError, DataError
from ludic.recipes.compose import compose
from ludic.recipes.environments import TAKEN_NAMES, choose_environment, read_weights, split_recipe
from ludic.recipes.named_sources import check_named_sources, list_local_sources, list_read_files
from ludic.training.stats import OWN_PREFIXES

BOTH = ["sort", "environments={small: {task: {args: {digits: 4}}}, tools: {task: {kind: tools}}}"]


def test_an_environment_has_the_settings_of_the_recipe_but_for_its_own() -> None:
    own = ["environments.tools.rollout.group_size=3", "environments.small.algorithm_args={normalize: mean}"]
    recipe = compose([*BOTH, *own, "rollout.temperature=0.5", "rollout.group_size=5", "task.args.right=0.5"])
    parts = split_recipe(recipe)
    assert list(parts) == ["small", "tools"]
    assert (parts["small"].task.kind, parts["small"].task.args) == ("sort", {"digits": 4, "right": 0.5, "backwards": 0.5})
    assert (parts["tools"].task.kind, parts["tools"].task.args) == ("tools", {})
    assert [part.rollout.group_size for part in parts.values()] == [5, 3]
    assert [part.rollout.temperature for part in parts.values()] == [0.5, 0.5]
    assert parts["small"].algorithm_args == {**recipe.algorithm_args, "normalize": "mean"}
    assert parts["tools"].algorithm_args == recipe.algorithm_args
    assert (recipe.task.kind, recipe.rollout.group_size) == ("sort", 5)


def test_rows_make_an_environment_one_of_data_and_rows_of_the_recipe_are_for_no_other_task() -> None:
    sums = split_recipe(compose([*BOTH, "environments.sums={data: sums.jsonl, reward: math}"]))["sums"]
    assert (sums.task.kind, sums.task.args, sums.data, sums.reward) == ("data", {}, "sums.jsonl", "math")
    whole = ["data", "data=all.jsonl", "reward=math", "model=m", "environments={game: {task: {kind: tools}}, all: {}}"]
    parts = split_recipe(compose(whole))
    assert (parts["game"].data, parts["game"].reward) == (None, None)
    assert (parts["all"].data, parts["all"].reward, parts["all"].task.kind) == ("all.jsonl", "math", "data")


def test_weights_are_exact_and_begin_at_steps() -> None:
    own = ["environments.small.weight=0.1", "environments.tools.weight={0: 1, 200: 2.5}"]
    assert read_weights(compose([*BOTH, *own])) == [{0: Fraction(1, 10)}, {0: Fraction(1), 200: Fraction(5, 2)}]
    assert read_weights(compose(BOTH)) == [{0: Fraction(1)}] * 2
    assert read_weights(compose([*BOTH, "environments.small=null"])) == [{0: Fraction(1)}]


@pytest.mark.parametrize(
    ("setting", "rule"),
    [
        ("environments.tools.rollout.temperature=1", r"tools.rollout.temperature cannot differ between environments"),
        ("environments.tools.rollout.group_siz=1", r"did you mean rollout.group_size"),
        ("environments.tools.trainer.lr=1", r"environments.tools.trainer cannot differ.*set it for all"),
        ("environments.tools.algorithm_args.clip_eps_low=1", r"clip_eps_low belongs to the loss, which is one"),
        ("environments.tools.rollout.group_size=0", r"environments.tools: rollout.group_size \(0\) must be at"),
        ("environments.tools.rollout.group_size=few", r"environments.tools: Value 'few'"),
        ("environments.tools=3", r"environments.tools \(3\) must have settings, such as"),
        ("environments.tools.weight=-1", r"tools.weight \(-1\) must be a number >= 0"),
        ("environments.tools.weight=.nan", r"tools.weight .* must be a number >= 0"),
        ("environments.tools.weight={first: 1}", r"by the step from which they hold: \{0: 1"),
        ("environments={small: {weight: {0: 1, 5: 0}}, tools: {weight: 0}}", r"all weights are 0 from 5 on"),
        ("environments.perf={}", r"environments \(perf\) must have a name of letters"),
        ("environments.eval_x={}", r"no prefix of metrics"),
        ("environments={9x: {}}", r"environments \(9x\) must have a name"),
        ("info_seed.num_seeds=2", r"info_seed.num_seeds \(2\) does not go together with environments"),
        ("curriculum=pools", r"curriculum.kind \(pools\) does not go together"),
        ("agent=module:play", r"set environments.NAME.agent for those that it plays"),
    ],
)
def test_what_cannot_be_is_named_with_a_remedy(setting: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        compose([*BOTH, setting])


def test_groups_of_different_size_cannot_be_over_sampled() -> None:
    own = [*BOTH, "environments.tools.rollout.group_size=3"]
    compose(own)
    for setting in ("rollout.over_sampling_factor=1.5", "rollout.group_filter=nonzero_std"):
        with pytest.raises(ConfigError, match=r"group_size \(3, 8\) differs between environments"):
            compose([*own, setting])


def test_no_environment_has_the_name_of_another_prefix() -> None:
    assert {prefix.rstrip("/") for prefix in OWN_PREFIXES} <= set(TAKEN_NAMES)


def test_an_environment_is_chosen_for_an_evaluation() -> None:
    recipe = compose(BOTH)
    assert choose_environment(recipe, "tools").task.kind == "tools"
    assert choose_environment(compose(["sort"]), None).task.kind == "sort"
    with pytest.raises(ConfigError, match=r"environment \(None\) is one of small, tools"):
        choose_environment(recipe, None)
    with pytest.raises(ConfigError, match=r"environment \(small\) needs a recipe with environments"):
        choose_environment(compose(["sort"]), "small")


def test_files_of_an_environment_are_looked_up_and_remembered(tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    recipe = compose([*BOTH, f"environments.sums={{data: {path}, reward: math}}"])
    with pytest.raises(DataError, match=r"sums.jsonl does not exist"):
        check_named_sources(recipe)
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    check_named_sources(recipe)
    assert list_local_sources(recipe) == [str(path)]
    assert list_read_files(recipe) == {str(tmp_path): ["sums.jsonl"]}
    with pytest.raises(ConfigError, match=r"environments|reward"):
        check_named_sources(compose([*BOTH, f"environments.sums={{data: {path}, reward: 'no_such_module:f'}}"]))
