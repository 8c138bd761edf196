"""Everyday failures are one line with the value, the rule and the remedy. Code in files never runs,
and a bug keeps its traceback."""

import errno
import io
import json
import os
import pickle
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from commands import NETWORK, ludic, refused
from safetensors import SafetensorError
from training_samples import TOKENIZER, tiny_model

from ludic.errors import ConfigError
from ludic.models.loading import load_classifier, load_model, load_tokenizer
from ludic.recipes.overrides import MOST_VALUES, check_yaml
from ludic.runs.console import open_console
from ludic.runs.directory import RunDirectory
from ludic.runs.exit_status import describe_machine_fault

SFT = ["threads=1", "rows=40", "batch_size=8", "steps=2", *NETWORK]


def settings(folder: Path, text: str) -> str:
    path = folder / "settings.yaml"
    path.write_text(text)
    return str(path)


# ---- settings files
# ------------------------------------------------------------------------------------------


def test_a_yaml_bomb_is_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    assert f"more than {MOST_VALUES:,} values" in refused("train", settings(tmp_path, "\n".join(lines)))


@pytest.mark.parametrize("text", ["&a [*a]", "a: &a {b: *a}", "a: &a\n  <<: *a\n  b: 1"])
def test_self_referential_yaml_is_refused(tmp_path: Path, text: str) -> None:
    assert "settings.yaml" in refused("train", settings(tmp_path, text))


def test_ordinary_yaml_anchors_are_accepted(tmp_path: Path) -> None:
    check_yaml("base: &base {lr: 1}\nother: {<<: *base, b: 2}\n", "here")


def test_a_settings_file_has_a_maximum_size(tmp_path: Path) -> None:
    assert "at most 1,000,000" in refused("train", settings(tmp_path, "# " + "x" * 1_000_000))
    assert "is not YAML" in refused("train", settings(tmp_path, "[" * 50_000))


@pytest.mark.parametrize("where", ["file", "command line"])
def test_settings_cannot_read_environment_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hidden")
    given = settings(tmp_path, "rollout: {system_prompt: '${oc.env:SECRET_TOKEN}'}")
    said = refused("train", given if where == "file" else "rollout.system_prompt=${oc.env:SECRET_TOKEN}", "--print-config")
    assert "rollout.system_prompt" in said
    assert "write the value itself instead of ${...}" in said
    assert "hidden" not in said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (f"steps={'9' * 5000}", "is not key=value as Hydra writes it"),
        ("name=" + "x" * 300, "the name is too long"),
        ("name=\udc80", "surrogates not allowed"),
    ],
)
def test_an_absurd_setting_is_a_one_line_error(tmp_path: Path, given: str, said: str) -> None:
    assert said in refused("sft", *SFT, f"output={tmp_path}", given)


@pytest.mark.parametrize("text", [f"steps: {'9' * 5000}", 'name: "\\ud800"', "steps: ${steps}", "name: ${output}${output}"])
def test_an_absurd_value_in_a_file_is_a_one_line_error(tmp_path: Path, text: str) -> None:
    refused("sft", settings(tmp_path, text))


# ---- code in a model folder
# --------------------------------------------------------------------------------------


def model_with_code(folder: Path, *, known: bool) -> Path:
    """A model whose files refer to code that creates a marker file when imported. `known`:
    transformers also has a class for it."""
    model = folder / "model"
    tiny_model().save_pretrained(model)
    TOKENIZER.save_pretrained(model)
    (model / "evil.py").write_text(f"open({str(folder / 'mark')!r}, 'w').write('ran')\nclass Evil: pass\n")
    names = ("AutoConfig", "AutoModelForCausalLM", "AutoModelForSequenceClassification")
    for file, more in (
        ("config.json", {"auto_map": dict.fromkeys(names, "evil.Evil")} | ({} if known else {"model_type": "evil"})),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}),
    ):
        content = json.loads((model / file).read_text())
        (model / file).write_text(json.dumps(content | more))
    return model


LOADS = {
    "model": lambda place: load_model(place, "float32"),
    "tokenizer": load_tokenizer,
    "classifier": lambda place: load_classifier(place, "float32", description="it"),
}


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("loaded", LOADS)
def test_code_of_a_model_never_runs_even_if_the_prompt_is_confirmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaded: str, known: bool
) -> None:
    model = model_with_code(tmp_path, known=known)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 20))
    try:
        LOADS[loaded](str(model))
    except ConfigError:
        assert not known or loaded == "tokenizer"
    assert not (tmp_path / "mark").exists()


@pytest.mark.integration
def test_code_of_a_model_does_not_run_without_a_terminal(tmp_path: Path) -> None:
    model = model_with_code(tmp_path, known=False)
    command = [sys.executable, "-m", "ludic.cli.app", "sft", *SFT, f"model={model}", f"output={tmp_path}/runs"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "mark").exists()


# ---- the machine
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "permission is denied"),
        (errno.ENOTDIR, "a file"),
    ],
)
def test_a_disk_error_is_one_line_with_the_path(number: int, said: str) -> None:
    line = describe_machine_fault(OSError(number, os.strerror(number), "/data/run/model"))
    assert line is not None
    assert said in line
    assert "/data/run/model" in line


def test_a_full_disk_is_recognised_in_a_safetensors_error() -> None:
    line = describe_machine_fault(SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"))
    assert line is not None
    assert "the disk is full" in line


@pytest.mark.parametrize(
    "bug", [KeyError("a"), FileNotFoundError(2, "no such file", "x"), SafetensorError("header"), ValueError("x")]
)
def test_a_bug_is_not_reported_as_a_machine_fault(bug: Exception) -> None:
    assert describe_machine_fault(bug) is None


def test_a_disk_that_fills_up_while_saving_a_model_is_a_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "model.safetensors")

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", full)
    assert "the disk is full" in refused("sft", *SFT, f"output={tmp_path}", "name=run")
    assert "the disk is full" not in (tmp_path / "run" / "progress.json").read_text()  # the run folder has the original error
    assert "No space left" in (tmp_path / "run" / "progress.json").read_text()


def test_an_output_path_that_is_a_file_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    assert "is a file" in refused("sft", *SFT, f"output={tmp_path}/runs", "name=run")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("trainer.model_device=cuda:99", "trainer.model_device (cuda:99)"),
        ("trainer.model_device=warp", "must be a torch device"),
        ("lora.target_modules=[nope]", "lora.target_modules (['nope'])"),
    ],
)
@pytest.mark.parametrize("command", ["train", "sft", "train-rm", "dpo"])
def test_missing_devices_and_model_features_are_refused_before_a_folder_is_created(
    tmp_path: Path, command: str, given: str, said: str
) -> None:
    tiny_model().save_pretrained(tmp_path / "small")
    TOKENIZER.save_pretrained(tmp_path / "small")
    rank = ["lora.rank=2", f"model={tmp_path / 'small'}"] if given.startswith("lora") else []
    pairs = ["pairs=4", "task.args.num_heldout=4"]
    sizes = {"train": ["warmup.steps=0", "steps=0"], "sft": ["rows=10"], "train-rm": pairs, "dpo": pairs}
    assert said in refused(command, "threads=1", *NETWORK, *sizes[command], *rank, given, f"output={tmp_path}/runs")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "optimizer.json", "trainer_state.json"])
def test_a_truncated_checkpoint_is_a_one_line_error_with_its_name(tmp_path: Path, file: str) -> None:
    ludic("sft", *SFT, f"output={tmp_path}", "name=run")
    run = tmp_path / "run"
    RunDirectory(run).write_progress(replace(RunDirectory(run).read_progress(), phase="sft"))
    damaged = run / "checkpoints" / "step_000002" / file
    damaged.write_bytes(damaged.read_bytes()[:20])
    assert file in refused("sft", "--resume", str(run))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{{ raise_exception('only users may speak') }}", "only users may speak"),
        ("{%- macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "maximum recursion depth exceeded"),
    ],
)
def test_a_chat_template_that_raises_is_a_one_line_error(tmp_path: Path, text: str, said: str) -> None:
    tiny_model().save_pretrained(tmp_path / "small")
    TOKENIZER.save_pretrained(tmp_path / "small")
    template = tmp_path / "small" / "chat_template.jinja"
    template.write_text(text)
    shown = refused("train", "threads=1", f"model={tmp_path / 'small'}", "warmup.steps=1", "steps=0", f"output={tmp_path}/runs")
    assert f"chat template fails on these messages: {said}" in shown.splitlines()[-1]


# ---- hostile data, settings and weights
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('{"prompt": "a", "completion": ' + "9" * 5_000 + "}", "rows.jsonl, line 1 is not JSON: Exceeds the limit (4300"),
        ('{"prompt": "a", "completion": "\\ud800"}', r"surrogate pair ('\ud800')"),
        (
            '{"prompt": "a", "completion": "b", "completion": "c"}',
            "an object has the key 'completion' 2 times",
        ),
        ('{"prompt": ' + "[" * 100_000, "line 1 is nested too deeply"),
    ],
)
def test_a_row_that_cannot_be_text_is_a_one_line_error(tmp_path: Path, row: str, said: str) -> None:
    (tmp_path / "rows.jsonl").write_text(f"{row}\n")
    assert said in refused("sft", *SFT, f"data={tmp_path}/rows.jsonl", f"output={tmp_path}").splitlines()[-1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: ${output}\noutput: ${name}", "refers to another value"),
        ('name: "a\\0b"', "name ('a\\x00b') holds a NUL character"),
    ],
)
def test_a_setting_that_is_no_plain_text_is_a_one_line_error(tmp_path: Path, text: str, said: str) -> None:
    lines = refused("train", settings(tmp_path, text)).splitlines()
    assert len(lines) == 1
    assert said in lines[0]


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("model.safetensors", pickle.dumps({"a": 1}), "weights is damaged, or is not safetensors"),
        ("model.safetensors", None, "no file named model.safetensors"),
        ("model.safetensors.index.json", b'{"weight_map": {}}', "index of weights has no 'metadata'"),
        ("adapter_model.safetensors", b"", "weights is damaged, or is not safetensors"),
    ],
)
def test_wrong_weights_are_a_one_line_error(tmp_path: Path, file: str, content: bytes | None, said: str) -> None:
    """None: a link to itself."""
    tiny_model().save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    folder = tmp_path / "model"
    if file.startswith("adapter"):
        folder = tmp_path / "adapter"
        folder.mkdir()
        config = {"peft_type": "LORA", "r": 2, "base_model_name_or_path": str(tmp_path / "model"), "target_modules": ["q_proj"]}
        (folder / "adapter_config.json").write_text(json.dumps({**config, "task_type": "CAUSAL_LM"}))
    (folder / "model.safetensors").unlink(missing_ok=True)
    if content is None:
        (folder / file).symlink_to(file)
    else:
        (folder / file).write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_model(str(folder), "float32")


def test_a_pointer_of_a_hundred_thousand_brackets_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ludic("sft", *SFT, f"output={tmp_path}", "name=run")
    run = tmp_path / "run"
    (run / "checkpoints" / "latest.json").write_text("[" * 100_000)
    (run / "model" / ".README.md.unfinished").touch()  # as a killed save leaves it
    ludic("sft", "--resume", str(run), "steps=+1")
    assert "latest.json is nested too deeply" in caplog.text
    assert not list(run.rglob("*.unfinished"))


def test_a_name_cannot_send_control_characters_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with open_console(json_only=False) as console:
        console.print("writing to a\x1b[2J/", highlight=False)
    assert capsys.readouterr().out == "writing to a\\x1b[2J/\n"


# ---- paths
# ------------------------------------------------------------------------------------------


def test_a_missing_local_model_is_not_looked_up_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    looked_up: list[object] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *address, **_: looked_up.append(address) or [])
    for load in (load_tokenizer, lambda source: load_model(source, "float32")):
        with pytest.raises(ConfigError, match=r"runs/firts .*did you mean runs/first\?"):
            load("runs/firts")
        with pytest.raises(ConfigError, match="file is a file"):
            load("file")
        with pytest.raises(ConfigError, match=r"\./nowhere does not exist"):
            load("./nowhere")
    assert not looked_up
