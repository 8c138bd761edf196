"""What `--print-config` says of each setting, beside the values that it always had."""

import pytest
import yaml
from typer.testing import CliRunner

from ludic.cli.app import app
from ludic.recipes.commented import commented, docs_of
from ludic.recipes.compose import compose, to_yaml
from ludic.recipes.schema import EvaluationSection, Recipe
from ludic.training.config import TrainerConfig


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*arguments, "--print-config"])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_comments_change_no_value():
    plain = to_yaml(compose(["tictactoe", "name='a: b'", "rollout.system_prompt='x\n  steps: 3\n'"]))
    assert yaml.safe_load(commented(plain, Recipe, TrainerConfig)) == yaml.safe_load(plain)


def test_a_setting_has_the_docstring_of_its_field_above_it():
    lines = commented(to_yaml(compose([])), Recipe, TrainerConfig).splitlines()
    place = lines.index("  samples_per_prompt: 4")
    assert lines[place - 1] == f"  # {docs_of(EvaluationSection)['samples_per_prompt']}"
    assert "AdamW's learning rate" in docs_of(TrainerConfig)["lr"]
    assert lines.count(f"  # {docs_of(TrainerConfig)['lr']}") == 1
    assert lines.count(f"    # {docs_of(TrainerConfig)['lr']}") == 1  # that of the warm-up


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["train", "addition"], "# Steps of reinforcement, one batch each."),
        (["sft"], "# Passes over the data."),
        (["train-rm"], "# Passes over the data."),
        (["eval", "sort"], "# Deadline of one model call, in seconds."),
    ],
)
def test_every_command_says_what_its_settings_mean(command, said):
    shown = printed(*command)
    assert said in shown
    assert "# AdamW's learning rate" in shown
    assert yaml.safe_load(shown)
