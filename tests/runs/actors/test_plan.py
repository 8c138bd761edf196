"""The processes that a recipe asks for."""

from pathlib import Path

from ludic.launch.process import PYTHON, check_processes
from ludic.recipes.compose import compose
from ludic.runs.actors.plan import plan_processes


def test_a_run_without_actors_is_its_trainer(tmp_path: Path) -> None:
    (trainer,) = plan_processes(compose(["sort"]), tmp_path)
    assert (trainer.name, trainer.role) == ("trainer", "trainer")
    assert trainer.argv == (PYTHON, "-m", "ludic.cli", "worker", "trainer", str(tmp_path))


def test_each_actor_has_a_name_and_the_folder_of_the_run(tmp_path: Path) -> None:
    planned = plan_processes(compose(["sort", "place.actors=3", "place.restarts=5"]), tmp_path)
    check_processes(planned)
    assert [process.name for process in planned] == ["trainer", "actor0", "actor1", "actor2"]
    assert planned[2].argv == (PYTHON, "-m", "ludic.cli", "worker", "actor", str(tmp_path), "--name", "actor1")
    assert {process.restarts for process in planned} == {5}
