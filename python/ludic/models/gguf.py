"""GGUF files, the format of llama.cpp, as folders in Hugging Face layout."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ludic.errors import ConfigError, import_optional
from ludic.files.atomic import replace_folder
from ludic.models.loading import check_dtype, explain_load_errors


@dataclass(frozen=True)
class ConvertedModel:
    """What was written, for people to read."""

    name: str
    """From the metadata; without one there, the name of the file."""
    licence: str | None
    """From the metadata, such as apache-2.0; None if it names none."""
    parameters: int
    """Of the model; weights that are used twice count once."""
    stored_as: dict[str, int]
    """Storage type, such as Q4_1 -> number of tensors."""
    has_chat_template: bool


def convert_gguf(file: Path, out: Path, dtype: str = "float32") -> ConvertedModel:
    """Write the model and the tokenizer of `file` to the new folder `out`. Quantised weights are
    dequantised: they have the values that the file stores, rounded to `dtype`, and no quantization
    is applied to them any more.

    Raises ConfigError if `out` exists, and for a file that is damaged, no GGUF, or one that
    transformers does not read or reads in part: one of several files, or one with scaled positions
    or other tensors that it drops. `out` is written whole or not at all.
    """
    check_dtype(dtype)
    if dtype == "auto":
        raise ConfigError("dtype (auto) has no meaning for quantised weights; give float32, bfloat16 or float16")
    if out.exists():
        raise ConfigError(f"{out} exists already, and is not replaced; give a new folder")
    metadata, stored_as, sizes = _read_header(file)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = {"gguf_file": file.name, "trust_remote_code": False}
    with explain_load_errors(f"{file} could not be converted"):
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **place)
        model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=getattr(torch, dtype), **place)
    if model.config.tie_word_embeddings:  # BLOOM's files and Falcon's may repeat the embeddings
        sizes.pop("output.weight", None)
    weights, parameters = sum(sizes.values()), sum(parameter.numel() for parameter in model.parameters())
    if weights != parameters:
        lost = "some are missing; give the whole file" if weights < parameters else "some are dropped; convert the original model"
        raise ConfigError(f"{file} has {weights:,} weights, and the model that transformers makes of it {parameters:,}: {lost}")
    _split_numbers(tokenizer, metadata)
    # transformers takes the weights for quantised and refuses to save them; they are not any more.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    with replace_folder(out) as aside:
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        for notice in filter(Path.is_file, [*file.parent.glob("LICENSE*"), *file.parent.glob("NOTICE*")]):
            shutil.copyfile(notice, aside / notice.name)
    return ConvertedModel(
        name=metadata.get("general.name") or file.stem,
        licence=metadata.get("general.license"),
        parameters=parameters,
        stored_as=stored_as,
        has_chat_template=bool(tokenizer.chat_template),
    )


def _read_header(file: Path) -> tuple[dict[str, Any], dict[str, int], dict[str, int]]:
    """(the metadata without lists, number of tensors by their storage type, tensor -> its size)."""
    if not file.is_file():
        raise ConfigError(f"{file} is no file; give a GGUF file, such as model.Q4_1.gguf")
    gguf = import_optional("gguf", "gguf")
    try:
        reader = gguf.GGUFReader(file)
        metadata = {name: field.contents() for name, field in reader.fields.items() if len(field.types) == 1}
    except (ValueError, KeyError, IndexError, OverflowError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is no GGUF file, or is damaged: {error}") from error
    if metadata.get("split.count", 1) > 1:
        raise ConfigError(f"{file} is one of {metadata['split.count']} parts; join them with llama-gguf-split --merge")
    architecture = metadata.get("general.architecture")
    kind = metadata.get(f"{architecture}.rope.scaling.type", "linear")  # llama.cpp's default
    factor = metadata.get(f"{architecture}.rope.scaling.factor", metadata.get(f"{architecture}.rope.scale_linear", 1.0))
    if architecture != "gpt-oss" and kind != "none" and (kind != "linear" or factor not in (0.0, 1.0)):
        raise ConfigError(f"{file} scales its rotary positions ({kind}, {factor}), which transformers does not read")
    stored_as = Counter(tensor.tensor_type.name for tensor in reader.tensors)
    return metadata, stored_as, {tensor.name: int(tensor.n_elements) for tensor in reader.tensors}


def _split_numbers(tokenizer: Any, metadata: dict[str, Any]) -> None:
    """Split text before its merges as SmolLM does: each digit by itself, then GPT-2's words.

    transformers 5.23 knows the rules of other families, and reads these as GPT-2, so that the two
    newlines before a number would be two tokens, where the model has seen one: `"\\n\\n12"` is
    `["\\n\\n", "1", "2"]`.
    """
    if metadata.get("tokenizer.ggml.pre") in ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"):
        from tokenizers import pre_tokenizers

        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
