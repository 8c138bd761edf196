"""The model of a reward-model run: any with a scalar head."""

from __future__ import annotations

from typing import Any

import torch

from ludic.errors import ConfigError
from ludic.recipes.lora import with_adapters
from ludic.recipes.model import check_dtype, place_of, small_config, tokenizer_of
from ludic.recipes.rm.schema import RMRecipe


def reward_model_of(recipe: RMRecipe, *, pad_token_id: int) -> Any:
    """The model that the recipe names, or a small one, with one score for a sequence, that of its last token before the padding.

    A head that the model's files do not have is drawn from torch's global generator, seeded by the caller. LoRA's adapters, if the recipe
    asks for any, are in place.
    """
    model = _loaded(recipe.model, recipe.dtype) if recipe.model is not None else _small(recipe)
    model.config.pad_token_id = pad_token_id  # by which a classifier finds the last token
    model.config.get_text_config().pad_token_id = pad_token_id
    try:
        return with_adapters(model, recipe.lora, seed=recipe.seed)
    except ConfigError:
        raise
    except ValueError as error:  # PEFT's own, for names that no layer has
        raise ConfigError(f"lora.target_modules ({recipe.lora.target_modules or 'all'}): {error}") from error


def with_own_padding(tokenizer: Any) -> Any:
    """The tokenizer, padding with another token than the one that ends a response, if it has one that ends nothing.

    A classifier of transformers reads its score from the last token that is not padding: where the end token pads, that is the token before
    the end, while servers and `LocalRewardModel` read the end.
    """
    if tokenizer.pad_token_id != tokenizer.eos_token_id:
        return tokenizer
    special = [
        token for token in tokenizer.all_special_tokens if tokenizer.convert_tokens_to_ids(token) != tokenizer.eos_token_id
    ]
    padding = [token for token in special if "pad" in token.lower()]
    opening = [token for token in special if not any(part in token.lower() for part in ("end", "eos", "eot", "</s", "stop"))]
    if padding or opening:
        tokenizer.pad_token = (padding or opening)[0]
    return tokenizer


def _small(recipe: RMRecipe) -> Any:
    """Float32 where the type is `auto`."""
    from transformers import Qwen2ForSequenceClassification

    check_dtype(recipe.dtype)
    config = small_config(recipe.network, tokenizer_of(recipe))
    config.num_labels = 1
    return Qwen2ForSequenceClassification(config).to(torch.float32 if recipe.dtype == "auto" else getattr(torch, recipe.dtype))


def _loaded(source: str, dtype: str) -> Any:
    """Weights are read from safetensors only, never from pickle."""
    from transformers import AutoModelForSequenceClassification

    check_dtype(dtype)
    place = place_of(source)
    try:
        return AutoModelForSequenceClassification.from_pretrained(place, num_labels=1, dtype=dtype, use_safetensors=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"model ({source}) could not be loaded with a scalar head: {error}") from error
