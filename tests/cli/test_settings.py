"""What `--print-config` says of each setting, beside the values that it always had, and the
folder of a run as an argument."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from ludic.cli.app import app
from ludic.cli.settings import add_help_texts, expand_run_folder, read_field_docs
from ludic.recipes.compose import compose, to_yaml
from ludic.recipes.schema import EvaluationSection, Recipe
from ludic.training.config import TrainerConfig


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*arguments, "--print-config"])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_comments_change_no_value():
    plain = to_yaml(compose(["tictactoe", "name='a: b'", "rollout.system_prompt='x\n  steps: 3\n'"]))
    assert yaml.safe_load(add_help_texts(plain, Recipe, TrainerConfig)) == yaml.safe_load(plain)


def test_a_setting_has_the_docstring_of_its_field_above_it():
    lines = add_help_texts(to_yaml(compose([])), Recipe, TrainerConfig).splitlines()
    place = lines.index("  samples_per_prompt: 4")
    assert lines[place - 1] == f"  # {read_field_docs(EvaluationSection)['samples_per_prompt']}"
    assert "Learning rate, before the schedule" in read_field_docs(TrainerConfig)["lr"]
    assert lines.count(f"  # {read_field_docs(TrainerConfig)['max_grad_norm']}") == 1
    assert lines.count(f"    # {read_field_docs(TrainerConfig)['max_grad_norm']}") == 1  # that of the warm-up


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
    assert "# Learning rate, before the schedule" in shown
    assert yaml.safe_load(shown)


def test_a_resolved_recipe_stays_as_it_is_for_the_model_that_came_out_of_it(tmp_path: Path) -> None:
    """A run of the small model plays in moves; a file that was read with `model=` took the words
    of chat models."""
    run, resolved = tmp_path / "run", compose(["tictactoe", "steps=7"])
    (run / "model").mkdir(parents=True)
    (run / "config.yaml").write_text(to_yaml(resolved))
    again = compose(expand_run_folder(str(run)))
    assert again == replace(resolved, model=str(run / "model"))
    assert again.task.args.get("format", "moves") == "moves"
    assert compose(["tictactoe", "model=somewhere"]).task.args["format"] == "chat"
    assert expand_run_folder("tictactoe") == ["tictactoe"]
