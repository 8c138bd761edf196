"""`mode` and `warmup.data`: which phases a recipe has, and what contradicts that."""

from pathlib import Path

import pytest

from ludic.errors import ConfigError
from ludic.recipes.compose import compose, has_warmup, to_yaml


def phases(*arguments: str) -> tuple[bool, bool]:
    """Whether there is a warm-up, and reinforcement."""
    recipe = compose(arguments)
    return has_warmup(recipe), recipe.steps > 0


def test_a_mode_leaves_out_the_other_phase() -> None:
    assert phases() == phases("mode=sft+rl") == (True, True)
    assert phases("mode=sft") == (True, False)
    assert phases("mode=rl") == (False, True)
    assert phases("data", "warmup.data=chats.jsonl") == (True, True)
    assert phases("warmup.data=chats.jsonl", "mode=sft") == (True, False)
    assert compose(["warmup.data=[a.jsonl,b.jsonl]", "warmup.epochs=2"]).warmup.data == ["a.jsonl", "b.jsonl"]


def test_on_the_command_line_the_mode_counts_more_than_the_steps_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("recipe: sort\nsteps: 7\nwarmup: {data: chats.jsonl, epochs: 2}\n")
    assert phases(str(path), "mode=sft") == (True, False)
    only_rl = compose([str(path), "mode=rl"])
    assert (only_rl.steps, only_rl.warmup.steps, only_rl.warmup.data, only_rl.warmup.epochs) == (7, 0, None, None)
    for mode in ("sft", "rl", "sft+rl"):
        recipe = compose([f"mode={mode}", "seed=3"])
        path.write_text(to_yaml(recipe))
        assert compose([str(path)]) == recipe


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mode=sft", "steps=5"], "mode=sft leaves out steps=5; drop one of them, or use mode=sft.rl"),
        (["mode=rl", "warmup.steps=5"], "mode=rl leaves out warmup.steps=5"),
        (["mode=rl", "warmup.data=x.jsonl"], "mode=rl leaves out warmup.data=x.jsonl"),
        (
            ["data", "mode=sft"],
            "mode=sft needs demonstrations; set warmup.data=FILE",
        ),
        (["data", "mode=sft+rl"], "set warmup.data=FILE, or warmup.steps=N"),
        (["mode=sft+rl", "steps=0"], "needs steps of reinforcement; set steps=N, or mode=sft"),
        (["mode=sft_rl"], "mode .sft_rl. must be one of sft, rl, sft.rl; did you mean sft.rl"),
        (["mode=rl", "warmup={data:x.jsonl}"], "mode=rl leaves out warmup.data=x.jsonl"),
        (
            ["warmup.data=x.jsonl", "warmup.epochs=2", "warmup.steps=9"],
            "set only one of warmup.epochs=2 and warmup.steps=9",
        ),
        (["warmup.epochs=2"], r"warmup.epochs \(2\) needs warmup.data"),
    ],
)
def test_contradictions_are_refused_with_the_remedy(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose(arguments)


def test_a_file_may_not_contradict_itself(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("recipe: sort\nmode: rl\nwarmup: {data: chats.jsonl}\n")
    with pytest.raises(ConfigError, match=r"mode=rl leaves out warmup\.data=chats\.jsonl"):
        compose([str(path)])


@pytest.mark.parametrize(
    ("file", "argument", "message"),
    [
        ("mode: rl", "warmup.data=x.jsonl", "mode=rl leaves out warmup.data=x.jsonl"),
        ("mode: rl", "warmup.steps=5", "mode=rl leaves out warmup.steps=5"),
        ("mode: sft", "steps=9", "mode=sft leaves out steps=9; drop one of them, or use mode=sft.rl"),
        ("warmup: {data: x.jsonl, epochs: 2}", "warmup.steps=5", "set only one of warmup.epochs=2 and warmup.steps=5"),
        ("warmup: {data: x.jsonl, steps: 5}", "warmup.epochs=2", "set only one of warmup.epochs=2 and warmup.steps=5"),
    ],
)
def test_what_the_command_line_asks_for_is_never_dropped_for_a_file(
    tmp_path: Path, file: str, argument: str, message: str
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"recipe: sort\n{file}\n")
    compose([str(path)])
    with pytest.raises(ConfigError, match=message):
        compose([str(path), argument])


def test_passes_replace_the_steps_of_the_built_in_recipe(tmp_path: Path) -> None:
    recipe = compose(["sort", "warmup.data=x.jsonl", "warmup.epochs=2"])
    assert (recipe.warmup.epochs, recipe.warmup.steps, compose(["sort"]).warmup.steps > 0) == (2, 0, True)
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(recipe))
    assert compose([str(path)]) == recipe
    assert compose([str(path), "warmup.epochs=null", "warmup.steps=5"]).warmup.steps == 5
