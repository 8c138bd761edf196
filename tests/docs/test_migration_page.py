"""docs/migration.md: every old name behaves as its row says."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from ludic.errors import ConfigError
from ludic.recipes.compose import compose
from ludic.training import ClippedSurrogateLoss, TrainerConfig, make_bradley_terry

PAGE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text(encoding="utf-8")


def test_old_names_raise_or_warn_as_documented():
    with pytest.raises(ConfigError, match="set max_seq_len and micro_token_budget"):
        TrainerConfig(grad_accum_steps=4)
    with pytest.raises(ConfigError, match="two names of one setting"):
        TrainerConfig(learning_rate=2e-5, lr=1e-5)
    with pytest.warns(DeprecationWarning, match="clip_eps_low"):
        assert ClippedSurrogateLoss(clip_eps=0.3).clip_eps_high == 0.3
    assert make_bradley_terry(lambda_regularization=0.1).loss == make_bradley_terry(regularization_lambda=0.1).loss


def test_a_removed_name_does_not_exist():
    assert "resolve_sampling_args" in PAGE
    assert not hasattr(import_module("ludic.inference"), "resolve_sampling_args")


def test_settings_by_model_size_are_valid():
    sizes = re.findall(r"^\| [^|]+ \| (\d+) \| (\d+) \|", PAGE, flags=re.MULTILINE)
    assert len(sizes) == 4
    for longest, budget in sizes:
        TrainerConfig(max_seq_len=int(longest), micro_token_budget=int(budget)).validate()


def test_every_setting_that_replaces_one_of_another_library_is_there():
    table = PAGE.split("Settings of `GRPOConfig`")[1].split("##")[0]
    cells = [row.split("|")[4] for row in table.splitlines() if row.count("|") == 5]
    named = [key for cell in cells for key in re.findall(r"`([a-z_.]+)(?:=[a-z]+)?`", cell) if key != "ludic train"]
    assert len(named) >= 20
    recipe = compose()
    for key in named:
        section, _, name = key.partition(".")
        assert section in vars(recipe)
        if name and section != "algorithm_args":
            assert name in vars(getattr(recipe, section))
