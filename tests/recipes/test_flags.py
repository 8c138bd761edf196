"""The flags of `ludic train-rm`: each documented flag, its key and type, and the errors of wrong
ones."""

import shlex
from functools import reduce

import pytest

from ludic.errors import ConfigError
from ludic.recipes.epochs_schema import compose_rm
from ludic.recipes.overrides import FLAGS, SWITCHES, Override, parse_flags

DOCUMENTED = shlex.split("""
    --model Qwen/Qwen2.5-0.5B --hf-dataset stanfordnlp/SHP --hf-split train --limit 5000 --steps 1000 --batch-size 16
    --micro-token-budget 8192 --max-seq-len 1024 --lr 5e-6 --weight-decay 0.01 --warmup-steps 50 --lr-scheduler cosine --beta 1.0
    --regularization-lambda 0.001 --label-smoothing 0.05 --lora --lora-rank 8 --eval-split test --eval-limit 1000 --eval-every 100
    --early-stopping-patience 5 --profile-memory --output-dir checkpoints_rm_v2
""")


def settings(*arguments: str) -> dict[str, object]:
    """The settings that the flags set, with their values in the recipe."""
    keys = [found.key for found in parse_flags(arguments) if isinstance(found, Override)]
    recipe = compose_rm(arguments)
    return {key: reduce(getattr, key.split("."), recipe) for key in keys}


def test_every_flag_of_the_documented_command_sets_its_key() -> None:
    assert settings(*DOCUMENTED) == {
        "model": "Qwen/Qwen2.5-0.5B",
        "data": "stanfordnlp/SHP",
        "split": "train",
        "limit": 5000,
        "steps": 1000,
        "batch_size": 16,
        "trainer.micro_token_budget": 8192,
        "trainer.max_seq_len": 1024,
        "trainer.lr": 5e-6,
        "trainer.weight_decay": 0.01,
        "trainer.warmup_steps": 50,
        "trainer.lr_scheduler_type": "cosine",
        "loss.beta": 1.0,
        "loss.regularization_lambda": 0.001,
        "loss.label_smoothing": 0.05,
        "lora.rank": 8,
        "heldout_split": "test",
        "heldout_limit": 1000,
        "trainer.eval_every_n_steps": 100,
        "trainer.early_stopping_patience": 5,
        "trainer.profile_memory": True,
        "output": ".",
        "name": "checkpoints_rm_v2",
    }


def test_the_other_lora_flags_and_a_list() -> None:
    given = settings("--lora", "--lora-alpha", "32", "--lora-dropout=0.1", "--lora-target-modules", "q_proj, v_proj")
    assert given == {"lora.rank": 8, "lora.alpha": 32.0, "lora.dropout": 0.1, "lora.target_modules": ["q_proj", "v_proj"]}


def test_settings_and_files_are_passed_on_in_order() -> None:
    found = list(parse_flags(["mine.yaml", "seed=3", "--lr", "1", "trainer.lr=2"]))
    assert [item.key if isinstance(item, Override) else item for item in found] == [
        "mine.yaml",
        "seed=3",
        "trainer.lr",
        "trainer.lr=2",
    ]


def test_a_path_is_passed_on_unchanged() -> None:
    odd = "/data/my pairs {1}, [2].jsonl"
    assert settings("--data", odd) == {"data": odd}
    assert settings(f"--data={odd}=x") == {"data": f"{odd}=x"}
    assert settings("--output-dir", "/a/b/c") == {"output": "/a/b", "name": "c"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lr", "fast"], r"--lr fast: .*'fast' .*converted to Float"),
        (["--steps", "1.5"], r"--steps 1.5: .*'1.5' .*converted to Integer"),
        (["--steps"], "--steps needs a value"),
        (["--steps", "--lora"], "--steps needs a value"),
        (["--lora-rank", "8"], "add --lora"),
        (["--eval-evry", "5"], "did you mean --eval-every"),
        (["--profile-memory=yes"], "takes no value"),
        (["--xyz"], "there is no flag --xyz"),
    ],
)
def test_the_error_of_an_invalid_flag_names_it(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose_rm(arguments)


def test_no_two_tables_have_the_same_flag() -> None:
    assert not FLAGS.keys() & SWITCHES.keys()
