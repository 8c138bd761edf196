"""`ludic train ... warmup.data=FILE`: supervised training on rows, then reinforcement, in one
run."""

import json
from pathlib import Path

import pytest
from commands import NETWORK, ludic, metrics_of, refused, same_weights, summary_of
from killed_commands import killed_at, run_to_end

from ludic.errors import ConfigError
from ludic.runs.data.sft import Warmup

TINY = [
    *("threads=1", "warmup.batch_size=4", "warmup.epochs=2", "steps=3", "rollout.prompts=2", "rollout.group_size=4"),
    *("rollout.log_every=1", "evaluation.prompts=3", "evaluation.samples_per_prompt=2", "checkpoint.every_n_steps=2", *NETWORK),
    *("reward=byte_rewards:mean_id", "task.args.max_new_tokens=4", "task.args.num_heldout=3"),
]


def write_rows(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    problems = write_rows(tmp_path / "problems.jsonl", [{"prompt": f"{n}>"} for n in range(20)])
    chats = write_rows(tmp_path / "chats.jsonl", [{"prompt": f"{n}>", "completion": f"{n % 7}"} for n in range(10)])
    return [*TINY, f"data={problems}", f"warmup.data={chats}", f"output={tmp_path}"]


def lines_of(run: Path) -> list[tuple[object, ...]]:
    return [(line["phase"], line["step"], line.get("train/loss")) for line in metrics_of(run)]


def steps_of(run: Path) -> list[tuple[object, object]]:
    return [(phase, step) for phase, step, loss in lines_of(run) if loss is not None]


@pytest.mark.integration
def test_a_run_killed_in_either_phase_ends_with_the_bits_of_the_uninterrupted_run(settings: list[str], tmp_path: Path) -> None:
    ludic("train", *settings, "name=whole")
    whole, run = tmp_path / "whole", tmp_path / "run"
    steps = steps_of(whole)
    assert steps == [("warm_up", n) for n in range(1, 7)] + [("reinforce", n) for n in range(1, 4)]  # 2 passes of 3 batches
    assert killed_at("line warm_up 4", "train", *settings, "name=run")
    assert steps_of(run) == steps[:3]
    assert killed_at("line reinforce 3", "train", "--resume", str(run))
    assert steps_of(run) == steps[:8]
    run_to_end("train", "--resume", str(run))
    assert lines_of(run) == lines_of(whole)
    assert same_weights(run, whole)
    assert summary_of(run)["after"] == summary_of(whole)["after"]


def test_only_the_supervised_phase_is_run(settings: list[str], tmp_path: Path) -> None:
    rest = [setting for setting in settings if not setting.startswith("steps=")]
    ludic("train", *rest, "mode=sft", "name=run")
    assert {line["phase"] for line in metrics_of(tmp_path / "run")} == {"warm_up"}
    assert summary_of(tmp_path / "run")["steps"] == 0


def test_wrong_rows_leave_no_folder_behind(settings: list[str], tmp_path: Path) -> None:
    write_rows(tmp_path / "chats.jsonl", [{"prompt": "1>", "completion": "1"}, {"question": "2>"}])
    assert "chats.jsonl" in refused("train", *settings, "name=run")
    assert "does not exist" in refused("train", *settings, f"warmup.data={tmp_path / 'missing.jsonl'}", "name=run")
    assert not (tmp_path / "run").exists()


def test_the_number_of_steps_follows_from_epochs_or_steps(settings: list[str]) -> None:
    from ludic.models.byte_tokenizer import make_byte_tokenizer
    from ludic.recipes.compose import compose
    from ludic.tasks import DigitSort, as_episodic

    def steps(*more: str) -> int:
        return Warmup.read(compose([*settings, *more]), as_episodic(DigitSort()), make_byte_tokenizer()).steps

    assert steps() == 6
    assert steps("warmup.epochs=null") == 3  # one pass
    assert steps("warmup.epochs=null", "warmup.steps=5") == 5
    with pytest.raises(ConfigError, match=r"set only one of warmup.epochs"):
        steps("warmup.steps=5")


def test_a_task_without_demonstrations_has_no_warm_up() -> None:
    from ludic.models.byte_tokenizer import make_byte_tokenizer
    from ludic.recipes.compose import compose
    from ludic.tasks import EpisodicTask, TicTacToe

    class Untaught(TicTacToe):
        demonstrations = EpisodicTask.demonstrations

    def steps(*more: str) -> int:
        return Warmup.read(compose(["tictactoe", *more]), Untaught(), make_byte_tokenizer()).steps

    assert compose(["tictactoe"]).warmup.steps > 0 == steps()
    assert Warmup.read(compose(["tictactoe"]), TicTacToe(), make_byte_tokenizer()).steps > 0
    with pytest.raises(ConfigError, match=r"mode=sft needs demonstrations, .*warmup\.data=FILE"):
        steps("mode=sft")
