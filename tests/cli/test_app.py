"""Versions, flags, invalid folders and exit statuses of the command line."""

import json
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from ludic import __version__
from ludic.cli.app import app
from ludic.models.loading import describe_device
from ludic.recipes.compose import compose
from ludic.recipes.model import make_small_model
from ludic.runs.data.sft import explain_no_heldout


def ludic(*arguments, code=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def test_the_version_flag_prints_what_the_version_command_prints():
    assert ludic("--version") == ludic("version") == __version__


@pytest.mark.parametrize("command", ["train", "sft", "train-rm", "dpo", "eval", "rollout", "doctor"])
def test_the_version_flag_works_after_a_command(command):
    assert ludic(command, "--version") == __version__


def test_a_version_flag_for_vllm_is_passed_on():
    assert "--device ('tpu') must be one of" in ludic("serve", "some-model", "--device", "tpu", "--", "--version", code=2)


def test_the_package_runs_as_a_module():
    shown = subprocess.run(
        [sys.executable, "-m", "ludic.cli", "version"], capture_output=True, text=True, check=True, timeout=600
    )
    assert shown.stdout.strip() == __version__


@pytest.mark.skipif(sys.platform != "linux", reason="on Linux no folder can be created in /proc")
@pytest.mark.parametrize("command", ["train", "sft", "eval"])
def test_an_output_folder_that_cannot_be_created_is_a_one_line_error(tiny, command):
    small = [argument for argument in tiny if argument.startswith(("network.", "threads"))]
    given = ["sort", "model=x", "base_url=http://127.0.0.1:9/v1", "problems=1"] if command == "eval" else [*small, "steps=1"]
    shown = ludic(command, *given, "output=/proc/nope", code=2)
    assert "cannot be made (/proc/nope: No such file or directory); set output=FOLDER" in shown


def test_the_learning_rate_has_a_flag_in_every_training_command():
    assert "lr: 0.0123" in ludic("train", "--lr", "0.0123", "--print-config")
    assert "lr: 0.0123" in ludic("sft", "--lr", "0.0123", "--print-config")
    assert "lr: 0.0123" in ludic("train-rm", "--lr", "0.0123", "--print-config")


@pytest.mark.parametrize("command", ["train", "sft"])
def test_flags_of_other_libraries_are_refused_with_the_equivalent_setting(command):
    assert re.search(r"no flag --learning-rate; .*key=value; .*trainer\.lr", ludic(command, "--learning-rate", "1e-5", code=2))
    assert re.search(r"no flag --sed; .*key=value; did you mean seed\?", ludic(command, "--sed=3", code=2))


def test_train_rm_also_accepts_the_usual_learning_rate_flag():
    assert "it is called --lr" in ludic("train-rm", "--learning-rate", "1e-5", code=2)


def folder(path, command, *, model=True):
    path.mkdir()
    (path / "config.yaml").write_text("heldout: 0.1\n")
    (path / "progress.json").write_text(json.dumps({"command": command}))
    if model:
        (path / "model").mkdir()
    return path


@pytest.mark.parametrize("command", [["eval"], ["rollout", "--out", "x.jsonl"]])
def test_the_error_of_a_run_without_a_task_names_its_kind(tmp_path, monkeypatch, command):
    """Regression test: the error was about an unknown setting 'heldout'."""
    monkeypatch.chdir(tmp_path)
    shown = ludic(*command, folder(tmp_path / "chats", "sft"), code=2)
    assert "is a run of `ludic sft`, which has no task; say which, such as: sort model=" in shown
    assert "is a reward model, measured in" in ludic(*command, folder(tmp_path / "rm", "train-rm"), code=2)
    assert "has no model yet; resume it with" in ludic(*command, folder(tmp_path / "begun", "train", model=False), code=2)


def test_the_exit_status_is_2_for_every_invalid_argument(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "columns.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    (tmp_path / "bad.jsonl").write_text("{\n")
    for data in ("nosuch.jsonl", "bad.jsonl", "columns.jsonl", "problems.txt"):
        ludic("train", f"data={data}", "reward=gsm8k", "model=x/y", code=2)
    ludic("train", "sede=1", code=2)
    ludic("sft", "data=nosuch.jsonl", code=2)


def test_a_run_and_an_evaluation_print_the_path_of_the_model(tiny, tmp_path):
    assert "On cpu, 1 threads, float32" in ludic("train", *tiny, "steps=0", "warmup.steps=0")
    assert "episodes on cpu, 1 threads, float32" in ludic("eval", tmp_path / "run", "problems=1", "k=1")


def test_the_error_of_a_device_is_about_the_model_and_not_the_setting():
    model = make_small_model(compose(["network.hidden_size=16", "network.num_heads=2", "network.num_kv_heads=1"]).network)
    assert describe_device(model.bfloat16().to("meta")) == "meta, bfloat16"


@pytest.mark.parametrize("section", ["trainer", "warmup.trainer"])
def test_early_stopping_on_an_unmeasured_metric_is_refused_before_the_run(tiny, tmp_path, section):
    """Regression test: it failed at the first evaluation, after the warm-up."""
    given = [*tiny, f"{section}.early_stopping_patience=2", f"{section}.eval_every_n_steps=1"]
    shown = ludic("train", *given, f"{section}.early_stopping_metric=eval_loss", code=2)
    assert f"{section}.early_stopping_metric (eval_loss) must be one of" in shown
    assert "sampled_reward, greedy_accuracy" in shown
    assert not (tmp_path / "run").exists()


def test_a_run_reports_that_early_stopping_ended_it(tiny, tmp_path):
    """Nothing is learnt, so the second evaluation is no better than the first."""
    stopping = [
        "trainer.early_stopping_patience=1",
        "trainer.early_stopping_metric=sampled_reward",
        "trainer.early_stopping_mode=max",
    ]
    shown = ludic(
        "train", *tiny, *stopping, "trainer.eval_every_n_steps=1", "steps=8", "trainer.lr=1e-9", "rollout.temperature=0.01"
    )
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["stopped_early"]) == (2, True)
    assert "ended the run at step 2 of 8" in shown


def test_a_callback_ends_a_run_and_its_reason_is_in_the_summary(tiny, tmp_path):
    """The best checkpoint is kept beside the last one, and completions are shown on the way."""
    settings = [
        *("callbacks.stop.metric=sampled_reward", "callbacks.stop.patience=1", "callbacks.keep_best=sampled_reward"),
        *("callbacks.completions_every=2", "callbacks.completions=2", "checkpoint.max_to_keep=1"),
    ]
    shown = ludic(
        "train", *tiny, *settings, "trainer.eval_every_n_steps=1", "steps=8", "trainer.lr=1e-9", "rollout.temperature=0.01"
    )
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["stopped_early"]) == ("finished", 2, True)
    assert (summary["stopped_by"]["callback"], summary["stopped_by"]["of_steps"]) == ("stop_on eval/sampled_reward", 8)
    assert re.search("step 2 of 8 by stop_on eval/sampled_reward: .*not better", shown)
    assert re.search("stop_on eval/sampled_reward .*step 2 of 8", shown)
    assert shown.count("Completions of step 2") == 1
    checkpoints = tmp_path / "run" / "checkpoints" / "reinforce"
    assert sorted(path.name for path in checkpoints.glob("step_*")) == ["step_000001", "step_000002"]
    assert json.loads((checkpoints / "best.json").read_text())["step"] == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["callbacks.keep_best=sampled_reward"],
            "set trainer.eval_every_n_steps",
        ),
        (["callbacks.keep_best=loss", "trainer.eval_every_n_steps=1"], "reads loss, and this run measures"),
        (["callbacks.stop.at=1"], "callbacks.stop.at (1.0) needs callbacks.stop.metric; set that too"),
        (["callbacks.own=json:dumps"], "callbacks.own (json:dumps)"),
        (["callbacks.own=3"], "callbacks.own (3) must be package.module:name"),
    ],
)
def test_callbacks_that_could_never_act_are_refused_before_the_run(tiny, tmp_path, settings, message):
    assert message in ludic("train", *tiny, *settings, code=2).replace("\n", " ")
    assert not (tmp_path / "run").exists()


def test_an_empty_held_out_split_is_explained_with_a_remedy():
    """1,500 chats with 25 first questions, 60 chats each: 2 % are 30 rows, fewer than one group."""
    said = explain_no_heldout(1500, 0.02, 25, 60)
    assert "heldout (0.02) of 1,500 rows is 30" in said
    assert "raise heldout to 0.04 or above" in said
    assert "heldout is 0" in explain_no_heldout(1500, 0.0, 25, 60)


def test_a_run_without_held_out_rows_explains_why(tiny, tmp_path):
    rows = [{"prompt": f"{n % 2}?", "completion": "a"} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = [argument for argument in tiny if argument.startswith(("network.", "threads", "output", "name"))]
    shown = ludic("sft", *small, f"data={tmp_path / 'rows.jsonl'}", "heldout=0.1", "steps=1")
    assert re.search(r"2 different prompts .*10 rows .*heldout to 0\.5", shown)


def test_sft_takes_no_arguments_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments are looked at in pairs, for a `--preview` without a number."""
    seen: list[tuple[str, list[str]]] = []
    monkeypatch.setattr("ludic.cli.train.train_command", lambda name, settings, **options: seen.append((name, settings)) or 0)
    assert CliRunner().invoke(app, ["sft"]).exit_code == 0
    assert seen == [("sft", [])]
