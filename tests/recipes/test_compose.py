"""Resolving a recipe: layers in order, Hydra's grammar, and errors with suggestions."""

from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from ludic.errors import ConfigError
from ludic.recipes.compose import compose, config_hash, list_builtin_recipes, to_yaml
from ludic.training.config import TrainerConfig


def test_the_built_in_recipes_are_complete_and_have_their_name() -> None:
    benchmarks = ["eval-aime-2024", "eval-aime-2025", "eval-gsm8k", "eval-ifeval", "eval-math-500"]
    public = ["gsm8k", "gsm8k-tools", "harbor", "math", "maxent", "mbpp", "mixture"]
    assert list_builtin_recipes() == [
        "addition",
        "code",
        "data",
        "errand",
        *benchmarks,
        *public,
        "shapes",
        "shapes-turns",
        "sort",
        "terminal",
        "tictactoe",
        "tools",
    ]
    for name in list_builtin_recipes():
        recipe = compose([name])
        assert recipe.recipe == name
        assert "???" not in to_yaml(recipe)  # how OmegaConf writes a missing value


def test_a_built_in_recipe_begins_with_the_one_that_it_names() -> None:
    """math names gsm8k, which names data. The nearest value wins; the name is the recipe's own."""
    maths, gsm8k, rows = (compose([name, "model=somewhere"]) for name in ("math", "gsm8k", "data"))
    assert (maths.recipe, maths.data, maths.task.args["config"]) == ("math", "DigitalLearningGmbH/MATH-lighteval", None)
    assert maths.trainer.lr == gsm8k.trainer.lr != rows.trainer.lr
    assert maths.checkpoint == rows.checkpoint
    assert maths.algorithm_args == gsm8k.algorithm_args
    assert "reference_kl" not in compose(["math", "algorithm=rloo"]).algorithm_args


def test_a_file_can_extend_such_a_recipe(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("recipe: math\nmodel: somewhere\ntrainer: {lr: 2.0e-6}\n")
    recipe = compose([str(path)])
    assert (recipe.recipe, recipe.model, recipe.trainer.lr, recipe.steps) == ("math", "somewhere", 2e-6, 435)


def test_without_arguments_the_sorting_recipe_runs() -> None:
    assert compose() == compose(["sort"]) == compose(["recipe=sort"])


def test_a_recipe_can_be_named_in_either_syntax() -> None:
    assert compose(["addition"]) == compose(["recipe=addition"])
    assert compose(["addition"]).task.kind == "addition"


def test_overrides_follow_the_grammar_of_hydra() -> None:
    recipe = compose(["trainer.lr=1e-4", "seed=3", "trainer.betas=[0.8,0.9]", "task.args.digits=4", "threads=null", "name='a=b'"])
    assert recipe.trainer.lr == 1e-4
    assert recipe.seed == 3
    assert list(recipe.trainer.betas) == [0.8, 0.9]
    assert recipe.task.args == {"digits": 4, "right": 0.25, "backwards": 0.5}
    assert recipe.threads is None
    assert recipe.name == "a=b"


def test_unset_values_are_the_trainers_defaults() -> None:
    assert compose().trainer.packing == TrainerConfig().packing
    assert compose().trainer.max_empty_batches == TrainerConfig().max_empty_batches


@settings(max_examples=8)  # each example reads and writes files
@given(lr=st.floats(1e-8, 1.0), seed=st.integers(0, 2**31))
def test_a_resolved_recipe_survives_writing_and_reading(tmp_path_factory: pytest.TempPathFactory, lr: float, seed: int) -> None:
    recipe = compose(["addition", f"trainer.lr={lr!r}", f"seed={seed}"])
    path = tmp_path_factory.mktemp("recipe") / "config.yaml"
    path.write_text(to_yaml(recipe))
    assert compose([str(path)]) == recipe


def test_a_file_extends_the_recipe_it_names_and_the_command_line_overrides_both(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("recipe: addition\nsteps: 7\ntrainer: {lr: 5.0e-4}\n")
    recipe = compose([str(path), "trainer.lr=1e-3"])
    assert (recipe.task.kind, recipe.steps, recipe.trainer.lr) == ("addition", 7, 1e-3)
    assert recipe.warmup.steps == compose(["addition"]).warmup.steps


def test_an_algorithm_sets_its_defaults_and_the_command_line_overrides_them() -> None:
    assert compose().algorithm_args == {"clip_eps_low": 0.2, "clip_eps_high": 0.28, "normalizer": "tokens"}
    assert "clip_eps_high" not in compose(["algorithm=reinforce"]).algorithm_args
    assert compose(["algorithm_args.clip_eps_high=0.5"]).algorithm_args["clip_eps_high"] == 0.5


def test_a_loaded_model_has_lower_default_learning_rates(tmp_path: Path) -> None:
    small, loaded = compose(), compose(["model=somewhere"])
    assert loaded.trainer.lr < small.trainer.lr / 10
    assert loaded.warmup.trainer.lr < small.warmup.trainer.lr / 10
    assert compose(["model=somewhere", "trainer.lr=1e-3"]).trainer.lr == 1e-3
    path = tmp_path / "mine.yaml"
    path.write_text("model: somewhere\nloaded_model: {steps: 9}\n")
    assert (compose([str(path)]).steps, compose([str(path)]).trainer.lr) == (9, loaded.trainer.lr)
    assert compose([str(path), "model=null"]).steps == small.steps


def test_a_new_task_does_not_inherit_the_arguments_of_the_old_one(tmp_path: Path) -> None:
    assert compose(["task.kind=addition"]).task.args == {}
    assert compose(["task.args.right=0.5", "task.kind=addition"]).task.args == {"right": 0.5}
    path = tmp_path / "mine.yaml"
    path.write_text("task: {kind: addition, args: {right: 0.4}}\n")
    assert compose([str(path)]).task.args == {"right": 0.4}


def test_a_file_can_have_settings_for_each_algorithm(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("steps: 5\nper_algorithm: {cispo: {steps: 6}}\n")
    assert compose([str(path)]).steps == 5
    assert compose([str(path), "algorithm=cispo"]).steps == 6


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("trainer.lrr=1e-4", r"no setting 'trainer\.lrr'; did you mean trainer\.lr\b"),
        ("evaluation.samples=3", r"did you mean evaluation\.samples_per_prompt"),
        ("checkpoint.every=3", r"did you mean checkpoint\.every_n_steps"),
        ("lr=1e-4", r"did you mean .*trainer\.lr"),
        ("trainr.lr=1", r"did you mean .*trainer\.lr"),
        ("sed=3", r"did you mean seed"),
        ("zzzzzz=3", r"--print-config"),
        ("seed=three", r"seed=three: .*three"),
        ("seed=1,2", r"for a list, write seed=\[1,2\]"),
        ("reward=a:f,b:g", r"for a list, write reward=\[a:f,b:g\]"),
        ("seed=range(1,3)", r"seed=range\(1,3\)' must give a setting one value; one list is"),
        ("~seed", r"one recipe|no recipe|not key=value|sweep"),
        ("seed =3", r"not key=value"),
        ("adition", r"no recipe 'adition'; did you mean addition"),
        ("capybara", r"no recipe 'capybara' of ludic train; there is ludic sft capybara"),
        ("runs/absent", r"no recipe 'runs/absent'; .*no such folder"),
        ("missing.yaml", r"missing\.yaml does not exist"),
        ("inference.max_lag=1", r"'inference\.max_lag'; .*called inference\.batches_ahead"),
    ],
)
def test_the_error_of_an_invalid_argument_has_a_remedy(argument: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose([argument])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("trainer: {lerning_rate: 1}", r"no setting 'trainer\.lerning_rate'"),
        ("stepps: 3", r"did you mean steps"),
        ("steps: many", r"many"),
        ("- a\n- b\n", r"not a list"),
        ("a: [", r"is not YAML"),
        ("recipe: nonsense", r"no recipe 'nonsense'"),
    ],
)
def test_the_error_of_an_invalid_file_names_the_file(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        compose([str(path)])


@pytest.mark.parametrize("content", ["trainer:\n  prefix_sharing: off\n", "trainer: {prefix_sharing: 'off'}\n"])
def test_a_file_turns_prefix_sharing_off_with_a_bare_word_which_yaml_reads_as_false(tmp_path: Path, content: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("recipe: addition\n" + content)
    assert compose([str(file)]).trainer.prefix_sharing == "off"
    file.write_text(to_yaml(compose([str(file)])))
    assert compose([str(file)]).trainer.prefix_sharing == "off"


def test_a_former_name_is_read_from_a_runs_config_and_refused_in_a_users_file(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(to_yaml(compose(["inference.batches_ahead=2"])).replace("batches_ahead", "max_lag"))
    with pytest.raises(ConfigError, match=r"config\.yaml: .*'inference\.max_lag'; .*now called"):
        compose([str(config)])
    (tmp_path / "progress.json").write_text("{}")
    assert compose([str(config)]).inference.batches_ahead == 2


def test_two_recipes_at_once_are_refused() -> None:
    with pytest.raises(ConfigError, match="one recipe at a time"):
        compose(["sort", "addition"])


def test_the_hash_covers_every_setting_except_the_output_folder() -> None:
    base = config_hash(compose())
    assert config_hash(compose(["name=other", "output=elsewhere"])) == base
    assert config_hash(compose(["seed=1"])) != base
    assert config_hash(compose(["task.args.right=0.3"])) != base
    assert config_hash(compose(["callbacks.guard.ess=0.5"])) != base


def test_the_trainer_sections_have_every_field_of_the_trainer_config() -> None:
    derived = {
        "learning_rate",
        "pad_token_id",
        "seed",
        "temperature",
    }  # an alias, and fields that come from tokenizer, seed and sampling
    assert set(asdict(compose().trainer)) == set(TrainerConfig.__dataclass_fields__) - derived


def test_a_folder_of_tasks_is_data_for_harbor(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    for data, recipe in {"rows.jsonl": "data", str(tmp_path): "data"}.items():
        assert compose([f"data={data}"]).recipe == recipe
    (tmp_path / "one" / "task.toml").touch()
    for data in (tmp_path, tmp_path / "one"):
        assert (compose([f"data={data}"]).recipe, compose([f"data={data}"]).task.kind) == ("harbor", "harbor")
    assert compose(["task.kind=harbor"]).recipe == "harbor"
    assert compose([f"data={tmp_path}", "task.kind=data"]).recipe == "data"
