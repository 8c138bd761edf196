"""The folder of a run as an argument: its recipe, with the model that came out of it."""

from dataclasses import replace
from pathlib import Path

from ludic.cli.run_folder import expand_run_folder
from ludic.recipes.compose import compose, to_yaml


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
