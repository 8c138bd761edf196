"""The policy that a recipe names: any causal model on disk, or a small one made from `network`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ludic.errors import ConfigError
from ludic.inference.local.client import end_token_ids
from ludic.inference.prompts.template import find_turn_end, read_template, with_kwargs
from ludic.models.byte_tokenizer import make_byte_tokenizer, make_line_tokenizer
from ludic.models.loading import check_dtype, load_model, load_tokenizer
from ludic.models.positions import pin_rope
from ludic.models.skeleton import load_skeleton
from ludic.recipes.named_sources import is_template
from ludic.recipes.phases import has_warmup
from ludic.recipes.sharding import has_no_weights

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from ludic.recipes.epochs_schema import DPORecipe, RMRecipe, SFTRecipe
    from ludic.recipes.schema import NetworkSection, Recipe


def build_policy(recipe: Recipe) -> tuple[Any, Any]:
    """(model, tokenizer). The weights of a small model are drawn from torch's global generator,
    which the caller seeds."""
    if recipe.model is None and recipe.task.kind == "data" and not has_warmup(recipe):
        raise ConfigError(
            "a problem of your own needs model=DIRECTORY: the small model that is made without one is untrained, unless "
            "warmup.data is set, or warmup.steps and the data has completions"
        )
    if recipe.model is not None:  # before the tokenizer, so that an error names the model
        model = build_model(recipe, None)
        return model, name_end_tokens(model, build_tokenizer(recipe))
    tokenizer = build_tokenizer(recipe)
    return build_model(recipe, tokenizer), tokenizer


def build_model(recipe: Recipe | SFTRecipe | DPORecipe, tokenizer: Any) -> Any:
    """The model that `recipe.model` names, else a small one over the tokens of `tokenizer`. A
    rank that gets its weights from rank 0 reads none from files."""
    if recipe.model is not None:
        load = load_skeleton if has_no_weights(recipe.sharding) else load_model
        model = load(recipe.model, recipe.dtype, **model_options(recipe))
    else:
        model = make_small_model(recipe.network, tokenizer).to(small_dtype(recipe.dtype))
    pin_rope(model, recipe.trainer.max_seq_len)  # what only samples has it from here
    if tokenizer is not None:
        name_end_tokens(model, tokenizer)
    return model


_LOADING = ("attn_implementation", "experts_implementation", "revision", "subfolder", "variant")


def model_options(recipe: Any) -> dict[str, Any]:
    """The arguments of `from_pretrained` that the recipe has. Raises ConfigError for others: those
    that have a setting, and those that would run code."""
    options = dict(recipe.model_init_kwargs)
    if options and (recipe.model is None or not options.keys() <= set(_LOADING)):
        raise ConfigError(
            f"model_init_kwargs ({', '.join(options)}) must be of {', '.join(_LOADING)}, for a model that `model` names; there are "
            "settings dtype, quantization and sharding"
        )
    return options


def name_end_tokens(model: Any, tokenizer: Any) -> Any:
    """Add the tokens that end an answer to the generation config of `model`, which is saved with it
    and read by servers. Returns the tokenizer."""
    ends = end_token_ids(model, tokenizer)
    if len(ends) > 1 and getattr(model, "generation_config", None) is not None:
        model.generation_config.eos_token_id = sorted(ends)
    return tokenizer


def build_tokenizer(recipe: Recipe | SFTRecipe | DPORecipe | RMRecipe) -> Any:
    """The tokenizer that the recipe names, else that of its model, else that of the small model,
    with the recipe's chat template and end token."""
    source = recipe.tokenizer or recipe.model
    options = {} if recipe.tokenizer else {key: value for key, value in model_options(recipe).items() if key == "revision"}
    tokenizer = _make_small_tokenizer(recipe.network) if source is None else load_tokenizer(source, **options)
    if isinstance(recipe.chat_template, str):
        tokenizer.chat_template = _read_chat_template(recipe.chat_template)
    if recipe.chat_template_kwargs:
        tokenizer.chat_template = with_kwargs(tokenizer.chat_template, recipe.chat_template_kwargs)
    if recipe.eos_token is not None:
        if recipe.eos_token not in tokenizer.get_vocab():
            known = ", ".join(tokenizer.all_special_tokens)
            raise ConfigError(f"eos_token ({recipe.eos_token}) is no token of the tokenizer; its special tokens are {known}")
        tokenizer.eos_token = recipe.eos_token
    turn_end = find_turn_end(tokenizer)
    if read_template(tokenizer) and not (turn_end.closing or turn_end.is_open):
        logger.warning(
            "the chat template ends the assistant's turns with no special token of the tokenizer: answers are sampled until %s, which "
            "conversations do not teach; set chat_template=FILE to a template that ends turns with one",
            tokenizer.eos_token,
        )
    return tokenizer


def _read_chat_template(setting: str) -> str:
    if is_template(setting):
        return setting
    path = Path(setting).expanduser()
    if not path.is_file():
        raise ConfigError(f"chat_template ({path}) does not exist; it is a file with a Jinja template, or its text")
    return path.read_text(encoding="utf-8")


def make_small_model(network: NetworkSection, tokenizer: Any = None) -> Any:
    """A Qwen2 over the tokens of `tokenizer`, by default over bytes. With the settings of the
    built-in recipes it has 427,520 parameters."""
    from transformers import Qwen2ForCausalLM

    return Qwen2ForCausalLM(make_small_config(network, tokenizer))


def small_dtype(dtype: str) -> torch.dtype:
    """The dtype of the small model. `auto` is that of a model's files, and float32 here."""
    check_dtype(dtype)
    torch_dtype: torch.dtype = torch.float32 if dtype == "auto" else getattr(torch, dtype)
    return torch_dtype


def make_small_config(network: NetworkSection, tokenizer: Any = None) -> Any:
    """The configuration of the small model, for any head."""
    from transformers import Qwen2Config

    if network.hidden_size % network.num_heads or network.num_heads % network.num_kv_heads:
        raise ConfigError(
            f"network.hidden_size ({network.hidden_size}) must be a multiple of num_heads ({network.num_heads}), "
            f"and that of num_kv_heads ({network.num_kv_heads})"
        )
    tokenizer = _make_small_tokenizer(network) if tokenizer is None else tokenizer
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


def _make_small_tokenizer(network: NetworkSection) -> Any:
    makers = {"eos": make_byte_tokenizer, "newline": make_line_tokenizer}
    if network.end_of_turn not in makers:
        raise ConfigError(f"network.end_of_turn ({network.end_of_turn}) must be eos or newline")
    return makers[network.end_of_turn]()
