"""The model card of what a run saves: valid metadata, no path of this machine, nothing that a name
could inject, and never in place of a card that the user wrote."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from commands import ludic
from huggingface_hub import ModelCard
from hypothesis import given, settings, strategies as st
from training_samples import TOKENIZER, tiny_model

from ludic.models.lora import LoraSettings, apply_lora
from ludic.models.quantization import QuantizationSettings, quantize_layers
from ludic.models.saving import CARD_MARK, save_policy, write_card
from ludic.recipes.compose import compose
from ludic.recipes.model import make_small_model
from ludic.runs.directory import DONE, Progress, RunDirectory
from ludic.runs.model_card import make_card, try_card

HOSTILE = st.text(st.sampled_from("ab-:#'\"\\\n\r\t|`*<>[]{}()&!%@, \u2028é$~_"), max_size=30)
VERSIONS = {"ludic": "0.1.0", "torch": "2.13.0"}
COMMANDS = ["train", "sft", "train-rm", "dpo"]


def progress(command: str = "sft", **recipe: object) -> Progress:
    return Progress(phase=DONE, command=command, recipe=recipe, versions=VERSIONS, steps=7)


def metadata_of(card: str) -> dict[str, object]:
    assert card.startswith("---\n")
    found: dict[str, object] = yaml.safe_load(card.split("\n---\n")[0].removeprefix("---\n"))
    return found


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("is_adapter", [False, True])
def test_the_metadata_is_read_by_the_hub(command: str, is_adapter: bool) -> None:
    recipe = {"model": "Qwen/Qwen2.5-0.5B", "data": "openai/gsm8k", "algorithm": "grpo", "lora": {"rank": 8}}
    card = ModelCard(make_card("mine", progress(command, **recipe, quantization={"kind": "nf4"}), is_adapter=is_adapter))
    assert card.data.base_model == "Qwen/Qwen2.5-0.5B"
    assert card.data.library_name == ("peft" if is_adapter else "transformers")
    assert card.data.pipeline_tag == ("text-classification" if command == "train-rm" else "text-generation")
    assert card.data.datasets == ["openai/gsm8k"]
    assert {"ludic", command, "qlora"} <= set(card.data.tags)
    assert card.data.license is None
    assert "More Information Needed" not in card.text


@settings(max_examples=60, deadline=None)
@given(name=HOSTILE, model=HOSTILE, data=HOSTILE, reward=HOSTILE)
def test_names_can_inject_nothing(name: str, model: str, data: str, reward: str) -> None:
    card = make_card(name, progress(model=f"own/{model}", data=f"set/{data}", reward=[reward]), is_adapter=False)
    metadata = metadata_of(card)
    assert set(metadata) <= {"base_model", "base_model_relation", "library_name", "pipeline_tag", "tags", "datasets"}
    assert metadata.get("base_model", f"own/{model}") == f"own/{model}"
    assert metadata.get("datasets", [f"set/{data}"]) == [f"set/{data}"]
    lines = card.split("\n---\n", 1)[1].splitlines()
    assert [line for line in lines if line.startswith("#")][1:] == ["## Training", "## How to load it"]
    body = "\n".join(line for line in lines if line != CARD_MARK)
    assert "<" not in body
    rows = [line for line in lines if line.startswith("|")]
    assert all(line.replace("\\|", "").count("|") == 3 for line in rows)


def test_paths_of_this_machine_are_not_named(tmp_path: Path) -> None:
    data, model = tmp_path / "secret" / "chats.jsonl", tmp_path / "secret" / "runs" / "first" / "model"
    data.parent.mkdir()
    data.write_text("{}\n")
    model.mkdir(parents=True)
    own = {"model": str(model), "data": {"datasets": [{"id": str(data), "weight": 1.0}]}, "reward_model": str(model)}
    for is_adapter in (False, True):
        card = make_card("mine", progress("train", **own, lora={"rank": 2}), is_adapter=is_adapter)
        assert "secret" not in card
        assert str(tmp_path) not in card
        assert "from first with" in card
        # sha256 of "{}\n"
        assert "chats.jsonl (SHA-256 ca3d163bab055381827226140568f3bef7eaac187cebd76878e0b63e9e442356)" in card
        assert "base_model" not in metadata_of(card)


def test_a_path_that_is_gone_is_no_id_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`models/first` could be an id too; the run knows that it was a folder when it began."""
    monkeypatch.chdir(tmp_path)
    for folder in ("models/first", "sets/chats"):
        Path(folder).mkdir(parents=True)
    recipe = compose(
        ["model=models/first", "data=sets/chats", "reward=gsm8k", "reward_model=someone/judge", "name=run", "output=out"]
    )
    directory = RunDirectory.begin(recipe)
    directory.release()
    begun = directory.read_progress()
    assert begun.local_sources == ["sets/chats", "models/first"]
    for folder in ("models", "sets"):
        shutil.rmtree(folder)
    card = make_card("mine", begun, is_adapter=True)
    assert not {"base_model", "datasets"} & set(metadata_of(card))
    assert "from first with" in card
    assert "models/first" not in card
    assert "sets/chats" not in card
    assert 'from_pretrained("BASE")' in card
    assert "someone/judge" in card  # which was no folder


@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8", None])
@pytest.mark.parametrize("double", [False, True])
def test_adapters_are_loaded_over_the_weights_that_they_were_trained_over(tmp_path: Path, kind: str | None, double: bool) -> None:
    """The code of the card is run: it gives the outputs of the model that was trained, and those
    over the plain base differ."""
    if kind in ("nf4", "fp4"):
        pytest.importorskip("bitsandbytes")
    if double and kind not in ("nf4", "fp4"):
        return
    base = make_small_model(
        replace(compose([]).network, hidden_size=64, intermediate_size=128, num_layers=1, initializer_range=0.3)
    )
    base.save_pretrained(tmp_path / "base")
    TOKENIZER.save_pretrained(tmp_path / "adapter")
    if kind is not None:
        quantize_layers(base, QuantizationSettings(kind, double))
    trained = apply_lora(base, LoraSettings(rank=2))
    for name, parameter in trained.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    trained.save_pretrained(tmp_path / "adapter")
    recipe = {"lora": {"rank": 2}, "quantization": {"kind": kind, "double": double}, "dtype": "float32"}
    card = make_card("mine", progress("sft", **recipe), is_adapter=True)
    assert ("nearly, but not exactly" in card) == (kind is not None)
    assert ("--quantization bitsandbytes" in card) == (kind == "nf4")
    code = card.split("```python\n")[1].split("```")[0]
    code = code.replace('"BASE"', f'"{tmp_path / "base"}"').replace('"FOLDER"', f'"{tmp_path / "adapter"}"')
    names: dict[str, Any] = {}
    exec(code, names)
    ids = torch.arange(1, 9)[None]
    # as in training: in evaluation bitsandbytes multiplies in bfloat16 on some CPUs
    expected, found = (model.train()(ids).logits for model in (trained, names["model"]))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_results_have_intervals() -> None:
    """Wilson, 90 of 100: centre (.9 + 1.92073/100) / (1 + 3.84146/100) = .88520, half width
    1.95996 / 1.0384146 * sqrt(.9 * .1 / 100 + 3.84146 / 40000) = .05958."""
    done = progress("train-rm")
    done.after = {"eval_pairwise_accuracy": 0.9, "eval_num_pairs": 100.0}
    assert "| held-out pairwise accuracy |  | 0.9000 | 0.8256 to 0.9448 |" in make_card("mine", done, is_adapter=False)
    sft = progress("sft")
    sft.before, sft.after = {"loss": 2.5}, {"loss": 1.25}
    assert "| held-out loss, nats a token | 2.5000 | 1.2500 |  |" in make_card("mine", sft, is_adapter=False)


def test_a_card_of_the_user_is_kept(tmp_path: Path) -> None:
    model = apply_lora(tiny_model(), LoraSettings(rank=2))
    folder = tmp_path / "model"
    save_policy(model, TOKENIZER, folder, base="base", make_card=lambda is_adapter: f"{CARD_MARK}\nfirst {is_adapter}")
    save_policy(model, TOKENIZER, folder, base="base", make_card=lambda is_adapter: f"{CARD_MARK}\nsecond {is_adapter}")
    texts = [(tmp_path / name / "README.md").read_text() for name in ("model", "adapter")]
    assert [text.splitlines()[1] for text in texts] == ["second False", "second True"]
    for name in ("model", "adapter"):
        (tmp_path / name / "README.md").write_text("my own")
    save_policy(model, TOKENIZER, folder, base="base", make_card=lambda is_adapter: f"{CARD_MARK}\nthird")
    write_card(folder, f"{CARD_MARK}\nfourth")
    assert [(tmp_path / name / "README.md").read_text() for name in ("model", "adapter")] == ["my own", "my own"]


def test_a_run_writes_a_card_for_its_model_its_adapters_and_its_checkpoints(tmp_path: Path) -> None:
    few = ["threads=1", "rows=40", "batch_size=8", "epochs=1", "heldout=0.1", "network.hidden_size=16", "network.num_heads=2"]
    ludic("sft", *few, "lora.rank=2", f"output={tmp_path}", "name=run", "checkpoint.every_n_steps=2")
    run = tmp_path / "run"
    checkpoints = sorted((run / "checkpoints").glob("step_*"))
    assert checkpoints
    for folder in (run / "model", run / "adapter", *checkpoints):
        text = (folder / "README.md").read_text()
        assert ModelCard(text).data.library_name == ("transformers" if folder.name == "model" else "peft")
        assert str(tmp_path) not in text
        assert ("## Held-out results" in text) == (folder.name in ("model", "adapter"))
        assert "More Information Needed" not in text
    loss = json.loads((run / "summary.json").read_text())["after"]["loss"]
    assert f"| {loss:.4f} |" in (run / "model" / "README.md").read_text()
    assert not (run / "base" / "README.md").exists()


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_a_card_of_the_user_in_any_encoding_is_kept(encoding: str, tmp_path: Path) -> None:
    folder, following = tmp_path / "model", tmp_path / "aside"
    folder.mkdir()
    following.mkdir()
    mine = "# Modèle à moi\n".encode(encoding)
    (folder / "README.md").write_bytes(mine)
    write_card(folder, f"{CARD_MARK}\nours")
    write_card(following, f"{CARD_MARK}\nours", earlier=folder)
    assert (folder / "README.md").read_bytes() == (following / "README.md").read_bytes() == mine


def test_a_card_that_cannot_be_made_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> str:
        raise OSError("File name too long")

    monkeypatch.setattr("ludic.runs.model_card.make_card", fail)
    assert try_card("run", progress(), is_adapter=False) is None
    assert re.search("no model card .*OSError: File name too long", caplog.text)
