"""The settings of over-sampling and of filtered groups: what is refused, and what follows from
them."""

import pytest

from ludic.errors import ConfigError
from ludic.recipes.actors import build_group_filter, check_over_sampling, choose_lag, uses_pool
from ludic.recipes.compose import compose


def recipe_of(*settings: str):
    return compose(["sort", *settings])


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        (["rollout.over_sampling_factor=0.5"], r"rollout.over_sampling_factor \(0.5\) must be at least 1"),
        (["rollout.over_sampling_factor=2.5", "rollout.max_lag=1"], "set max_lag=2"),
        (
            ["rollout.order=random", "rollout.group_filter=nonzero_std"],
            r"rollout.order \(random\) .*arrival, submission",
        ),
        (["rollout.group_filter=zero_std"], r"rollout.group_filter \(zero_std\) .*nonzero_std, any_success"),
        (["rollout.group_filter=nonzero_std", "rollout.group_size=1"], "set rollout.group_size to at least 2"),
        (
            ["rollout.group_filter=nonzero_std", "rollout.outage_patience_s=-1"],
            r"rollout.outage_patience_s \(-1.0\) must be at least 0",
        ),
        (
            ["rollout.outage_patience_s=3"],
            r"rollout.outage_patience_s \(3.0\) needs rollout.over_sampling_factor or rollout.group_filter; set",
        ),
        (["rollout.group_filter=nowhere:f"], r"rollout.group_filter \(nowhere:f\) cannot be imported"),
        (
            ["rollout.order=submission"],
            r"rollout.order \(submission\) needs rollout.over_sampling_factor or rollout.group_filter; set",
        ),
        (["rollout.patience=3"], r"rollout.patience \(3\) needs rollout.over_sampling_factor or rollout.group_filter; set"),
        (
            ["rollout.group_filter=nonzero_std", "inference.batches_ahead=1"],
            r"rollout.group_filter \(nonzero_std\) .* inference.batches_ahead; leave one",
        ),
        (["rollout.over_sampling_factor=1.5", "place.actors=2"], r"factor \(1.5\) .* place.actors; leave one"),
        (
            ["rollout.over_sampling_factor=1.5", "queue.url=redis://host/0"],
            r"factor \(1.5\) .* queue.url; leave one",
        ),
        (
            ["rollout.over_sampling_factor=1.5", "trainer.sync_every_steps=0"],
            r"trainer.sync_every_steps \(0\) never updates the model .* set it to 1",
        ),
    ],
)
def test_wrong_settings_are_refused_with_the_rule(settings: list[str], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        check_over_sampling(recipe_of(*settings))


@pytest.mark.parametrize(
    ("settings", "is_used", "lag"),
    [
        ([], False, 0),
        (["rollout.group_filter=nonzero_std"], True, 0),
        (["rollout.over_sampling_factor=1.5"], True, 1),
        (["rollout.over_sampling_factor=1.5", "rollout.max_lag=3"], True, 3),
        (["rollout.group_filter=any_success", "rollout.max_lag=1"], True, 1),
    ],
)
def test_a_pool_is_used_where_a_setting_asks_for_it(settings: list[str], is_used: bool, lag: int) -> None:
    recipe = recipe_of(*settings)
    check_over_sampling(recipe)
    assert (uses_pool(recipe), choose_lag(recipe)) == (is_used, lag)


def test_a_filter_of_ones_own_has_its_name() -> None:
    group_filter = build_group_filter(recipe_of("rollout.group_filter=byte_filters:even_sum"))
    assert group_filter is not None
    assert group_filter.__name__ == "even_sum"
