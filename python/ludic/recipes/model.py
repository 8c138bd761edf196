"""The models that a recipe names: a causal model on disk, a small one made from `network`, a
classifier with one score; and their adapters, quantised weights and shards."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from ludic.errors import ConfigError
from ludic.inference.local.client import end_token_ids
from ludic.inference.prompts.template import find_turn_end, read_template, reads_same_ids, with_kwargs
from ludic.inference.vllm.in_server.server import LORA_RANKS
from ludic.models.adapters import map_base_names
from ludic.models.byte_tokenizer import make_byte_tokenizer, make_line_tokenizer
from ludic.models.images.features import set_trained_parts
from ludic.models.images.processor import attach_processor, find_processor
from ludic.models.images.small import draw_image_model, make_image_tokenizer, make_small_image_config, make_small_processor
from ludic.models.loading import check_dtype, choose_class, find_whole_model, load_classifier, load_model, load_tokenizer
from ludic.models.lora import LoraSettings, apply_lora
from ludic.models.packed_attention import pin_rope
from ludic.models.quantization import QuantizationSettings, find_quantized_layers, quantize_layers, require_bitsandbytes
from ludic.models.sharded_loading import load_skeleton
from ludic.models.sharding import ShardingSettings
from ludic.models.wrappers import has_adapters
from ludic.recipes.compose import has_warmup
from ludic.recipes.epochs_schema import EpochsRecipe, RMRecipe
from ludic.recipes.named_sources import is_template
from ludic.recipes.processes import choose_kind
from ludic.recipes.schema import LoraSection, NetworkSection, Recipe
from ludic.recipes.sections import ImagesSection, QuantizationSection, ShardingSection
from ludic.training import ranks
from ludic.training.rng import preserved_rng

logger = logging.getLogger(__name__)


def build_policy(recipe: Recipe) -> tuple[Any, Any]:
    """(model, tokenizer). The weights of a small model are drawn from torch's global generator,
    which the caller seeds."""
    if recipe.model is None and recipe.task.kind in ("data", "harbor") and not has_warmup(recipe):
        raise ConfigError("a problem of your own needs model=DIRECTORY; for the untrained small model, set warmup.data")
    if recipe.model is not None:  # before the tokenizer, so that an error names the model
        model = build_model(recipe, None)
        return model, fit_tokenizer(model, build_tokenizer(recipe))
    tokenizer = build_tokenizer(recipe)
    return build_model(recipe, tokenizer), tokenizer


ONE_THREAD_BELOW = 10_000_000
"""Parameters. Below, two threads win little on idle cores, and lose much beside other work."""


def choose_threads(recipe: Recipe | EpochsRecipe, model: Any) -> int:
    """Threads of torch. If the recipe names no number, the size of the model decides and no
    measurement, so that the run can be repeated."""
    if recipe.threads is not None:
        return recipe.threads
    is_small = sum(weight.numel() for weight in model.parameters()) < ONE_THREAD_BELOW
    return 1 if is_small else torch.get_num_threads()


def build_model(recipe: Recipe | EpochsRecipe, tokenizer: Any) -> Any:
    """The model that `recipe.model` names, else a small one over the tokens of `tokenizer`. A
    rank that gets its weights from rank 0 reads none from files."""
    if recipe.model is not None:
        load = load_skeleton if has_no_weights(recipe.sharding) else load_model
        model = load(recipe.model, recipe.dtype, **model_options(recipe))
    else:
        model = make_small_model(recipe.network, tokenizer).to(small_dtype(recipe.dtype))
    pin_rope(model, recipe.trainer.max_seq_len)  # what only samples has it from here
    return fit_images(model, recipe, tokenizer)


def fit_images(model: Any, recipe: Recipe | EpochsRecipe, tokenizer: Any) -> Any:
    """The model, fitted to the `tokenizer`, with the tower that the recipe trains and the limits of
    pixels that it has; a small one with its processor. Raises ConfigError for settings of images
    that it does not have."""
    if recipe.model is None and recipe.network.kind == "qwen2_vl":
        attach_processor(model, make_small_processor(tokenizer, model.config))
    if find_processor(limit_pixels(model, recipe)) is not None:
        set_trained_parts(model, recipe.images.tower)
    elif recipe.images != ImagesSection():
        raise ConfigError(f"images is set, and {type(model).__name__} sees none; name a model that does, or leave it out")
    if tokenizer is not None:
        fit_tokenizer(model, tokenizer)
    return model


def limit_pixels(model: Any, recipe: Recipe | EpochsRecipe) -> Any:
    """Scale the images of `model` to the recipe's limits of pixels, and return it. Without the same
    limits, a reference, teacher or critic has other numbers of features than the policy's ids have
    placeholders."""
    if (images := find_processor(model)) is not None:
        images.limit_pixels(min_pixels=recipe.images.min_pixels, max_pixels=recipe.images.max_pixels)
    return model


_LOADING = ("attn_implementation", "experts_implementation", "revision", "subfolder", "variant")


def model_options(recipe: Any) -> dict[str, Any]:
    """The arguments of `from_pretrained` that the recipe has. Raises ConfigError for others: those
    that have a setting, and those that would run code."""
    options = dict(recipe.model_init_kwargs)
    if options and (recipe.model is None or not options.keys() <= set(_LOADING)):
        raise ConfigError(f"model_init_kwargs ({', '.join(options)}) must be of {', '.join(_LOADING)}, with a `model`")
    return options


def fit_tokenizer(model: Any, tokenizer: Any) -> Any:
    """Add the tokens that end an answer to the generation config of `model`, which is saved with it
    and read by servers, and let images be read with this tokenizer. Returns the tokenizer."""
    ends = end_token_ids(model, tokenizer)
    if len(ends) > 1 and getattr(model, "generation_config", None) is not None:
        model.generation_config.eos_token_id = sorted(ends)
    if (images := find_processor(model)) is not None:
        images.read_with(tokenizer)
    return tokenizer


def build_tokenizer(recipe: Recipe | EpochsRecipe) -> Any:
    """The tokenizer that the recipe names, else its model's, else the small model's, with the
    recipe's chat template and end token."""
    source = recipe.tokenizer or recipe.model
    options = {} if recipe.tokenizer else {key: value for key, value in model_options(recipe).items() if key == "revision"}
    tokenizer = _make_small_tokenizer(recipe.network) if source is None else load_tokenizer(source, **options)
    if isinstance(template := recipe.chat_template, str):
        path = Path(template).expanduser()
        if not is_template(template) and not path.is_file():
            raise ConfigError(f"chat_template ({path}) does not exist; it is a file with a Jinja template, or its text")
        tokenizer.chat_template = template if is_template(template) else path.read_text(encoding="utf-8")
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


def check_vocabulary(setting: str, source: str, tokenizer: Any) -> None:
    """Raise `ConfigError` unless each of the policy's tokens has the same id in the model that the
    setting names. It may have more tokens."""
    if not reads_same_ids(load_tokenizer(source), tokenizer):
        raise ConfigError(f"{setting} ({source}) must have the policy's vocabulary; name a model with the policy's tokenizer")


def make_small_model(network: NetworkSection, tokenizer: Any = None, *, scores: bool = False) -> Any:
    """A Qwen2 or Qwen2-VL over the tokens of `tokenizer`, by default over bytes; with `scores` it
    has one score. With the settings of most built-in recipes it has 427,520 parameters."""
    config = make_small_config(network, tokenizer)
    if scores:
        config.num_labels = 1
    model = choose_class(config, scores=scores).from_config(config)
    return draw_image_model(model) if network.kind == "qwen2_vl" else model


def small_dtype(dtype: str) -> torch.dtype:
    """The dtype of the small model. `auto` is the dtype of a model's files, and float32 here."""
    check_dtype(dtype)
    torch_dtype: torch.dtype = torch.float32 if dtype == "auto" else getattr(torch, dtype)
    return torch_dtype


def make_small_config(network: NetworkSection, tokenizer: Any = None) -> Any:
    """The configuration of the small model, for any head."""
    from transformers import Qwen2Config

    tokenizer = _make_small_tokenizer(network) if tokenizer is None else tokenizer
    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": network.hidden_size,
        "num_hidden_layers": network.num_layers,
        "num_attention_heads": network.num_heads,
        "num_key_value_heads": network.num_kv_heads,
        "intermediate_size": network.intermediate_size,
        "max_position_embeddings": network.max_positions,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "initializer_range": network.initializer_range,
    }
    if network.kind == "qwen2_vl":
        return make_small_image_config(tokenizer, **shape)
    return Qwen2Config(**shape, tie_word_embeddings=True, attn_implementation="sdpa")


def _make_small_tokenizer(network: NetworkSection) -> Any:
    if network.kind == "qwen2_vl":
        return make_image_tokenizer()
    return make_line_tokenizer() if network.end_of_turn == "newline" else make_byte_tokenizer()


def is_shared_out(section: ShardingSection) -> bool:
    """Whether the ranks of this run share out its model. One process never does."""
    return section.kind != "none" and ranks.is_distributed()


def has_no_weights(section: ShardingSection) -> bool:
    """Whether this rank gets its shards from rank 0, and builds the model without weights."""
    return is_shared_out(section) and ranks.rank() > 0


def recomputes_activations(recipe: Any) -> bool:
    """Whether the backward pass of a recipe's trainers recomputes activations, by either name."""
    return bool(recipe.gradient_checkpointing or recipe.sharding.activation_checkpointing)


def build_sharding(section: ShardingSection) -> ShardingSettings:
    """The settings of a section, whose kind is not none."""
    return ShardingSettings(
        "hybrid" if section.kind == "hybrid" else "full",
        shards=section.shards,
        param_dtype=None if section.param_dtype is None else getattr(torch, section.param_dtype),
        reduce_dtype=getattr(torch, section.reduce_dtype),
        cpu_offload=section.cpu_offload,
        activation_checkpointing=section.activation_checkpointing,
    )


def build_quantization(section: QuantizationSection) -> QuantizationSettings | None:
    """The settings of the section; None if nothing is quantised. Raises ConfigError for a kind that
    does not exist."""
    if section.kind is None:
        return None
    dtype = None if section.compute_dtype is None else getattr(torch, section.compute_dtype)
    return QuantizationSettings(section.kind, section.double, dtype)


def quantize_base(model: Any, recipe: Recipe | EpochsRecipe, device: str | None = None) -> Any:
    """The model, with quantised weights if the recipe asks for them and it has none yet. Layers are
    quantised on `device`, where they stay, so that it never has all weights unquantised."""
    settings = build_quantization(recipe.quantization)
    if settings is not None and not has_adapters(model) and not find_quantized_layers(model):
        quantize_layers(model, settings, device=device)
    return model


def build_lora_settings(section: LoraSection) -> LoraSettings | None:
    """The settings of the section; None if every weight is trained."""
    return LoraSettings(section.rank, section.alpha, section.dropout, section.target_modules) if section.rank else None


def check_adapters(recipe: Recipe | EpochsRecipe) -> None:
    """Raise ConfigError for wrong settings of adapters or of quantised weights before a model is
    loaded, and MissingExtraError for 4 bits without bitsandbytes."""
    build_lora_settings(recipe.lora)
    if isinstance(recipe, Recipe) and recipe.lora.publish == "adapter" and (reason := why_merged(recipe)) is not None:
        raise ConfigError(f"lora.publish=adapter is not possible: {reason}; set lora.publish=auto")
    settings = build_quantization(recipe.quantization)
    if settings is not None and settings.kind != "int8":
        require_bitsandbytes()


def why_merged(recipe: Recipe) -> str | None:
    """Why servers must get merged weights; None if they may get the adapters alone. Servers that
    the run starts load its `base`."""
    lora, url, quantization = recipe.lora, recipe.inference.url, recipe.quantization.kind
    reasons = {
        f"lora.publish={lora.publish}, lora.rank={lora.rank}": not lora.rank or lora.publish == "merged",
        "inference=local samples from a merged copy": choose_kind(recipe.inference) == "local",
        "the server sleeps between pushes (inference.colocate)": recipe.inference.colocate,
        f"vLLM takes no lora.rank above {LORA_RANKS[-1]}": lora.rank > LORA_RANKS[-1],
        f"no server has the base of quantization={quantization}": quantization and (url or recipe.model is None),
        "inference.url does not serve the base that the run makes": url and find_whole_model(recipe.model) is None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def serves_base(recipe: Recipe) -> bool:
    """Whether the run starts servers of its `base`, which they get adapters for."""
    return why_merged(recipe) is None and recipe.inference.url is None


def add_adapters(model: Any, recipe: Recipe | EpochsRecipe, *, seed: int, device: str | None = None) -> Any:
    """The model with adapters, whose initial weights depend on the seed alone, over weights that
    are quantised if the recipe asks for it, on `device` if one is given; without `lora.rank` the
    model as it is."""
    settings = build_lora_settings(recipe.lora)
    if settings is None:
        return model
    model = quantize_base(model, recipe, device)
    with preserved_rng():
        torch.manual_seed(seed)
        return apply_settings(model, settings)


def apply_settings(model: Any, settings: LoraSettings) -> Any:
    """The model with adapters. Raises ConfigError for layers that PEFT does not find or adapt."""
    try:
        return apply_lora(model, settings)
    except ConfigError:
        raise
    except ValueError as error:
        message = " ".join(str(error).split())[:300]
        raise ConfigError(f"lora.target_modules ({settings.target_modules or 'all'}): {message}") from error


def build_reward_model(recipe: RMRecipe, tokenizer: Any) -> Any:
    """The model that the recipe names, or a small one. It has one score per sequence, at the last
    token that is not padding.

    A head that the model's files do not have is drawn from torch's global generator, which the
    caller seeds. LoRA adapters are added if the recipe asks for them. Raises ConfigError if weights
    that were drawn would then stay untrained.
    """
    drawn, options = set[str](), {"num_labels": 1, **model_options(recipe)}
    if recipe.model is None:
        model = make_small_model(recipe.network, tokenizer, scores=True).to(small_dtype(recipe.dtype))
    elif has_no_weights(recipe.sharding):
        model = load_skeleton(recipe.model, recipe.dtype, scores=True, **options)
    else:
        about = f"model ({recipe.model})"
        model, drawn = load_classifier(recipe.model, recipe.dtype, description=about, **options)
    fit_images(model, recipe, tokenizer)
    model.config.pad_token_id = tokenizer.pad_token_id  # a classifier finds the last token by it
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    adapted = add_adapters(model, recipe, seed=recipe.seed, device=recipe.trainer.model_device)
    parameters = dict(adapted.named_parameters())
    names = map_base_names(adapted, parameters) if has_adapters(adapted) else {name: name for name in parameters}
    frozen = sorted(plain for plain, name in names.items() if plain in drawn and not parameters[name].requires_grad)
    if frozen:
        raise ConfigError(f"model ({recipe.model}) has no weights for {', '.join(frozen[:3])}; train every weight (lora.rank=0)")
    return adapted


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
