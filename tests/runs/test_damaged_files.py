"""One byte of any file of a killed run, or of the model that it began with, is flipped: the resume
refuses and names the file, or ends with the weights of the undisturbed run."""

import json
import shutil
from pathlib import Path

import pytest
from commands import NETWORK
from killed_commands import killed_at
from safetensors.torch import load_file
from training_samples import TOKENIZER, tiny_model
from typer.testing import CliRunner, Result

from ludic.cli.app import app

THREE = ["threads=1", "steps=3", "trainer.lr=0.01", "checkpoint.max_to_keep=1"]
RL = [
    *(*THREE, "rollout.prompts=2", "rollout.group_size=4", "rollout.log_every=1", "evaluation.samples_per_prompt=1"),
    *("data=rows.jsonl", "reward=byte_rewards:mean_id", "task.args.max_new_tokens=4", "task.args.num_heldout=2"),
]
PAIRS = [*THREE, "batch_size=8", "task.args.num_heldout=4", "pairs=20"]
WARM = ["warmup.steps=2", "warmup.batch_size=4"]
BEGUN = ["model=start"]
KL = ["algorithm=grpo", "algorithm_args.reference_kl=0.1"]
NO_CHECKPOINT, CHECKPOINTS = ["checkpoint.every_n_steps=0"], ["checkpoint.every_n_steps=1"]
RUNS = {
    "run/model/model.safetensors": ("train", "reinforce 2", [*RL, *NETWORK, *WARM, *NO_CHECKPOINT]),
    "run/reference/model.safetensors": ("train", "reinforce 3", [*RL, *BEGUN, *KL, *CHECKPOINTS]),
    "run/base/config.json": ("train", "reinforce 3", [*RL, *NETWORK, *WARM, "lora.rank=2", *CHECKPOINTS]),
    "run/adapter/adapter_model.safetensors": ("train", "reinforce 2", [*RL, *BEGUN, "lora.rank=2", *NO_CHECKPOINT]),
    "start/model.safetensors": ("sft", "sft 3", [*THREE, *BEGUN, "data=rows.jsonl", "batch_size=4", "lora.rank=2", *CHECKPOINTS]),
    "run/reference.logps": ("dpo", "dpo 3", [*PAIRS, *NETWORK, *WARM, "answers=0", *CHECKPOINTS]),
    "run/base/model.safetensors": ("dpo", "dpo 2", [*PAIRS, *NETWORK, *WARM, "answers=0", "lora.rank=2", *NO_CHECKPOINT]),
    "start/tokenizer.json": ("train-rm", "rm 3", [*PAIRS, *BEGUN, "lora.rank=2", *CHECKPOINTS]),
}
"""A file whose damage would change the weights: command, the line of metrics.jsonl before which it
is killed, and settings."""


@pytest.fixture(params=list(RUNS))
def killed(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Path, Path]:
    """(command, folder with a killed run and all that it reads, a file that decides weights)."""
    command, line, settings = RUNS[request.param]
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    tiny_model().save_pretrained("start")
    TOKENIZER.save_pretrained("start")
    rows = [{"prompt": f"{letter}?", "completion": f"{letter}!"} for letter in "abcdefghijklmnop"]
    Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert killed_at(f"line {line}", command, *settings, "output=.", "name=run")
    return command, folder, Path(request.param)


def resume(command: str) -> Result:
    return CliRunner().invoke(app, [command, "--resume", "run"])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def weights(run: Path) -> dict[str, list[object]]:
    return {name: value.tolist() for name, value in load_file(run / "model" / "model.safetensors").items()}


@pytest.mark.integration
def test_a_flipped_byte_is_refused_by_the_name_of_its_file_or_changes_nothing(killed: tuple[str, Path, Path]) -> None:
    command, folder, decisive = killed
    files = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size]
    shutil.copytree(folder, folder.with_name("killed"))
    assert resume(command).exit_code == 0
    expected, refused = weights(Path("run")), set()
    for file in files:
        shutil.rmtree("run")
        shutil.copytree(folder.with_name("killed"), ".", dirs_exist_ok=True)
        flip(file)
        result = resume(command)
        if result.exit_code == 0:
            assert weights(Path("run")) == expected, file
        else:
            assert isinstance(result.exception, SystemExit), (file, result.exception)
            assert file.name in result.stderr.splitlines()[-1], (file, result.stderr)
            refused.add(file)
    assert decisive in refused
