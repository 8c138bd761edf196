"""`quantization=nf4` with `lora.rank` in every command: what is saved, resumed, refused, and told
about memory. Those of 4 bits need bitsandbytes, which `.ci/run` has in a step of its own."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from byte_rewards import mean_id
from commands import ludic, refused, train_until
from safetensors.torch import load_file
from training_samples import TOKENIZER, tiny_model

from ludic import GRPO
from ludic.models.byte_tokenizer import make_byte_tokenizer
from ludic.models.loading import load_model
from ludic.models.quantization import find_quantized_layers
from ludic.recipes.compose import compose
from ludic.recipes.model import add_adapters, make_small_model
from ludic.runs.memory_estimate import MemoryEstimator, Settings

NEEDED = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
KINDS = [pytest.param("nf4", marks=NEEDED), "int8"]
SMALL = ["network.hidden_size=64", "network.num_heads=2", "network.num_kv_heads=1", "network.intermediate_size=64"]
LORA = ["threads=1", "lora.rank=2", "lora.dropout=0.2", "trainer.lr=0.01"]
RL = [
    *("warmup.steps=3", "warmup.batch_size=4", "warmup.trainer.lr=0.01", "steps=3", "rollout.prompts=2", "rollout.group_size=4"),
    *("rollout.log_every=1", "evaluation.prompts=3", "evaluation.samples_per_prompt=2", "reward=byte_rewards:mean_id"),
    *("task.args.max_new_tokens=4", "task.args.num_heldout=3"),
]
SFT = ["rows=40", "batch_size=8", "epochs=1", "heldout=0.1"]
PAIRS = ["pairs=64", "batch_size=8", "heldout=0.25", "steps=3"]
DPO = [*PAIRS, "warmup.steps=2", "answers=4", "max_new_tokens=4", "reference.model=null"]
IDS = torch.tensor([[52, 53, 54, 65]])


def problems(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    lines = [json.dumps({"prompt": f"{n * 7919 % 100000}>", "completion": f"{n:03d}"}) for n in range(30)]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def rl(folder: Path) -> list[str]:
    return [*LORA, *SMALL, *RL, f"data={problems(folder)}", f"output={folder}", "name=run"]


def logits(model: object) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def given_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "given"
    tiny_model(hidden_size=64, intermediate_size=64).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_run_continues_as_if_uninterrupted(kind: str, tmp_path: Path) -> None:
    """The base is read and quantised again, to the same bits."""
    folders = [tmp_path / name for name in ("whole", "stopped")]
    for folder in folders:
        folder.mkdir()
    shown = ludic("train", *rl(folders[0]), f"quantization={kind}")
    assert " of them quantised" in shown
    assert train_until("train", 2, [*rl(folders[1]), f"quantization={kind}"], phase="reinforce") == 130
    ludic("train", "--resume", str(folders[1] / "run"))
    for file in ("adapter/adapter_model.safetensors", "model/model.safetensors", "base/model.safetensors"):
        expected, resumed = (load_file(folder / "run" / file) for folder in folders)
        assert expected.keys() == resumed.keys()
        assert all(torch.equal(expected[name], resumed[name]) for name in expected)
    run = folders[0] / "run"
    base, merged = (load_file(run / name / "model.safetensors") for name in ("base", "model"))
    assert base.keys() == merged.keys()
    assert all(base[name].dtype == merged[name].dtype and base[name].shape == merged[name].shape for name in base)
    played = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    assert played[-1]["steps"][0]["info"]["policy_version"] == 2
    preflight = json.loads((run / "summary.json").read_text())["mismatch"]["preflight"]
    assert preflight["max"] < 1e-5  # nats between trainer and sampler, before dropout


@NEEDED
def test_every_command_trains_over_a_loaded_model_in_4_bits(given_model: Path, tmp_path: Path) -> None:
    base = load_file(given_model / "model.safetensors")
    common = [*LORA, "quantization=nf4", "quantization.double=true", f"model={given_model}", f"output={tmp_path}"]
    for command, settings in (("sft", SFT), ("train-rm", PAIRS), ("dpo", DPO)):
        ludic(command, *common, *settings, f"name={command}", *(["lora.dropout=0"] if command == "train-rm" else []))
        run = tmp_path / command
        merged = load_file(run / "model" / "model.safetensors")
        assert set(base) <= set(merged), command
        assert all(tensor.dtype == torch.float32 for tensor in merged.values()), command
        stored = load_file(run / "adapter" / "adapter_model.safetensors")
        assert all(".lora_" in name or "score" in name for name in stored), command
        assert load_file(given_model / "model.safetensors").keys() == base.keys()
    summary = json.loads((tmp_path / "sft" / "summary.json").read_text())
    assert summary["after"]["loss"] < summary["before"]["loss"]
    # Over the weights as they are stored, the adapters are near what was trained over 4 bits.
    near, far = (logits(load_model(str(tmp_path / "sft" / part), "float32")) for part in ("adapter", "model"))
    assert 0 < (near - far).abs().mean() < far.std()


def test_python_takes_the_same_setting(given_model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}>"} for n in range(12)]
    settings = {"lora.rank": 2, "quantization": "int8", "steps": 1, "output": str(tmp_path), "name": "run", "threads": 1}
    few = {"rollout.prompts": 2, "rollout.group_size": 2, "rollout.max_new_tokens": 4, "evaluation.prompts": 2}
    GRPO(str(given_model), mean_id, rows, **settings, **few, **{"task.args.num_heldout": 2}).train()
    assert "kind: int8" in (tmp_path / "run" / "config.yaml").read_text()


@pytest.mark.parametrize(
    "settings", [pytest.param(("nf4", "false"), marks=NEEDED), pytest.param(("nf4", "true"), marks=NEEDED), ("int8", "false")]
)
def test_doctor_counts_the_bytes_that_are_stored(settings: tuple[str, str]) -> None:
    kind, double = settings
    recipe = compose(["lora.rank=8", f"quantization={kind}", f"quantization.double={double}"])
    tokenizer = make_byte_tokenizer()
    model = add_adapters(make_small_model(recipe.network, tokenizer), recipe, seed=0)
    stored = sum(parameter.nbytes for parameter in model.parameters())
    for layer in find_quantized_layers(model).values():
        state = getattr(layer.weight, "quant_state", None)
        stored += layer.scales.nbytes if state is None else state.absmax.nbytes
        stored += state.state2.absmax.nbytes if double == "true" else 0
    assert MemoryEstimator(recipe).estimate(Settings.of(recipe)).weights == stored
    plain = compose(["lora.rank=8"])
    named = [name for name, _ in MemoryEstimator(plain).list_remedies(Settings.of(plain))]
    assert "quantization=nf4" in named


@pytest.mark.parametrize("command", ["train", "sft", "train-rm", "dpo"])
def test_settings_that_cannot_be_followed_are_refused(command: str, tmp_path: Path) -> None:
    output = f"output={tmp_path / 'runs'}"
    assert "quantization.kind (int8) needs lora.rank; set that too" in refused(command, output, "quantization=int8")
    assert "must be one of nf4, fp4, int8" in refused(command, output, "quantization=int3", "lora.rank=2")
    assert "quantization.double (True) needs quantization.kind; set that too" in refused(
        command, output, "quantization.double=true", "lora.rank=2"
    )
    assert "must be one of float32" in refused(
        command, output, "quantization=int8", "quantization.compute_dtype=int8", "lora.rank=2"
    )
    assert re.search(
        r"quantization\.kind \(int8\) .*sharding\.kind; leave one",
        refused(command, output, "quantization=int8", "lora.rank=2", "sharding=full"),
    )
    assert not (tmp_path / "runs").exists()
