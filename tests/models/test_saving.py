"""What is saved at the end of a run, beside the weights."""

from pathlib import Path

from small_models import causal_model
from training_samples import TOKENIZER

from ludic.files.atomic import read_json
from ludic.models.saving import save_policy
from ludic.training import LoraSettings, apply_lora


def test_the_model_card_of_an_adapter_names_the_same_base_as_its_settings(tmp_path: Path) -> None:
    model = apply_lora(causal_model("Qwen2"), LoraSettings(rank=2))
    save_policy(model, TOKENIZER, tmp_path / "model")
    base = str(tmp_path / "base")
    assert read_json(tmp_path / "adapter" / "adapter_config.json")["base_model_name_or_path"] == base
    card = (tmp_path / "adapter" / "README.md").read_text()
    assert f"base_model: {base}\n" in card
    assert f"base_model:adapter:{base}\n" in card
