"""The policy of a recipe: a small model made from a configuration, or any causal model on disk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ludic.errors import ConfigError
from ludic.files.atomic import read_json
from ludic.files.folders import written_aside
from ludic.models.adapters import has_adapters
from ludic.models.byte_tokenizer import make_byte_tokenizer, make_line_tokenizer
from ludic.models.lora import load_adapter, save_adapter, save_merged
from ludic.models.places import check_place
from ludic.models.state_files import ADAPTER_CONFIG, holds_whole_weights
from ludic.recipes.lora import adapter_beside, base_beside

if TYPE_CHECKING:
    from ludic.recipes.rm.schema import RMRecipe
    from ludic.recipes.schema import NetworkSection, Recipe
    from ludic.recipes.sft.schema import SFTRecipe


def make_policy(recipe: Recipe) -> tuple[Any, Any]:
    """(model, tokenizer). The weights of a small model come from torch's global generator,
    seeded by the caller."""
    if recipe.model is None and recipe.task.kind == "data" and not recipe.warmup.steps:
        raise ConfigError(
            "a problem of your own needs model=DIRECTORY: the small model that is made without one has learnt nothing, unless "
            "warmup.steps is set and the data has completions"
        )
    if recipe.model is not None:  # the model first: what is wrong with its name is said of it
        return load_model(recipe.model, recipe.dtype), tokenizer_of(recipe)
    tokenizer = tokenizer_of(recipe)
    return model_of(recipe, tokenizer), tokenizer


def model_of(recipe: Recipe | SFTRecipe, tokenizer: Any) -> Any:
    """The model that `recipe.model` names, or a small one over the tokens of `tokenizer`."""
    if recipe.model is not None:
        return load_model(recipe.model, recipe.dtype)
    dtype = small_dtype(recipe.dtype)
    return make_small_model(recipe.network, tokenizer).to(dtype)


def tokenizer_of(recipe: Recipe | SFTRecipe | RMRecipe) -> Any:
    """The tokenizer that the recipe names, else that of its model, else that of the small one."""
    source = recipe.tokenizer or recipe.model
    return _small_tokenizer(recipe.network) if source is None else load_tokenizer(source)


def save_policy(model: Any, tokenizer: Any, folder: Path, *, base: str | None = None) -> None:
    """Both in Hugging Face layout. Adapters are merged in `folder`, and lie in `adapter` beside
    it; they name `base`, or without it the folder `base` beside it, as what they adapt."""
    with written_aside(folder) as aside:
        tokenizer.save_pretrained(aside)
        if has_adapters(model):
            save_merged(model, aside)
        else:
            model.save_pretrained(aside)
    if has_adapters(model):
        model.peft_config["default"].base_model_name_or_path = base or str(base_beside(folder).resolve())
        with written_aside(adapter_beside(folder)) as aside:
            save_adapter(model, aside)
            tokenizer.save_pretrained(aside)


DTYPES = ("float32", "bfloat16", "float16", "auto")


def make_small_model(network: NetworkSection, tokenizer: Any = None) -> Any:
    """A Qwen2 over the tokens of `tokenizer`, without one over bytes; 427,520 parameters as the
    built-in recipes set it."""
    from transformers import Qwen2ForCausalLM

    return Qwen2ForCausalLM(small_config(network, tokenizer))


def small_dtype(dtype: str) -> torch.dtype:
    """The type of a model that no files say one of: float32 where the recipe leaves it to them."""
    check_dtype(dtype)
    made: torch.dtype = torch.float32 if dtype == "auto" else getattr(torch, dtype)
    return made


def small_config(network: NetworkSection, tokenizer: Any = None) -> Any:
    """The configuration of the small model, whatever its head."""
    from transformers import Qwen2Config

    if network.hidden_size % network.num_heads or network.num_heads % network.num_kv_heads:
        raise ConfigError(
            f"network.hidden_size ({network.hidden_size}) must be a multiple of num_heads ({network.num_heads}), "
            f"and that of num_kv_heads ({network.num_kv_heads})"
        )
    tokenizer = _small_tokenizer(network) if tokenizer is None else tokenizer
    return Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=network.hidden_size,
        num_hidden_layers=network.num_layers,
        num_attention_heads=network.num_heads,
        num_key_value_heads=network.num_kv_heads,
        intermediate_size=network.intermediate_size,
        max_position_embeddings=network.max_positions,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=network.initializer_range,
        attn_implementation="sdpa",
    )


def _small_tokenizer(network: NetworkSection) -> Any:
    makers = {"eos": make_byte_tokenizer, "newline": make_line_tokenizer}
    if network.end_of_turn not in makers:
        raise ConfigError(f"network.end_of_turn ({network.end_of_turn}) must be eos or newline")
    return makers[network.end_of_turn]()


def load_model(source: str, dtype: str) -> Any:
    """`source` is a folder in Hugging Face layout, one of PEFT's adapters, which are merged, or
    a hub id. Weights are read from safetensors only, never from pickle."""
    check_dtype(dtype)
    place = place_of(source)
    if not _holds_adapters(place):
        return _load_plain(source, place, dtype)
    return load_adapter(load_model(base_of(Path(place)), dtype), place).merge_and_unload()


def plain_place(source: str | None) -> str | None:
    """Where `source` lies if that is a model without adapters: what adapters can name as their
    base."""
    place = None if source is None else place_of(source)
    if place is None or _holds_adapters(place):
        return None
    return str(Path(place).resolve()) if Path(place).is_dir() else place


def keep_base(model: Any, source: str | None, folder: Path) -> None:
    """Write what the model's adapters adapt into `folder`, if it lies nowhere else. To be called
    before the first step or the reading of a checkpoint, when adapters change nothing. A folder
    that is not whole is written anew."""
    if has_adapters(model) and plain_place(source) is None and not holds_whole_weights(folder):
        with written_aside(folder) as aside:
            save_merged(model, aside)


def _holds_adapters(place: str) -> bool:
    return (Path(place) / ADAPTER_CONFIG).is_file() and not (Path(place) / "config.json").is_file()


def base_of(adapter: Path) -> str:
    """What the adapters were trained on; of a run that was moved, the `base` that moved with
    them."""
    named = read_json(adapter / ADAPTER_CONFIG).get("base_model_name_or_path")
    beside = base_beside(adapter)
    if not named or (Path(named).is_absolute() and not Path(named).is_dir()):
        if not beside.is_dir():
            raise ConfigError(f"the adapters in {adapter} name {named} as their base, which does not exist, nor does {beside}")
        return str(beside)
    return str(named)


def _load_plain(source: str, place: str, dtype: str) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(place, dtype=dtype, use_safetensors=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model ({source}) could not be loaded: {error}") from error


def load_tokenizer(source: str) -> Any:
    """The tokenizer of `source`; one without a padding token pads with its end token."""
    from transformers import AutoTokenizer

    place = place_of(source, "tokenizer_config.json", "config.json", ADAPTER_CONFIG)
    if _holds_adapters(place) and not (Path(place) / "tokenizer_config.json").is_file():
        return load_tokenizer(base_of(Path(place)))
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
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
    """A folder that has one of `files`, which is a model's in Hugging Face or PEFT layout; for a
    run's folder the `model` in it; or a hub id as it is."""
    files = files or ("config.json", ADAPTER_CONFIG)
    folder = Path(source).expanduser()
    for place in (folder, folder / "model"):
        if any((place / file).is_file() for file in files):
            return str(place)
    check_place(source)
    if folder.is_dir():
        raise ConfigError(
            f"{source} has no {' and no '.join(files)}; give a folder in Hugging Face layout or a hub id such as Qwen/Qwen2.5-0.5B"
        )
    return source
