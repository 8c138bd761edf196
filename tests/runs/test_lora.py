"""`lora.rank=8` in `ludic train` and `ludic sft`: what is saved, what can read it, and that a
stopped run continues unchanged."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from commands import train_until
from safetensors.torch import load_file
from training_samples import TOKENIZER, tiny_model
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from ludic.cli.app import app
from ludic.errors import ConfigError
from ludic.models.loading import load_model, load_tokenizer

IDS = torch.tensor([[52, 53, 54, 65]])
SFT = ["threads=1", "rows=40", "batch_size=8", "epochs=1", "heldout=0.1"]
LORA = ["lora.rank=2", "lora.dropout=0.2", "trainer.lr=0.01"]
TINY = [
    "threads=1",
    "warmup.steps=3",
    "warmup.batch_size=4",
    "steps=3",
    "rollout.prompts=2",
    "rollout.group_size=4",
    "rollout.log_every=1",
    "evaluation.prompts=3",
    "evaluation.samples_per_prompt=2",
    "network.hidden_size=16",
    "network.num_heads=2",
    "network.num_kv_heads=1",
    "network.intermediate_size=16",
]
REWARD = ["reward=byte_rewards:mean_id", "task.args.max_new_tokens=4", "task.args.num_heldout=3"]


def ludic(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code in (1, 2)
    return result.stderr


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return load_model(str(folder), "float32")(input_ids=IDS).logits


def model_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def rows(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    lines = [json.dumps({"prompt": f"{n * 7919 % 100000}>", "completion": f"{n:03d}"}) for n in range(30)]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def arguments(folder: Path) -> list[str]:
    """Arguments of a run that learns something in both phases."""
    return [*TINY, *REWARD, f"data={rows(folder)}", "warmup.trainer.lr=0.01", f"output={folder}", "name=run"]


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    return arguments(tmp_path)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with adapters on a small model. No test may change it."""
    folder = tmp_path_factory.mktemp("module")
    shown = ludic("train", *arguments(folder), *LORA)
    assert "832 weights are trained, 7,360 are frozen" in shown  # 2 x 2 x (q 32, k 24, v 24, o 32, mlp 3 x 32)
    return folder / "run"


@pytest.fixture(scope="module")
def model_on_disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "given"
    tiny_model().save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def loaded_run(tmp_path_factory: pytest.TempPathFactory, model_on_disk: Path) -> Path:
    """The folder of a run with adapters on a model from disk. No test may change it."""
    folder = tmp_path_factory.mktemp("module")
    ludic("train", *arguments(folder), *LORA, f"model={model_on_disk}")
    return folder / "run"


def test_a_run_saves_the_merged_model_the_adapters_and_their_base(run: Path) -> None:
    base, merged = model_weights(run / "base"), model_weights(run / "model")
    assert base.keys() == merged.keys()
    changed = {name for name in base if not torch.equal(base[name], merged[name])}
    assert changed == {name for name in base if name.endswith("_proj.weight")}
    assert all("lora_" in name for name in load_file(run / "adapter" / "adapter_model.safetensors"))
    torch.testing.assert_close(logits(run / "adapter"), logits(run / "model"), atol=1e-5, rtol=1e-5)
    assert (logits(run / "model") - logits(run / "base")).abs().max() > 1e-4
    assert torch.equal(AutoModelForCausalLM.from_pretrained(run / "model")(input_ids=IDS).logits, logits(run / "model"))
    assert not list((run / "checkpoints" / "reinforce").rglob("model.safetensors"))


def test_the_warm_up_of_a_small_model_trains_all_weights(run: Path, tiny: list[str], tmp_path: Path) -> None:
    ludic("train", *tiny, "name=plain", "steps=0")
    base = model_weights(run / "base")
    assert all(torch.equal(base[name], weight) for name, weight in model_weights(tmp_path / "plain" / "model").items())


def test_rollouts_are_sampled_from_the_trained_model(run: Path) -> None:
    """From the merged copy, whose log-probabilities equal the trainer's up to rounding, so no ratio
    is clipped on the first pass."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [line for line in lines if line["phase"] == "reinforce"]
    assert len(kept) == 3
    assert {line["train/policy_version"] for line in kept if "train/policy_version" in line} <= {0.0, 1.0, 2.0}
    played = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    last = played[-1]["steps"][0]
    assert last["info"]["policy_version"] == 2


def test_an_evaluation_of_the_run_its_model_or_its_adapters_is_equal(run: Path, tmp_path: Path) -> None:
    settings = [f"output={tmp_path}", "problems=3", "k=2", "--json"]
    found = [
        json.loads(ludic("eval", str(run), *source, *settings, f"name=eval{index}"))
        for index, source in enumerate(([], [f"model={run / 'model'}"], [f"model={run / 'adapter'}"]))
    ]
    rates = [{key: value for key, value in each.items() if key not in ("model", "wall_s", "config_hash")} for each in found]
    assert rates[0] == rates[1] == rates[2]
    assert found[0]["model"] != found[2]["model"]


def test_a_moved_run_still_finds_the_base_of_its_adapters(run: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(run, tmp_path / "moved"))
    settings = moved / "adapter" / "adapter_config.json"
    settings.write_text(settings.read_text().replace(str(run), "/gone"))
    torch.testing.assert_close(logits(moved / "adapter"), logits(run / "model"), atol=1e-5, rtol=1e-5)
    (moved / "base").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="as their base, which does not exist"):
        load_model(str(moved / "adapter"), "float32")


def test_adapters_can_be_trained_further(run: Path, tiny: list[str], tmp_path: Path) -> None:
    ludic("train", *tiny, *LORA, "warmup.steps=0", "name=further", f"model={run / 'adapter'}")
    further = tmp_path / "further"
    torch.testing.assert_close(logits(further / "base"), logits(run / "model"), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits(further / "adapter"), logits(further / "model"), atol=1e-5, rtol=1e-5)
    assert (logits(further / "model") - logits(run / "model")).abs().max() > 1e-4


def test_a_loaded_model_has_adapters_during_warm_up_and_they_name_their_base(
    loaded_run: Path, model_on_disk: Path, tmp_path: Path
) -> None:
    config = json.loads((loaded_run / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(model_on_disk)
    assert not (loaded_run / "base").exists()
    assert not list((loaded_run / "checkpoints").rglob("model.safetensors"))
    torch.testing.assert_close(logits(loaded_run / "adapter"), logits(loaded_run / "model"), atol=1e-5, rtol=1e-5)
    bare = Path(shutil.copytree(loaded_run / "adapter", tmp_path / "bare"))
    (bare / "tokenizer_config.json").unlink()  # as adapters of other tools do
    assert load_tokenizer(str(bare))("529140>")["input_ids"] == [byte + 3 for byte in b"529140>"]


@pytest.mark.parametrize(
    ("loaded", "phase", "step"),
    [(False, "warm_up", 3), (False, "reinforce", 2), (True, "warm_up", 2), (True, "warm_up", 3), (True, "reinforce", 2)],
)
def test_a_stopped_run_continues_as_if_uninterrupted(
    request: pytest.FixtureRequest, tiny: list[str], tmp_path: Path, loaded: bool, phase: str, step: int
) -> None:
    whole = request.getfixturevalue("loaded_run" if loaded else "run")
    given = [*tiny, *LORA, *([f"model={request.getfixturevalue('model_on_disk')}"] if loaded else [])]
    assert train_until("train", step, given, phase=phase) == 130
    ludic("train", "--resume", str(tmp_path / "run"))
    for file in ("adapter/adapter_model.safetensors", "model/model.safetensors"):
        expected, resumed = (load_file(folder / file) for folder in (whole, tmp_path / "run"))
        assert all(torch.equal(expected[name], resumed[name]) for name in expected)


def test_supervised_runs_support_adapters(tmp_path: Path, model_on_disk: Path) -> None:
    where = [f"output={tmp_path}", f"model={model_on_disk}"]
    shown = ludic("sft", *SFT, *where, *LORA, "name=run")
    assert "9,920 parameters, 1,024 of them trained" in shown
    run = tmp_path / "run"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["after"]["loss"] < summary["before"]["loss"]
    base, merged = model_weights(model_on_disk), model_weights(run / "model")
    assert any(not torch.equal(base[name], merged[name]) for name in base)
    assert torch.equal(base["model.embed_tokens.weight"], merged["model.embed_tokens.weight"])
    torch.testing.assert_close(logits(run / "adapter"), logits(run / "model"), atol=1e-5, rtol=1e-5)
    ludic(
        "sft",
        *SFT,
        f"output={tmp_path}",
        "lora.rank=2",
        "lora.target_modules=[q_proj]",
        "name=made",
        "network.hidden_size=16",
        "network.num_heads=2",
    )
    stored = load_file(tmp_path / "made" / "adapter" / "adapter_model.safetensors")
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in stored} == {"q_proj"}
    torch.testing.assert_close(logits(tmp_path / "made" / "adapter"), logits(tmp_path / "made" / "model"), atol=1e-5, rtol=1e-5)


def test_invalid_settings_are_refused_before_anything_is_written(tiny: list[str], tmp_path: Path) -> None:
    assert "lora.rank" in refused("train", *tiny, "lora.alpha=4")
    assert "must be a whole number >= 1" in refused("train", *tiny, "lora.rank=-1")
    assert "must be a list of names" in refused("train", *tiny, "lora.rank=2", "lora.target_modules=q_proj")
    assert "lora.rank" in refused("train", *tiny, "lora.ranks=2")
    assert not (tmp_path / "run").exists()


def test_all_weights_of_merged_adapters_can_be_trained(run: Path, tiny: list[str], tmp_path: Path) -> None:
    ludic("train", *tiny, "warmup.steps=0", "name=whole", f"model={run / 'adapter'}")
    before, after = (load_model(str(folder), "float32") for folder in (run / "model", tmp_path / "whole" / "model"))
    assert all(parameter.requires_grad for parameter in before.parameters())
    changed = [name for (name, old), new in zip(before.named_parameters(), after.parameters(), strict=True) if (old != new).any()]
    assert len(changed) > len(list(before.parameters())) / 2
