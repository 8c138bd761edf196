"""docs/maxent.md names the settings of the recipe, and has a row for each arm of its benchmark."""

import re
from pathlib import Path

from ludic.recipes.compose import compose
from ludic.recipes.model import make_small_model
from ludic.tasks.digits import right_answers

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "maxent.md").read_text(encoding="utf-8")


def test_the_settings_are_the_recipes() -> None:
    arguments = compose(["maxent"]).algorithm_args
    for name in ("tau", "beta", "sampler_exponent"):
        shown = re.search(rf"^\| `{name}` \| ([\d.]+) \|", PAGE, re.MULTILINE)
        assert shown is not None
        assert float(shown[1]) == arguments[name]
    assert f"| {arguments['clip_eps_low']}, {arguments['clip_eps_high']}, `{arguments['normalizer']}` |" in PAGE


def test_the_numbers_of_the_task_are_the_recipes() -> None:
    recipe = compose(["maxent"])
    sizes = [len(right_answers(low)) for low in range(5)]
    assert f"{', '.join(map(str, sizes[:-1]))} and {sizes[-1]} right answers" in PAGE
    assert f"{sum(weights.numel() for weights in make_small_model(recipe.network).parameters()):,} parameters" in PAGE
    words = " ".join(PAGE.split())
    assert (
        f"{recipe.warmup.steps} steps; {recipe.steps} steps of {recipe.rollout.prompts} prompts x {recipe.rollout.group_size} answers"
        in words
    )
    assert f"right in {recipe.task.args['right']:.0%}".replace("%", " %") in words
    assert f"{recipe.evaluation.samples_per_prompt} answers to each question" in words


def test_each_arm_of_the_benchmark_has_a_row() -> None:
    source = (ROOT / "benches" / "python" / "maxent.py").read_text(encoding="utf-8")
    labels = re.findall(r'\bArm\(\s*"([^"]+)"', source)
    assert len(labels) == 7
    assert [label for label in labels if f"| {label} |" not in PAGE] == []


def test_the_command_lines_are_recipes() -> None:
    lines = re.findall(r"ludic train (maxent[^#`\n]*)", PAGE)
    assert len(lines) >= 3
    for line in lines:
        compose([part for part in line.replace("--algorithm ", "algorithm=").split() if part])
