"""docs/migration.md: every other name behaves as its row says."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from ludic.errors import ConfigError
from ludic.recipes.foreign_names import ARGUMENTS, INSTEAD, OPENRLHF, OTHERS, REASONS, SETTINGS, VERL
from ludic.training import ClippedSurrogateLoss, TrainerConfig, make_bradley_terry

PAGE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text(encoding="utf-8")


def test_other_names_raise_or_warn_as_documented():
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


def test_the_tables_of_names_are_those_of_the_errors():
    tables = "\n".join(write_tables())
    assert tables in PAGE, f"the tables of docs/migration.md must be:\n{tables}"


def write_tables():
    """The tables of the page, from `ludic.recipes.foreign_names`."""
    columns = [group(table) for table in (SETTINGS, VERL, OPENRLHF)]
    yield from ["| ludic | TRL, transformers, flat files | verl 0.9.1 | OpenRLHF 0.11.2 |", "|---|---|---|---|"]
    for ours in dict.fromkeys(ours for column in columns for ours in column):
        cells = [ours.split(","), *(column.get(ours, []) for column in columns)]
        yield "| " + " | ".join(code(cell) for cell in cells) + " |"
    library = "TRL, transformers"
    for whose, title, table in (
        (library, "write", INSTEAD),
        (library, "there is no such setting", REASONS),
        ("verl, OpenRLHF", "here", OTHERS),
        ("arguments of TRL's trainers", "in Python", ARGUMENTS),
    ):
        yield from ["", f"| {whose} | {title} |", "|---|---|"]
        yield from (f"| {code(names)} | {text} |" for text, names in group(table).items())


def group(table):
    groups = {}
    for name, ours in table.items():
        groups.setdefault(ours, []).append(name)
    return groups


def code(names):
    return ", ".join(f"`{name}`" for name in names)
