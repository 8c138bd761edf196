"""How to load what a run saved: the last section of its model card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NEARLY = (
    "The adapters were trained over a base whose weights are stored in {}. Over the plain base they give nearly, but not exactly, the "
    "model that was trained."
)


def explain_loading(command: str, recipe: Mapping[str, Any], *, base: str | None, is_adapter: bool) -> str:
    """`base`: the hub id of the model that was trained; None: it has none. Adapters over quantised
    weights are loaded over the same weights: those of 4 bits by transformers, which stores them as
    the run did, and int8 by ludic, since LLM.int8() is another form."""
    auto = "AutoModelForSequenceClassification" if command == "train-rm" else "AutoModelForCausalLM"
    serve = "--runner pooling " if command == "train-rm" else ""
    where = ["`FOLDER` is this folder or repository."]
    if not is_adapter:
        imports, code = f"from transformers import {auto}, AutoTokenizer", f'model = {auto}.from_pretrained("FOLDER")'
        served = f"vllm serve FOLDER {serve}".strip()
    else:
        named = base or "BASE"
        if base is None:
            where = ["`FOLDER` is this folder or repository, and `BASE` the model that the adapters adapt."]
        labels = ", num_labels=1" if command == "train-rm" else ""
        imports, code = _load_adapters(recipe, auto, f'"{named}"{labels}')
        served = _serve_adapters(recipe, named, serve)
        if kind := _quantization(recipe).get("kind"):
            where.append(NEARLY.format(kind))
    return (
        f"## How to load it\n\n{' '.join(where)}\n\n```python\n{imports}\n\n{code}\n"
        f'tokenizer = AutoTokenizer.from_pretrained("FOLDER")\n```\n\n```bash\n{served}\n```'
    )


def _quantization(recipe: Mapping[str, Any]) -> Mapping[str, Any]:
    return recipe.get("quantization") or {}


def _load_adapters(recipe: Mapping[str, Any], auto: str, source: str) -> tuple[str, str]:
    """(imports, code)."""
    section = _quantization(recipe)
    kind, dtype = section.get("kind"), recipe.get("dtype") or "auto"
    if kind is None:
        imports = f"from peft import PeftModel\nfrom transformers import {auto}, AutoTokenizer"
        return imports, f'base = {auto}.from_pretrained({source})\nmodel = PeftModel.from_pretrained(base, "FOLDER")'
    shown = '"auto"' if dtype == "auto" else f"torch.{dtype}"
    computed = section.get("compute_dtype") or (None if dtype == "auto" else dtype)
    product = None if computed is None else f"torch.{computed}"
    if kind == "int8":
        imports = (
            f"import torch\nfrom ludic.models.lora import load_adapter\n"
            f"from ludic.models.quantization import QuantizationSettings, quantize_layers\nfrom transformers import {auto}, AutoTokenizer"
        )
        settings = '"int8"' if product is None else f'"int8", compute_dtype={product}'
        return imports, (
            f"base = {auto}.from_pretrained({source}, dtype={shown})\nquantize_layers(base, QuantizationSettings({settings}))\n"
            'model = load_adapter(base, "FOLDER")'
        )
    imports = f"import torch\nfrom peft import PeftModel\nfrom transformers import {auto}, AutoTokenizer, BitsAndBytesConfig"
    lines = [
        "stored = BitsAndBytesConfig(",
        "    load_in_4bit=True,",
        f'    bnb_4bit_quant_type="{kind}",',
        f"    bnb_4bit_use_double_quant={bool(section.get('double'))},",
        *([] if product is None else [f"    bnb_4bit_compute_dtype={product},"]),
        ")",
        f"base = {auto}.from_pretrained({source}, dtype={shown}, quantization_config=stored)",
        'model = PeftModel.from_pretrained(base, "FOLDER")',
    ]
    return imports, "\n".join(lines)


def _serve_adapters(recipe: Mapping[str, Any], base: str, serve: str) -> str:
    """vLLM stores nf4 as the run did; of the other kinds it takes the plain base."""
    rank = (recipe.get("lora") or {}).get("rank") or 0
    stored = "--quantization bitsandbytes " if _quantization(recipe).get("kind") == "nf4" else ""
    widest = f" --max-lora-rank {1 << (rank - 1).bit_length()}" if rank > 16 else ""
    return f"vllm serve {base} {serve}{stored}--enable-lora{widest} --lora-modules adapted=FOLDER"
