"""Continuing a run: by one process at a time, with its original settings, or for more steps."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from commands import NETWORK, ludic, metrics_of, refused, same_weights, summary_of, train_until
from killed_commands import killed_at
from run_folders import make_run
from training_samples import TOKENIZER, tiny_model
from typer.testing import CliRunner

from ludic.cli.app import app
from ludic.errors import CheckpointError, ConfigError
from ludic.files.manifest import HASH
from ludic.recipes.compose import compose
from ludic.recipes.epochs_schema import compose_sft
from ludic.recipes.named_sources import list_read_files
from ludic.runs.directory import RunDirectory, SFTDirectory
from ludic.runs.lock import RunLock
from ludic.runs.reinforce import RLRun
from ludic.runs.resume import Changes, find_steps

TINY = [
    *("threads=1", "warmup.steps=1", "warmup.batch_size=4", "steps=3", "rollout.prompts=2", "rollout.group_size=4"),
    *("rollout.log_every=1", "evaluation.prompts=3", "evaluation.samples_per_prompt=2", *NETWORK),
]
CONSTANT = [
    *TINY,
    "trainer.lr_scheduler_type=null",
    "trainer.warmup_steps=0",
    "trainer.warmup_ratio=null",
    "trainer.lr_min_ratio=0",
]
SFT = [
    "threads=1",
    "rows=40",
    "batch_size=8",
    "heldout=0.1",
    *NETWORK,
    "trainer.lr_scheduler_type=constant_with_warmup",
    "trainer.warmup_steps=1",
]


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a constant learning rate. No test may change it."""
    parent = tmp_path_factory.mktemp("runs")
    ludic("train", *CONSTANT, f"output={parent}", "name=run")
    return parent / "run"


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


@pytest.mark.integration
@pytest.mark.parametrize("adapted", [False, True])
def test_a_run_killed_before_its_first_reinforced_checkpoint_has_its_weights_in_memory_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapted: bool
) -> None:
    """Products with one row have other last digits where weights are not aligned to 16 bytes, as
    those in the memory of a file need not be."""
    seen = []

    async def stop(run: RLRun) -> None:
        seen.append({name: (weight.data_ptr() % 64, weight.tolist()) for name, weight in run.parts.model.named_parameters()})
        raise ConfigError("the process is gone")

    monkeypatch.setattr(RLRun, "_reinforce", stop)
    for arguments in (
        [*TINY, *(["lora.rank=2"] * adapted), f"output={tmp_path}", "name=run"],
        ["--resume", str(tmp_path / "run")],
    ):
        assert CliRunner().invoke(app, ["train", *arguments]).exit_code != 0
    assert len(seen) == 2
    assert seen[0] == seen[1]


def metrics_by_step(run: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["train/loss"]) for line in metrics_of(run)]


@pytest.mark.parametrize("moment", [1, 2])
def test_a_run_killed_before_it_starts_leaves_its_name_free(tmp_path: Path, moment: int) -> None:
    arguments = ["sft", *SFT, "steps=1", f"output={tmp_path}", "name=run"]
    assert killed_at(moment, *arguments)
    assert not (tmp_path / "run").exists()
    ludic(*arguments)


def test_the_error_of_a_folder_without_a_run_does_not_suggest_resuming(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    said = refused("sft", *SFT, "steps=1", f"output={tmp_path}", "name=run")
    assert "holds no run that --resume could continue" in said


@pytest.mark.parametrize("name", ["../other", "/tmp/other", "a/../../b", "..", ".", "''"])
def test_a_name_cannot_leave_the_output_folder(tmp_path: Path, name: str) -> None:
    assert "must name a folder in output" in refused("sft", *SFT, "steps=1", f"output={tmp_path}/runs", f"name={name}")
    assert not list(tmp_path.iterdir())


def test_only_one_process_can_resume_a_folder_and_the_error_names_it(run: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", f"from ludic.runs.lock import RunLock; from pathlib import Path; a = RunLock(Path({str(run)!r}));"
         "print(flush=True); input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert holder.stdout is not None
    holder.stdout.readline()
    before = (run / "metrics.jsonl").read_bytes()
    assert f"is in use by process {holder.pid} on " in refused("train", "--resume", str(run))
    assert (run / "metrics.jsonl").read_bytes() == before
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    assert "is finished" in ludic("train", "--resume", str(run))  # its death released the lock


def test_the_lock_is_released_when_the_command_ends(tmp_path: Path) -> None:
    first = RunLock(tmp_path)
    with pytest.raises(CheckpointError, match=f"process {os.getpid()} on"):
        RunLock(tmp_path)
    first.release()
    RunLock(tmp_path).release()


@pytest.mark.parametrize(
    ("before", "after", "key"),
    [("lr: 0.0003", "lr: 0.1", "trainer.lr"), ("\nseed: 0", "\nseed: 1", "seed"), ("\nsteps: 3", "\nsteps: 4", "steps")],
)
def test_a_changed_setting_is_refused_by_name(run: Path, before: str, after: str, key: str) -> None:
    config = run / "config.yaml"
    text = config.read_text()
    assert before in text
    config.write_text(text.replace(before, after))
    said = refused("train", "--resume", str(run))
    assert re.search(
        rf"config\.yaml: {key} is {re.escape(after.split()[-1])}, .*began with {re.escape(before.split()[-1])}", said
    )


def test_settings_of_output_and_checkpoints_can_be_changed(run: Path) -> None:
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("\nlog_every: ", "\nlog_every: 1"))
    assert "is finished" in ludic("train", "--resume", str(run), "inference.push_timeout_s=600")


def test_a_run_with_a_former_setting_name_resumes_with_its_value(run: Path) -> None:
    config, progress = run / "config.yaml", json.loads((run / "progress.json").read_text())
    del progress[HASH], progress["model_files"]
    for file, text in ((config, config.read_text()), (run / "progress.json", json.dumps(progress))):
        assert "batches_ahead" in text
        file.write_text(text.replace("batches_ahead", "max_lag"))
    assert "is finished" in ludic("train", "--resume", str(run))
    config.write_text(config.read_text().replace("max_lag: 0", "max_lag: 1"))
    said = refused("train", "--resume", str(run))
    assert re.search(r"inference\.batches_ahead is 1, .*began with 0", said)


def test_a_folder_of_an_earlier_version_can_be_resumed(run: Path) -> None:
    progress = json.loads((run / "progress.json").read_text())
    for key in ("recipe", "versions", "failed", "model_files", HASH):
        del progress[key]
    (run / "progress.json").write_text(json.dumps(progress))
    assert "is finished" in ludic("train", "--resume", str(run))


@pytest.mark.parametrize("damaged", ["model/model.safetensors", "model/tokenizer.json", "model/manifest.json", "progress.json"])
def test_a_flipped_byte_in_what_a_resume_reads_is_refused_by_the_name_of_the_file(run: Path, damaged: str) -> None:
    before_reinforcement(run)
    content = bytearray((run / damaged).read_bytes())
    content[len(content) // 2] ^= 1
    (run / damaged).write_bytes(content)
    said = refused("train", "--resume", str(run)).splitlines()[-1]
    assert f"{Path(damaged).name} " in said
    assert "ludic train" in said  # the remedy


@pytest.mark.parametrize("added", ["chat_template.jinja", "special_tokens_map.json", "additional_chat_templates/tools.jinja"])
def test_a_file_added_to_what_a_resume_reads_is_refused_by_its_name(run: Path, added: str) -> None:
    before_reinforcement(run)
    (run / "model" / added).parent.mkdir(exist_ok=True)
    (run / "model" / added).write_text("{}")
    said = refused("train", "--resume", str(run)).splitlines()[-1]
    assert f"{added} was added later" in said
    assert "ludic train" in said  # the remedy


def stopped_sft(folder: Path, *arguments: str) -> Path:
    """A run of `ludic sft` over a model in `folder`, as if it had been killed after its last
    step."""
    tiny_model().save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    Path("rows.jsonl").write_text(f"{json.dumps({'prompt': 'a?', 'completion': 'a!'})}\n" * 4)
    settings = ["threads=1", "steps=1", "batch_size=4", "heldout=0", "data=rows.jsonl", "output=.", "name=run"]
    ludic("sft", *settings, *arguments)
    return stop_again(Path("run"))


def test_a_run_inside_the_folder_of_its_model_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = stopped_sft(Path(), "model=.")
    for name in ("notes.txt", "sft_config.json", "results.json"):
        Path(name).write_text("not read")
    ludic("sft", "--resume", str(run))
    Path("chat_template.jinja").write_text("{{ messages }}")
    assert "chat_template.jinja was added later" in refused("sft", "--resume", str(stop_again(run)))


def test_the_weights_of_the_model_may_be_sharded_anew_once_a_checkpoint_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = stopped_sft(Path("start"), "model=start")
    tiny_model().save_pretrained("start", max_shard_size="20KB")
    Path("start/model.safetensors").unlink()
    assert len(list(Path("start").glob("*.safetensors"))) > 1
    directory, recipe = SFTDirectory(run), compose_sft([str(run / "config.yaml")])
    shutil.rmtree(directory.checkpoints)
    assert "model-00001-of-00002.safetensors was added later" in refused("sft", "--resume", str(run))
    (directory.checkpoints / "step_000001").mkdir(parents=True)
    directory.check_models(recipe)
    Path("start/adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"since the run began: adapter_config\.json was added later;"):
        directory.check_models(recipe)


def stop_again(run: Path) -> Path:
    directory = SFTDirectory(run)
    directory.write_progress(replace(directory.read_progress(), phase="sft", after=None))
    return run


def test_a_chat_template_that_was_edited_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("template.jinja").write_text("{% for message in messages %}{{ message.content }}</s>{% endfor %}")
    run = stopped_sft(Path("start"), "model=start", "chat_template=template.jinja")
    ludic("sft", "--resume", str(run))
    Path("template.jinja").write_text("{% for message in messages %}{{ message.role }}</s>{% endfor %}")
    said = refused("sft", "--resume", str(stop_again(run)))
    assert "template.jinja has 63 bytes, not 66" in said


def test_the_base_of_adapters_that_a_run_reads_is_read_too(tmp_path: Path) -> None:
    base, adapter = tmp_path / "elsewhere", tmp_path / "adapter"
    for folder, content in ((base, {}), (adapter, {"base_model_name_or_path": str(base)})):
        folder.mkdir()
        (folder / ("adapter_config.json" if content else "config.json")).write_text(json.dumps(content))
    recipe = compose_sft([f"model={adapter}"])
    assert list_read_files(recipe) == {str(adapter): ["adapter_config.json"], str(base): ["config.json"]}


@pytest.mark.parametrize("layout", ["beside a config.yaml", "in a folder model"])
def test_the_folder_that_a_model_is_loaded_from_is_the_one_that_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("start") if "beside" in layout else Path("start", "model")
    folder.mkdir(parents=True)
    if "beside" in layout:
        (folder / "config.yaml").write_text("of another library: 1")
    run = stopped_sft(folder, "model=start")
    shutil.rmtree(run / "checkpoints")
    tiny_model(seed=1).save_pretrained(folder)
    assert "the content of model.safetensors has changed" in refused("sft", "--resume", str(run))


def test_a_model_may_change_once_a_checkpoint_has_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = stopped_sft(Path("start"), "model=start")
    shutil.copytree(run, "undisturbed")
    tiny_model(seed=1).save_pretrained("start")
    ludic("sft", "--resume", str(run))
    assert same_weights(run, Path("undisturbed"))
    shutil.rmtree(stop_again(run) / "checkpoints")
    assert "the content of model.safetensors has changed" in refused("sft", "--resume", str(run))


def test_what_no_checkpoint_has_may_not_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reward model of a policy of the hub, and a reference that lies where the model does."""
    monkeypatch.chdir(tmp_path)
    for number, settings in enumerate((["model=owner/policy", "reward_model=judge"], ["model=judge", "reference.model=judge"])):
        tiny_model().save_pretrained("judge")
        recipe = compose([*settings, "output=runs", f"name=run{number}"])
        directory = RunDirectory.begin(recipe)
        directory.release()
        (directory.checkpoints / "reinforce" / "step_000001").mkdir(parents=True)
        directory.check_models(recipe)
        tiny_model(seed=1).save_pretrained("judge")
        with pytest.raises(CheckpointError, match=r"the content of model\.safetensors has changed"):
            directory.check_models(recipe)


def test_a_folder_that_hides_an_id_of_the_hub_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = compose(["model=owner/policy", "output=runs", "name=run"])
    directory = RunDirectory.begin(recipe)
    directory.release()
    directory.check_models(recipe)
    tiny_model().save_pretrained("owner/policy")
    with pytest.raises(CheckpointError, match=r"folder owner/policy .*: config\.json was added later"):
        directory.check_models(recipe)


@pytest.mark.parametrize("setting", ["heldout_data", "task.args.heldout_data"])
def test_other_rows_to_measure_on_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    """Or the measurements before and after would be of different questions."""
    monkeypatch.chdir(tmp_path)
    make, kind = (compose_sft, SFTDirectory) if setting == "heldout_data" else (compose, RunDirectory)
    for source, file in (("held.jsonl", Path("held.jsonl")), ("held", Path("held", "part.jsonl"))):
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps({"prompt": "a?", "completion": "a!"}))
        recipe = make([f"{setting}={source}", "output=runs", f"name={source}"])
        directory = kind.begin(recipe)
        directory.release()
        (file.parent / "notes.txt").write_text("not read")
        directory.check_models(recipe)
        file.write_text(json.dumps({"prompt": "a?", "completion": "b!"}))
        with pytest.raises(CheckpointError, match=rf"the content of {file.name} has changed"):
            directory.check_models(recipe)


def test_the_optimizer_beside_a_model_is_not_read(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "optimizer.safetensors", "optimizer-00001-of-00002.safetensors"):
        (tmp_path / name).write_text("{}")
    assert list_read_files(compose_sft([f"model={tmp_path}"])) == {str(tmp_path): ["config.json", "model.safetensors"]}


def test_the_base_of_a_reward_models_adapters_is_read_although_they_have_a_config(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    for folder in (base, adapter):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    assert str(base) in list_read_files(compose([f"reward_model={adapter}"]))
    assert str(base) not in list_read_files(compose([f"model={adapter}"]))  # transformers reads the config that is there


def test_a_progress_file_without_its_hash_is_damaged(run: Path) -> None:
    progress = json.loads((run / "progress.json").read_text())
    del progress[HASH]
    (run / "progress.json").write_text(json.dumps({**progress, "steps": 1}))
    assert "progress.json is damaged" in refused("train", "--resume", str(run))


def test_a_run_of_a_version_without_manifests_resumes_with_a_line(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    before_reinforcement(run)
    (run / "model" / "manifest.json").unlink()
    progress = json.loads((run / "progress.json").read_text())
    (run / "progress.json").write_text(json.dumps({key: progress[key] for key in progress if key not in (HASH, "model_files")}))
    ludic("train", "--resume", str(run))
    assert re.search(r"model has no manifest\.json: .*verified", caplog.text)


def before_reinforcement(run: Path) -> None:
    """Make it a run that was killed after its warm-up, which resumes from the folder `model`."""
    directory = RunDirectory(run)
    directory.write_progress(replace(directory.read_progress(), phase="reinforce", steps=0, after=None))
    shutil.rmtree(run / "checkpoints")


@pytest.mark.parametrize("content", ["{", "[]", '{"phase": 3, "stage": 4}', "null"])
def test_a_damaged_progress_file_is_a_one_line_error(run: Path, content: str) -> None:
    (run / "progress.json").write_text(content)
    assert "progress.json is damaged" in refused("train", "--resume", str(run))


def test_a_finished_run_continued_for_more_steps_equals_a_longer_run(run: Path, tmp_path: Path) -> None:
    ludic("train", *CONSTANT, "steps=5", f"output={tmp_path}", "name=whole")
    ludic("train", "--resume", str(run), "steps=5")
    assert same_weights(run, tmp_path / "whole")
    assert [(line["phase"], line["step"], line["train/loss"]) for line in metrics_of(run)] == [
        (line["phase"], line["step"], line["train/loss"]) for line in metrics_of(tmp_path / "whole")
    ]
    found, wanted = summary_of(run), summary_of(tmp_path / "whole")
    assert all(found[key] == wanted[key] for key in ("before", "after", "steps", "config_hash"))
    assert "steps (5) must be more than" in refused("train", "--resume", str(run), "steps=5")


def test_supervised_runs_can_be_continued_for_more_steps(tmp_path: Path) -> None:
    ludic("sft", *SFT, "steps=5", f"output={tmp_path}", "name=whole")
    ludic("sft", *SFT, "steps=2", f"output={tmp_path}", "name=run")
    ludic("sft", "--resume", str(tmp_path / "run"), "steps=5")
    assert same_weights(tmp_path / "run", tmp_path / "whole")


def test_steps_can_be_added_to_those_that_a_run_was_asked_for(tmp_path: Path) -> None:
    ludic("sft", *SFT, "steps=5", f"output={tmp_path}", "name=whole")
    ludic("sft", *SFT, "steps=2", f"output={tmp_path}", "name=run")
    assert "\nsteps: 3\n" in ludic("sft", "--resume", str(tmp_path / "run"), "steps=+1", "--print-config")
    ludic("sft", "--resume", str(tmp_path / "run"), "steps=+3")
    assert same_weights(tmp_path / "run", tmp_path / "whole")
    assert metrics_by_step(tmp_path / "run") == metrics_by_step(tmp_path / "whole")
    found, wanted = summary_of(tmp_path / "run"), summary_of(tmp_path / "whole")
    assert all(found[key] == wanted[key] for key in ("status", "before", "after", "steps", "config_hash"))


def test_an_interrupted_run_takes_more_steps_than_it_was_asked_for(tmp_path: Path) -> None:
    ludic("sft", *SFT, "steps=6", f"output={tmp_path}", "name=whole")
    assert train_until("sft", 2, [*SFT, "steps=4", f"output={tmp_path}", "name=run"]) == 130
    ludic("sft", "--resume", str(tmp_path / "run"), "steps=+2")  # 4 + 2, although only 2 were taken
    assert same_weights(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("more", [["steps=+0"], ["steps=+1", "steps=9"], ["steps=+1", "steps=+1"]])
def test_steps_are_given_once(run: Path, more: list[str]) -> None:
    assert "takes one number of steps" in refused("train", "--resume", str(run), *more)


def test_steps_cannot_be_added_to_those_of_unfinished_epochs(tmp_path: Path) -> None:
    assert train_until("sft", 1, [*SFT, "epochs=1", f"output={tmp_path}", "name=run"]) == 130
    said = refused("sft", "--resume", str(tmp_path / "run"), "steps=+2")
    assert "has unfinished epochs=" in said
    assert "has unfinished epochs=1; set steps=N" in said


def test_fewer_steps_than_a_killed_run_has_logged_are_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", phase="reinforce", steps=0)  # 4 steps are logged, none noted in progress.json
    assert re.search(r"steps \(3\) .*more than the 4", " ".join(refused("train", "--resume", str(run), "steps=3").split()))


def test_ranks_refuse_to_add_steps_since_they_may_start_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    directory = RunDirectory.open_to_read(run)
    with pytest.raises(ConfigError, match="set steps=N, for N in all"):
        find_steps(Changes(more_steps=2), compose([str(directory.config)]), directory)


def test_a_decaying_schedule_is_kept_and_more_steps_stay_at_its_minimum(tmp_path: Path) -> None:
    """A linear decay of the factor from 1 at step 0 to 0.25 at step 3: 1 - 0.75 * step / 3 = 1, .75
    and .5 for the steps that the run began with, and 0.25 for all others."""
    decay = ["trainer.lr_scheduler_type=linear", "trainer.warmup_steps=0", "trainer.lr_min_ratio=0.25", "trainer.lr=0.004"]
    ludic("sft", *SFT, *decay, "steps=3", f"output={tmp_path}", "name=run")
    before = metrics_by_step(tmp_path / "run")
    said = ludic("sft", "--resume", str(tmp_path / "run"), "steps=+2")
    assert re.search(r"linear schedule: from step 4 .*is 0\.001", " ".join(said.split()))
    lines = metrics_of(tmp_path / "run")
    assert [line["train/lr"] for line in lines] == pytest.approx([0.004, 0.003, 0.002, 0.001, 0.001])
    assert metrics_by_step(tmp_path / "run")[:3] == before
    ludic("sft", *SFT, *decay, "steps=5", f"output={tmp_path}", "name=whole")  # decays over its 5 steps: another run
    hashes = [summary_of(tmp_path / name)["config_hash"] for name in ("run", "whole")]
    assert hashes[0] != hashes[1]
    ludic("sft", "--resume", str(tmp_path / "run"))  # its report, again
    assert summary_of(tmp_path / "run")["config_hash"] == hashes[0]


def test_more_steps_are_refused_if_the_schedule_has_ended_at_zero(tmp_path: Path) -> None:
    settings = ["trainer.lr_scheduler_type=cosine", "trainer.lr_min_ratio=0", "steps=2", f"output={tmp_path}", "name=run"]
    ludic("sft", *SFT, *settings)
    said = refused("sft", "--resume", str(tmp_path / "run"), "steps=5")
    assert "trainer.lr_scheduler_type (cosine) ended at a learning rate of 0" in said
    assert summary_of(tmp_path / "run")["steps"] == 2


@pytest.mark.parametrize("more", [["seed=1"], ["steps=9", "seed=1"], ["steps=null"], ["steps=1.5"], ["other.yaml"]])
def test_resume_accepts_only_steps(run: Path, more: list[str]) -> None:
    assert "accepts steps=N, steps=+N" in refused("train", "--resume", str(run), *more)


def test_changed_library_versions_are_reported(run: Path) -> None:
    progress = RunDirectory(run).read_progress()
    assert progress.versions is not None
    assert set(progress.versions) == {"ludic", "python", "torch", "transformers"}
    progress.versions["torch"] = "1.0"
    RunDirectory(run).write_progress(progress)
    assert "began with torch 1.0" in " ".join(ludic("train", "--resume", str(run)).split())


def test_a_run_that_fails_before_its_first_step_leaves_no_folder(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from ludic.cli.app import app

    settings = [*TINY, "warmup.steps=0", "trainer.eval_at_start=true", f"output={tmp_path}", "name=run"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ludic.runs.held_out.HeldOut.measure", _fails)
        result = CliRunner().invoke(app, ["train", *settings])
    assert isinstance(result.exception, ZeroDivisionError)  # a bug keeps its traceback
    assert not (tmp_path / "run").exists()


def test_a_run_that_fails_later_records_it_in_its_folder(run: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from ludic.cli.app import app

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ludic.runs.held_out.HeldOut.measure", _fails)
        said = CliRunner().invoke(app, ["train", "--resume", str(run), "steps=4"]).output
    assert re.search(rf"is kept; .*`ludic train --resume {re.escape(str(run))}`", " ".join(said.split()))
    assert RunDirectory(run).read_progress().failed == "ZeroDivisionError: by design"
    summary = summary_of(run)
    assert (summary["status"], summary["failed"], summary["algorithm"]) == ("failed", "ZeroDivisionError: by design", "grpo")
    assert summary["samples"]["trained"] == 4 * 2 * 4  # steps, prompts, answers to each
    ludic("train", "--resume", str(run))
    assert RunDirectory(run).read_progress().failed is None
    assert summary_of(run)["status"] == "finished"
    assert summary_of(run)["samples"]["trained"] == 4 * 2 * 4


async def _fails(*_: object, **__: object) -> None:
    raise ZeroDivisionError("by design")


def test_a_stopped_run_can_be_continued_for_more_steps(run: Path, tmp_path: Path) -> None:
    assert train_until("train", 2, [*CONSTANT, f"output={tmp_path}", "name=parts"], phase="reinforce") == 130
    ludic("train", "--resume", str(tmp_path / "parts"), "steps=4")
    ludic("train", "--resume", str(run), "steps=4")
    assert same_weights(run, tmp_path / "parts")


def test_a_summary_records_the_end_the_model_and_the_versions(finished_run: Path, tmp_path: Path) -> None:
    found = summary_of(finished_run)
    assert (found["status"], found["model"], found["algorithm"]) == ("finished", None, "grpo")
    assert found["versions"] == RunDirectory(finished_run).read_progress().versions
    assert found["episodes"] == {"failed": 0, "retried": 0, "cancelled": 0, "dropped_groups": 0}
    assert train_until("train", 1, [*CONSTANT, f"output={tmp_path}", "name=parts"], phase="reinforce") == 130
    assert summary_of(tmp_path / "parts")["status"] == "interrupted"
    ludic("sft", *SFT, "steps=1", f"output={tmp_path}", "name=sft")
    assert (summary_of(tmp_path / "sft")["status"], summary_of(tmp_path / "sft")["algorithm"]) == ("finished", "sft")


def test_the_summary_counts_episodes_that_failed_in_training(tmp_path: Path) -> None:
    """Every fourth answer cannot be graded. Its group is left out, and the summary has the
    number."""
    shown = ludic("train", *failing_settings(tmp_path), f"output={tmp_path}", "name=run")
    lines = [line for line in metrics_of(tmp_path / "run") if "train/loss" in line]
    lost = summary_of(tmp_path / "run")["episodes"]
    assert lost["failed"] == sum(line["train/num_failed_episodes"] for line in lines) > 0
    assert lost["dropped_groups"] > 0
    assert f"{lost['failed']} training episodes failed" in " ".join(shown.split())


@pytest.mark.parametrize("keeps_checkpoints", [True, False])
def test_a_resumed_run_has_each_episode_and_each_failure_once_in_its_logs(tmp_path: Path, *, keeps_checkpoints: bool) -> None:
    """Killed after step 3, with a checkpoint of step 2 or none: the steps since are repeated."""
    settings = [*failing_settings(tmp_path), "steps=4", "checkpoint.every_n_steps=2", f"output={tmp_path}"]
    ludic("train", *settings, "name=whole")
    assert killed_at("line reinforce 3", "train", *settings, "name=run")
    run, whole = tmp_path / "run", tmp_path / "whole"
    if not keeps_checkpoints:
        shutil.rmtree(run / "checkpoints")
    ludic("train", "--resume", str(run))
    for name in ("rollouts.jsonl", "failed_episodes.jsonl", "token_logps.jsonl"):
        found, expected = ((folder / name).read_text().splitlines() for folder in (run, whole))
        assert len(found) == len(expected) > 0, name
    episodes = [json.loads(line)["episode_idx"] for line in (run / "failed_episodes.jsonl").read_text().splitlines()]
    assert episodes == sorted(set(episodes))
    sampled = {json.loads(line)["id"] for line in (run / "rollouts.jsonl").read_text().splitlines()}
    assert {json.loads(line)["id"] for line in (run / "token_logps.jsonl").read_text().splitlines()} <= sampled


def failing_settings(tmp_path: Path) -> list[str]:
    """A run in which a fourth of the answers cannot be graded."""
    problems = tmp_path / "rows.jsonl"
    problems.write_text("".join(json.dumps({"prompt": f"{n * 7919 % 100000}>"}) + "\n" for n in range(30)))
    settings = [
        *TINY,
        "warmup.steps=0",
        "steps=2",
        "rollout.prompts=6",
        f"data={problems}",
        "reward=byte_rewards:fails_for_some_prompts",
    ]
    return [*settings, f"model={tiny_folder(tmp_path)}", "task.args.max_new_tokens=4", "task.args.num_heldout=3"]


def tiny_folder(folder: Path) -> Path:
    from training_samples import TOKENIZER, tiny_model

    tiny_model().save_pretrained(folder / "small")
    TOKENIZER.save_pretrained(folder / "small")
    return folder / "small"
