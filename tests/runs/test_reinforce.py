"""Whole tiny runs: what they write, that they are reproducible, resume and stop, and that any model
on disk can be trained."""

import json
import signal
import subprocess
import sys
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import train_until
from safetensors.torch import load_file
from tiny_recipe import TINY
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from ludic.cli.app import app
from ludic.runs.directory import make_run_folder
from ludic.tasks.demonstrations import prompt_text
from ludic.training.presets.registry import REGISTRY

SUMMARY_KEYS = [
    *("status", "stopped_by", "model", "algorithm", "versions"),
    *("before", "after", "solved_at", "intervals", "heldout", "wall_s", "phases_s", "padding", "memory"),
    *("steps", "idle_steps", "stopped_early", "episodes", "samples", "clip_fraction"),
    *("mismatch", "weight_sync", "overlap"),
    "actors",
    *("seed", "config_hash"),
]


def train(*arguments: str) -> str:
    """Standard output of `ludic train`, which must succeed."""
    result = CliRunner().invoke(app, ["train", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_writes_every_documented_file(tiny: list[str], tmp_path: Path) -> None:
    shown = train(*tiny)
    run = tmp_path / "run"
    for name in ("config.yaml", "metrics.jsonl", "rollouts.jsonl", "summary.json", "reward.png"):
        assert (run / name).stat().st_size > 0, name
    assert (run / "reward.png").read_bytes().startswith(b"\x89PNG")
    for said in ("Held-out problems", "Sampled answers", "right answer", "Seconds", "Padding", "the reward sees", "step 3"):
        assert said in shown, said
    assert [(line["phase"], line["step"]) for line in metrics(run)] == [
        *(("warm_up", step) for step in (1, 2, 3)),
        *(("reinforce", step) for step in (1, 2, 3)),
    ]


def test_the_saved_model_is_the_trained_one_with_its_tokenizer(tiny: list[str], tmp_path: Path) -> None:
    train(*tiny)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert tokenizer("529140>")["input_ids"] == [byte + 3 for byte in b"529140>"]
    final = json.loads((tmp_path / "run" / "progress.json").read_text())
    assert final["phase"] == "done"
    assert sum(parameter.numel() for parameter in model.parameters()) < 20_000


def test_json_prints_only_the_summary_with_exactly_its_keys(tiny: list[str], tmp_path: Path) -> None:
    summary = json.loads(train(*tiny, "--json"))
    assert list(summary) == SUMMARY_KEYS
    assert summary == json.loads((tmp_path / "run" / "summary.json").read_text())
    assert set(summary["before"]) == set(summary["after"]) == {"sampled_reward", "greedy_accuracy"}
    assert (summary["steps"], summary["seed"]) == (3, 0)
    assert {"rollout", "batching", "forward_backward", "publish"} <= set(summary["phases_s"])
    assert sum(summary["phases_s"].values()) == pytest.approx(summary["wall_s"], abs=0.1)
    assert summary["padding"]["real_tokens"] <= summary["padding"]["computed_tokens"] <= summary["padding"]["unpacked_tokens"]


def test_addition_reports_its_scratchpad_beside_the_reward(tiny: list[str], tmp_path: Path) -> None:
    shown = train("addition", *tiny)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert set(summary["after"]) == {"sampled_reward", "greedy_accuracy", "scratchpad_right"}
    assert "never the scratchpad" in shown
    assert all("train/scratchpad_right" in line for line in metrics(tmp_path / "run") if line["phase"] == "reinforce")


def test_rollouts_are_written_for_every_second_batch_with_their_tokens(tiny: list[str], tmp_path: Path) -> None:
    train(*tiny)
    lines = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * 8  # batches 0 and 2, of 2 problems x 4 answers
    assert all(line["steps"][0]["trace"]["completion_token_ids"] for line in lines)


def test_a_demonstration_has_the_prompt_tokens_of_the_policy(tiny: list[str], tmp_path: Path) -> None:
    import asyncio
    from random import Random

    from ludic.models.byte_tokenizer import make_byte_tokenizer
    from ludic.tasks import DigitSort
    from ludic.tasks.demonstrations import DemonstrationSource

    train(*tiny, "rollout.system_prompt=Sort.", "rollout.log_every=1")
    line = json.loads((tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()[0])
    asked = line["steps"][0]["trace"]["prompt_token_ids"]
    assert bytes(i - 3 for i in asked) == b"Sort.\n\n" + line["steps"][0]["prev_obs"].encode()

    source = DemonstrationSource(DigitSort(), make_byte_tokenizer(), batch_size=2, seed=0, system_prompt="Sort.")
    item = asyncio.run(source.next_batch()).items[0]
    prompt = [token for token, is_action in zip(item.input_ids, item.action_mask, strict=True) if not is_action]
    question = DigitSort().draw(Random("demonstrations 0 0"))["question"]
    assert bytes(i - 3 for i in prompt) == b"Sort.\n\n" + question.encode()
    assert item.input_ids[-1] == 2  # the end token is part of what is learnt


def test_two_runs_of_a_recipe_are_equal(tiny: list[str], tmp_path: Path) -> None:
    train(*tiny, "name=one")
    train(*tiny, "name=two")
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert all(torch.equal(one[name], two[name]) for name in one)
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("one", "two")]
    assert summaries[0]["after"] == summaries[1]["after"]
    assert summaries[0]["config_hash"] == summaries[1]["config_hash"]


def test_an_evaluated_step_keeps_its_training_statistics(tiny: list[str], tmp_path: Path) -> None:
    summary = json.loads(train(*tiny, "trainer.eval_every_n_steps=1", "--json"))
    assert summary["steps"] == 3
    assert summary["padding"]["real_tokens"] > 0
    measured = [line["eval/sampled_reward"] for line in metrics(tmp_path / "run") if "train/loss" not in line]
    assert len(measured) == 3


def test_evaluations_during_training_are_in_the_report(tiny: list[str]) -> None:
    shown = train(*tiny, "steps=4", "trainer.eval_every_n_steps=2", "network.initializer_range=0.02")
    table = shown.split("Measured during training: 2 times")[1].splitlines()
    steps = [cells[1].strip() for cells in (line.split("│") for line in table) if len(cells) > 2]
    assert steps[:2] == ["2", "4"]
    assert "Measured during training" not in train(*tiny, "name=none", "steps=1")


def test_without_steps_of_reinforcement_nothing_changes_after_the_warm_up(tiny: list[str], tmp_path: Path) -> None:
    summary = json.loads(train(*tiny, "steps=0", "--json", "name=measured"))
    assert summary["before"] == summary["after"]
    shown = train("--resume", str(tmp_path / "measured"))
    assert "before" not in shown.split("Held-out problems")[1].split("There was no reinforcement")[0]
    [row] = [line for line in shown.splitlines() if "held-out reward, sampled" in line]
    assert row.count("│") == 3
    assert (summary["steps"], summary["clip_fraction"]) == (0, None)


def test_another_seed_gives_another_run(tiny: list[str], tmp_path: Path) -> None:
    train(*tiny, "name=one")
    train(*tiny, "name=two", "seed=1")
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert any(not torch.equal(one[name], two[name]) for name in one)


EASY = ["task.args.digits=3", "network.hidden_size=64", "rollout.prompts=8"]


@pytest.fixture(scope="module")
def warm_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that solves some of the EASY problems, so that groups have a signal."""
    parent = tmp_path_factory.mktemp("warm")
    train(*TINY, *EASY, "warmup.steps=120", "warmup.batch_size=32", "steps=0", f"output={parent}", "name=run")
    return parent / "run" / "model"


@pytest.mark.parametrize("algorithm", sorted(REGISTRY))
def test_every_algorithm_completes_a_run(tiny: list[str], tmp_path: Path, warm_model: Path, algorithm: str) -> None:
    teacher = [f"teacher={warm_model}"] if algorithm == "opd" else []
    train(*tiny, "--algorithm", algorithm, *EASY, f"model={warm_model}", "warmup.steps=0", *teacher)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 3
    assert (summary["clip_fraction"] is None) == (algorithm in ("reinforce", "reinforce_baseline", "sapo"))


def test_a_model_on_disk_can_be_trained_further(tiny: list[str], tmp_path: Path) -> None:
    train(*tiny, "name=first")
    path = tmp_path / "first" / "model"
    shown = train(*tiny, "name=second", f"model={path}", "warmup.steps=0", "steps=1", "evaluation.prompts=3")
    assert "writing to" in shown
    # Without a warm-up and with the same held-out problems and seeds, the second run starts where
    # the first ended.
    first, second = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("first", "second"))
    assert second["before"] == first["after"]


def test_warm_up_and_rollouts_use_the_same_chat_template(tiny: list[str], tmp_path: Path) -> None:
    train(*tiny, "name=first")
    path = tmp_path / "first" / "model"
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[answer]"
    tokenizer.save_pretrained(path)
    train(*tiny, "name=second", f"model={path}", "rollout.max_new_tokens=4")
    line = json.loads((tmp_path / "second" / "rollouts.jsonl").read_text().splitlines()[0])["steps"][0]
    asked = bytes(i - 3 for i in line["trace"]["prompt_token_ids"]).decode()
    assert asked == f"[user]{line['prev_obs']}[answer]" == prompt_text(tokenizer, line["prev_obs"], None)
    assert len(line["trace"]["completion_token_ids"]) <= 4


def test_a_run_folder_can_be_used_as_a_model(tiny: list[str], tmp_path: Path) -> None:
    train(*tiny, "name=first")
    train(*tiny, "name=second", f"model={tmp_path / 'first'}", "warmup.steps=0", "steps=0")
    one, two = weights(tmp_path / "first"), weights(tmp_path / "second")
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_the_report_claims_only_what_happened(tiny: list[str], tmp_path: Path) -> None:
    assert "There was no reinforcement" in train(*tiny, "name=none", "steps=0")
    said = " ".join(train(*tiny, "name=few").split())
    assert "no step of 3 had a signal" in said
    assert "sharpens" not in said
    assert " rose " not in said
    assert json.loads((tmp_path / "few" / "summary.json").read_text())["idle_steps"] == 3


def test_fewer_held_out_problems_than_requested_are_reported(tiny: list[str]) -> None:
    shown = " ".join(train(*tiny, "task.args.digits=4", "evaluation.prompts=2000").split())
    assert "the task has no more, 2000 were requested" in shown


@pytest.mark.integration
def test_a_task_in_the_current_directory_is_found_by_the_installed_script(tiny: list[str], tmp_path: Path) -> None:
    (tmp_path / "my_task.py").write_text("from ludic.tasks import DigitSort\n\n\nclass Mine(DigitSort):\n    pass\n")
    script = Path(sys.executable).with_name("ludic")
    command = [script, "train", *tiny, "task.kind=my_task:Mine", "warmup.steps=0", "steps=0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_a_run_can_be_repeated_from_its_own_config(tiny: list[str], tmp_path: Path) -> None:
    train(*tiny)
    train(str(tmp_path / "run" / "config.yaml"), "name=again")
    one, two = weights(tmp_path / "run"), weights(tmp_path / "again")
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_the_error_of_an_unloadable_model_does_not_blame_the_tokenizer(tiny: list[str], tmp_path: Path) -> None:
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.json").write_text("{}")
    result = CliRunner().invoke(app, ["train", *tiny, f"model={tmp_path / 'half'}"])
    assert result.exit_code == 2
    assert "model (" in result.output
    assert "tokenizer" not in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trainer.lrr=1"], "did you mean trainer.lr"),
        (["--algorithm", "gpro"], "did you mean gspo or grpo"),
        (["trainer.micro_token_budget=8"], "micro_token_budget"),
        (["model=/nowhere/at/all"], "config.json"),
        (["rollout.temperature=-1"], "temperature (-1.0) must be at least 0"),
        (["rollout.top_p=2"], "top_p (2.0) must be above 0 and at most 1"),
        (["+algorithm_args.group_size=3"], "algorithm_args.group_size (3) must be rollout.group_size"),
        (["dtype=float8"], "dtype (float8) must be one of float32"),
        (["trainer.learning_rate=1e-4"], "it is called trainer.lr"),
        (["trainer.grad_accum_steps=2"], "trainer.micro_token_budget sizes the micro-batches"),
    ],
)
def test_an_invalid_setting_is_a_one_line_error_and_leaves_no_folder(
    tiny: list[str], tmp_path: Path, arguments: list[str], said: str
) -> None:
    result = CliRunner().invoke(app, ["train", *tiny, *arguments])
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.output
    assert not list(tmp_path.iterdir())


def test_an_existing_name_is_refused_before_training(tiny: list[str], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    result = CliRunner().invoke(app, ["train", *tiny])
    assert result.exit_code == 1
    assert "--resume" in result.stderr


def test_unnamed_runs_get_separate_folders_even_within_a_second(tmp_path: Path) -> None:
    folders = [make_run_folder(str(tmp_path), None, "sort-grpo-seed0") for _ in range(5)]
    assert len(set(folders)) == 5
    assert all(folder.is_dir() for folder in folders)


# ---- stopping and resuming
# -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "step"), [("warm_up", 2), ("warm_up", 3), ("reinforce", 1), ("reinforce", 2), ("reinforce", 3)]
)
def test_a_run_stopped_anywhere_resumes_to_the_uninterrupted_run(tiny: list[str], tmp_path: Path, phase: str, step: int) -> None:
    train(*tiny, "name=whole")
    code = train_until("train", step, [*tiny, "name=parts"], phase=phase)
    assert code == 130
    interrupted = json.loads((tmp_path / "parts" / "summary.json").read_text())
    assert interrupted["after"] is None
    assert (interrupted["before"] is None) == (phase == "warm_up")
    result = CliRunner().invoke(app, ["train", "--resume", str(tmp_path / "parts")])
    assert result.exit_code == 0, result.output

    one, two = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(one[name], two[name]) for name in one)
    whole, parts = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "parts"))
    assert (parts["before"], parts["after"], parts["steps"]) == (whole["before"], whole["after"], whole["steps"])
    assert parts["config_hash"] == whole["config_hash"]
    once = [(line["phase"], line["step"]) for line in metrics(tmp_path / "whole")]
    assert [(line["phase"], line["step"]) for line in metrics(tmp_path / "parts")] == once


def test_resuming_a_finished_run_only_reports(tiny: list[str], tmp_path: Path) -> None:
    train(*tiny)
    before = len(metrics(tmp_path / "run"))
    assert "Held-out problems" in train("--resume", str(tmp_path / "run"))
    assert len(metrics(tmp_path / "run")) == before


def test_resume_accepts_no_other_setting(tiny: list[str], tmp_path: Path) -> None:
    train(*tiny)
    result = CliRunner().invoke(app, ["train", "--resume", str(tmp_path / "run"), "seed=1"])
    assert result.exit_code == 2
    assert "accepts steps=N, steps=+N" in result.stderr


def test_ctrl_c_ends_the_process_cleanly(tiny: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ludic.cli.app", "train", *tiny, "steps=100000", "log_every=1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("[reinforce]"):
                break
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=600)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "--resume" in rest
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert 0 < summary["steps"] < 100_000
    assert summary["after"] is None
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    assert list((tmp_path / "run" / "checkpoints" / "reinforce").glob("step_*"))


# ---- the command itself
# ------------------------------------------------------------------------------------------


def test_help_is_fast_and_has_examples() -> None:
    code = "import sys, ludic.cli.app; print([m for m in ('torch', 'transformers', 'matplotlib', 'hydra') if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"
    shown = CliRunner().invoke(app, ["train", "--help"]).output
    assert "ludic train addition" in shown
    assert "--resume" in shown


def test_print_config_shows_every_field_and_runs_nothing(tmp_path: Path) -> None:
    shown = train("--print-config", f"output={tmp_path}", "seed=9")
    assert "seed: 9" in shown
    assert "micro_token_budget:" in shown
    assert not list(tmp_path.iterdir())


def test_the_doctor_lists_versions_devices_and_extras() -> None:
    shown = CliRunner().invoke(app, ["doctor"]).output
    for said in ("torch", "CPU", "CUDA", "wandb"):
        assert said in shown
    report = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).output)
    assert set(report) == {"namesake", "python", "platform", "packages", "core", "devices", "extras"}
    assert report["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert all(extra["adds"] for extra in report["extras"].values())
    assert set(report["extras"]) <= set(metadata("ludic-rl").get_all("Provides-Extra") or [])


def test_the_version_is_that_of_the_package() -> None:
    from importlib.metadata import version

    assert CliRunner().invoke(app, ["version"]).output.strip() == version("ludic-rl")
