"""`profile.steps` of a recipe."""

import pytest

from ludic.errors import ConfigError
from ludic.recipes.compose import compose, config_hash
from ludic.recipes.epochs_schema import compose_dpo, compose_rm, compose_sft
from ludic.recipes.sections import ProfileSection, parse_steps


@pytest.mark.parametrize(("steps", "expected"), [("10-12", (10, 12)), ("10", (10, 10)), ("3-3", (3, 3)), (None, None)])
@pytest.mark.parametrize("composer", [compose, compose_sft, compose_rm, compose_dpo])
def test_a_range_includes_both_ends(composer, steps, expected):
    recipe = composer([] if steps is None else [f"profile.steps={steps}"])
    assert parse_steps(recipe.profile) == expected


@pytest.mark.parametrize("steps", ["12-10", "0-3", "0", "a", "1-", "-1", "1-2-3", "1,2", "", "٣"])
def test_anything_else_is_an_error_with_the_remedy(steps):
    with pytest.raises(ConfigError, match=r"profile\.steps \(.*\) must be a step .*or a range: write 10, or 10-12"):
        parse_steps(ProfileSection(steps))


def test_the_supervised_commands_refuse_it_before_they_make_a_folder():
    with pytest.raises(ConfigError, match=r"profile\.steps \(12-10\)"):
        compose_sft(["profile.steps=12-10"])


def test_a_trace_changes_no_result():
    assert config_hash(compose(["profile.steps=2"])) == config_hash(compose([]))
