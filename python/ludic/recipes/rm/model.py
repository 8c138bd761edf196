"""The model of a reward-model run: a classifier with one score."""

from __future__ import annotations

from typing import Any

from ludic.errors import ConfigError
from ludic.models.adapters import has_adapters, map_base_names
from ludic.models.loading import load_classifier
from ludic.models.skeleton import load_skeleton
from ludic.recipes.epochs_schema import RMRecipe
from ludic.recipes.lora import add_adapters
from ludic.recipes.model import make_small_config, model_options, small_dtype
from ludic.recipes.sharding import has_no_weights


def build_reward_model(recipe: RMRecipe, tokenizer: Any) -> Any:
    """The model that the recipe names, or a small one. It has one score per sequence, at the last
    token that is not padding.

    A head that the model's files do not have is drawn from torch's global generator, which the
    caller seeds. LoRA adapters are added if the recipe asks for them. Raises ConfigError if weights
    that were drawn would then stay untrained.
    """
    drawn, options = set[str](), model_options(recipe)
    if recipe.model is None:
        model = _make_small_classifier(recipe, tokenizer)
    elif has_no_weights(recipe.sharding):
        from transformers import AutoModelForSequenceClassification

        model = load_skeleton(recipe.model, recipe.dtype, AutoModelForSequenceClassification, num_labels=1, **options)
    else:
        about = f"model ({recipe.model})"
        model, drawn = load_classifier(recipe.model, recipe.dtype, description=about, num_labels=1, **options)
    model.config.pad_token_id = tokenizer.pad_token_id  # a classifier finds the last token by it
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    adapted = add_adapters(model, recipe, seed=recipe.seed, device=recipe.trainer.model_device)
    frozen = sorted(drawn & _find_frozen(adapted))
    if frozen:
        raise ConfigError(
            f"model ({recipe.model}) has no weights for {', '.join(frozen[:3])}, and LoRA would leave them as they were drawn; train every "
            "weight (lora.rank=0), or give a model that has them"
        )
    return adapted


def _find_frozen(model: Any) -> set[str]:
    """Names, in the model without adapters, of parameters that are not trained."""
    parameters = dict(model.named_parameters())
    names = map_base_names(model, parameters) if has_adapters(model) else {name: name for name in parameters}
    return {plain for plain, name in names.items() if not parameters[name].requires_grad}


def choose_padding_token(tokenizer: Any) -> Any:
    """The tokenizer, with a padding token that is not the end token, if it has a suitable one.

    A classifier of transformers reads its score at the last token that is not padding. If the end
    token also pads, that is the token before the end, while servers and `LocalRewardModel` read the
    score at the end.
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


def _make_small_classifier(recipe: RMRecipe, tokenizer: Any) -> Any:
    from transformers import Qwen2ForSequenceClassification

    config = make_small_config(recipe.network, tokenizer)
    config.num_labels = 1
    return Qwen2ForSequenceClassification(config).to(small_dtype(recipe.dtype))
