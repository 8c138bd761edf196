"""The policy of a recipe: a small model made from a configuration, or any causal model on disk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ludic.errors import ConfigError
from ludic.recipes.tokenizer import BOS_ID, PAD_ID, VOCAB_SIZE, make_byte_tokenizer, make_line_tokenizer

if TYPE_CHECKING:
    from ludic.recipes.rm.schema import RMRecipe
    from ludic.recipes.schema import NetworkSection, Recipe
    from ludic.recipes.sft.schema import SFTRecipe


def make_policy(recipe: Recipe) -> tuple[Any, Any]:
    """(model, tokenizer). The weights of a small model come from torch's global generator, seeded by the caller."""
    if recipe.model is None and recipe.task.kind == "data" and not recipe.warmup.steps:
        raise ConfigError(
            "a problem of your own needs model=DIRECTORY: the small model that is made without one has learnt nothing, unless "
            "warmup.steps is set and the data has completions"
        )
    return model_of(recipe), tokenizer_of(recipe)


def model_of(recipe: Recipe | SFTRecipe) -> Any:
    """The model that `recipe.model` names, or a small one, whose type is float32 where that is `auto`."""
    check_dtype(recipe.dtype)
    if recipe.model is not None:
        return load_model(recipe.model, recipe.dtype)
    return make_small_model(recipe.network).to(torch.float32 if recipe.dtype == "auto" else getattr(torch, recipe.dtype))


def tokenizer_of(recipe: Recipe | SFTRecipe | RMRecipe) -> Any:
    """The tokenizer that the recipe names, else that of its model, else that of the small one."""
    source = recipe.tokenizer or recipe.model
    return _small_tokenizer(recipe.network) if source is None else load_tokenizer(source)


def save_policy(model: Any, tokenizer: Any, folder: Path) -> None:
    """Both in Hugging Face layout."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


DTYPES = ("float32", "bfloat16", "float16", "auto")


def make_small_model(network: NetworkSection) -> Any:
    """A Qwen2 over bytes; 427,520 parameters as the built-in recipes set it."""
    from transformers import Qwen2ForCausalLM

    return Qwen2ForCausalLM(small_config(network))


def small_config(network: NetworkSection) -> Any:
    """The configuration of the small model, whatever its head."""
    from transformers import Qwen2Config

    if network.hidden_size % network.num_heads or network.num_heads % network.num_kv_heads:
        raise ConfigError(
            f"network.hidden_size ({network.hidden_size}) must be a multiple of num_heads ({network.num_heads}), "
            f"and that of num_kv_heads ({network.num_kv_heads})"
        )
    return Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=network.hidden_size,
        num_hidden_layers=network.num_layers,
        num_attention_heads=network.num_heads,
        num_key_value_heads=network.num_kv_heads,
        intermediate_size=network.intermediate_size,
        max_position_embeddings=network.max_positions,
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=_small_tokenizer(network).eos_token_id,
        initializer_range=network.initializer_range,
        attn_implementation="sdpa",
    )


def _small_tokenizer(network: NetworkSection) -> Any:
    makers = {"eos": make_byte_tokenizer, "newline": make_line_tokenizer}
    if network.end_of_turn not in makers:
        raise ConfigError(f"network.end_of_turn ({network.end_of_turn}) must be eos or newline")
    return makers[network.end_of_turn]()


def load_model(source: str, dtype: str) -> Any:
    """`source` is a folder in Hugging Face layout or a hub id. Weights are read from safetensors only, never from pickle."""
    from transformers import AutoModelForCausalLM

    check_dtype(dtype)
    place = place_of(source)
    try:
        return AutoModelForCausalLM.from_pretrained(place, dtype=dtype, use_safetensors=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model ({source}) could not be loaded: {error}") from error


def load_tokenizer(source: str) -> Any:
    """The tokenizer of `source`; one without a padding token pads with its end token."""
    from transformers import AutoTokenizer

    place = place_of(source, "tokenizer_config.json", "config.json")
    try:
        tokenizer = AutoTokenizer.from_pretrained(place)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the tokenizer of {source} could not be loaded: {error}; set tokenizer=PATH") from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer of {source} has no end token; the policy could never end an answer")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def check_dtype(dtype: str) -> None:
    """Raise `ConfigError` for a name that no weights can have."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype ({dtype}) must be one of {', '.join(DTYPES)}")


def place_of(source: str, *files: str) -> str:
    """A folder that has one of `files`, for a run's folder the `model` in it, or a hub id as it is."""
    files = files or ("config.json",)
    folder = Path(source).expanduser()
    for place in (folder, folder / "model"):
        if any((place / file).is_file() for file in files):
            return str(place)
    if folder.is_dir() or source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise ConfigError(
            f"{source} has no {' and no '.join(files)}; give a folder in Hugging Face layout or a hub id such as Qwen/Qwen2.5-0.5B"
        )
    return source
