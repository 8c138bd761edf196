"""Models, tokenizers and processors of images from a folder or the hub. Weights are read from
safetensors, never from pickle, and no code that comes with a model is run."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ludic.distribution import install_command
from ludic.errors import CheckpointError, ConfigError, MissingExtraError
from ludic.files.atomic import read_json
from ludic.files.checkpoints import PROCESSOR_FILES
from ludic.models.images.processor import ImageProcessor, attach_processor, find_processor, refuse_images
from ludic.models.lora import load_adapter
from ludic.models.places import CONFIGS, TOKENIZER_CONFIGS, check_place, find_adapter_base, find_place, holds_only_adapters
from ludic.models.state_files import list_transforms

DTYPES = ("float32", "bfloat16", "float16", "auto")


def check_dtype(dtype: str) -> None:
    """Raise `ConfigError` for a name that is no dtype of weights."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype ({dtype}) must be one of {', '.join(DTYPES)}")


def locate_model(source: str, *files: str) -> str:
    """The folder that `source` names: itself, or `model` in it for the folder of a run. Any other
    name is a hub id and is returned as it is.

    A folder counts if it has one of `files`, by default the config of a model or of adapters.
    Raises ConfigError for a folder without them and for a path that does not exist.
    """
    if place := find_place(source, *files):
        return str(place)
    check_place(source)
    if Path(source).expanduser().is_dir():
        raise ConfigError(f"{source} has no {' and no '.join(files or CONFIGS)}; give a folder or an id like Qwen/Qwen2.5-0.5B")
    return source


def load_model(source: str, dtype: str, **options: Any) -> Any:
    """A language model; of a source with a tower for images the whole model, with its processor
    attached. `source` is a folder in Hugging Face layout, the folder of a run, a folder of PEFT
    adapters, which are merged, or a hub id. `options` go to `from_pretrained`."""
    check_dtype(dtype)
    place = locate_model(source)
    if holds_only_adapters(place):
        base = load_model(find_adapter_base(Path(place)), dtype, **options)
        with explain_load_errors(f"the adapters in {source} could not be loaded"):
            return load_adapter(base, place).merge_and_unload().requires_grad_(True)  # PEFT froze the base
    with explain_load_errors(f"model ({source}) could not be loaded"):
        kind = choose_class(load_config(place, options))
        model = kind.from_pretrained(place, dtype=dtype, use_safetensors=True, trust_remote_code=False, **options)
    return with_processor(model, place, options)


def _select_place(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in ("revision", "subfolder") if name in options}


def load_config(place: str, options: Mapping[str, Any] | None = None) -> Any:
    """The config of the model that `load_model` loads with these `options`."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(place, trust_remote_code=False, **_select_place(options or {}))


def choose_class(config: Any, *, scores: bool = False) -> Any:
    """The class of transformers that makes the model of a config: of images and text if the config
    has a tower for images, otherwise of text; with `scores` a classifier of either. Raises
    ConfigError if it makes neither."""
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSequenceClassification,
    )

    if scores:
        _register_classifier(config)
        return AutoModelForSequenceClassification
    of_text = (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING)
    of_images = (AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    for kind, known in (of_images, of_text) if sees_images(config) else (of_text, of_images):
        if type(config) in known:
            return kind
    raise ConfigError(f"{config.model_type} is no architecture that continues a text; name a causal language model")


def _register_classifier(config: Any) -> None:
    """Let transformers make a classifier of a model that sees images, where it has none: the model,
    and a head `score` on its last states. vLLM makes one of the same name. Raises ConfigError for
    other models without a classifier."""
    from transformers import (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        MODEL_MAPPING,
        AutoModelForSequenceClassification,
    )
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
    from transformers.modeling_layers import GenericForSequenceClassification

    kind = type(config)
    if kind in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        return
    whole, inner = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(kind, None), MODEL_MAPPING.get(kind, None)
    if whole is None or inner is None or "mm_encoder_outputs" not in inspect.signature(inner.forward).parameters:
        raise ConfigError(f"no model with a head for scores is made of {config.model_type} ({config.name_or_path}); name another")
    base = next(each for each in whole.__mro__ if each.__name__.endswith("PreTrainedModel"))
    name = whole.__name__.partition("For")[0] + "ForSequenceClassification"
    made = type(name, (GenericForSequenceClassification, base), {"__module__": base.__module__, "config_class": kind})
    if (names_in_files := get_checkpoint_conversion_mapping(whole.__name__)) is not None:
        register_checkpoint_conversion_mapping(name, names_in_files, overwrite=True)
    AutoModelForSequenceClassification.register(kind, made, exist_ok=True)


def find_stored_names(config: Mapping[str, Any], stored: Iterable[str]) -> dict[str, str]:
    """The model's name of each tensor that has another one in files: that one -> the name in
    `stored`. `config` is the content of the model's config.json; {} for a model that transformers
    does not know.

    Example: for a Qwen2-VL and `visual.norm.weight` it is {"model.visual.norm.weight":
    "visual.norm.weight"}.
    """
    from transformers import AutoConfig
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    try:
        known = AutoConfig.for_model(**config)
        with torch.device("meta"):
            model = choose_class(known).from_config(known, trust_remote_code=False)
    except (ConfigError, TypeError, ValueError, KeyError):
        return {}
    renamings = [each for each in list_transforms(model) if isinstance(each, WeightRenaming)]
    renamed = ((rename_source_key(name, renamings, [])[0], name) for name in stored)
    return {own: name for own, name in renamed if own != name}


def sees_images(config: Any) -> bool:
    """Whether a config of transformers has a tower for images."""
    return getattr(config, "vision_config", None) is not None


def compare_processor(model: Any, began: Mapping[str, str | None] | None) -> dict[str, str | None] | None:
    """The record of the model's processor in the progress of a run; None for a model of text.
    Raises CheckpointError if the run began with another."""
    if not sees_images(getattr(model, "config", None)):
        return None
    processor = find_processor(model)
    now = {"processor": None if processor is None else processor.fingerprint}
    if began not in (None, now):
        raise CheckpointError(
            f"the run began with the processor {began['processor']}, and its model has {now['processor']}: images would "
            "be other ones; restore its files and the versions of transformers and torchvision"
        )
    return now


def with_processor(model: Any, place: str, options: Mapping[str, Any]) -> Any:
    """The model; one that sees images with the processor in `place`. Without a processor that can
    be used it reads text alone, and `require_processor` says why."""
    if sees_images(model.config):
        try:
            attach_processor(model, load_processor(place, model.config, **options))
        except (ConfigError, MissingExtraError) as error:
            refuse_images(model, str(error))
    return model


def load_processor(source: str, config: Any, **options: Any) -> ImageProcessor:
    """The processor of the model with that `config`; `options`: of `load_model`. Raises
    ConfigError if there is no processor that can be used, and MissingExtraError if it needs a
    package that is not installed."""
    from transformers import AutoProcessor

    place = locate_model(source, *PROCESSOR_FILES[:2])
    try:
        processor = AutoProcessor.from_pretrained(place, trust_remote_code=False, **_select_place(options))
    except ImportError as error:
        named = re.search(r"(\w+) requires the (\w+) library", str(error))
        needs = f"{named[1]} needs {named[2].lower()}" if named else " ".join(str(error).split())
        raise MissingExtraError(f"{needs}; {install_command('images')}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"the processor of {source} could not be loaded: {' '.join(str(error).split())[:300]}") from error
    return ImageProcessor(processor, config)


@contextmanager
def explain_load_errors(failure: str) -> Iterator[None]:
    """Raise ConfigError, with `failure`, for what transformers and PEFT raise for wrong files."""
    try:
        yield
    except ConfigError:
        raise
    except KeyError as error:
        raise ConfigError(f"{failure}: its config or its index of weights has no {error}") from error
    except SafetensorError as error:
        raise ConfigError(f"{failure}: a file of weights is damaged, or is not safetensors ({error})") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{failure}: {error}") from error


def load_classifier(source: str, dtype: str, *, description: str, **options: Any) -> tuple[Any, set[str]]:
    """(model for sequence classification, names of the weights that its files do not have).

    `options` go to `from_pretrained`, such as `num_labels`; errors call the model by its
    `description`.
    """
    check_dtype(dtype)
    place = locate_model(source)
    failure = f"{description} could not be loaded with a head for scores"
    try:
        with explain_load_errors(failure), _without_load_report():
            kind = choose_class(load_config(place, options), scores=True)
            model, loading = kind.from_pretrained(
                place, dtype=dtype, use_safetensors=True, trust_remote_code=False, output_loading_info=True, **options
            )
    except RuntimeError as error:
        raise ConfigError(f"{failure}: {error}") from error
    return with_processor(model, place, options), set(loading["missing_keys"])


@contextmanager
def _without_load_report() -> Iterator[None]:
    """transformers prints a table of the weights that a classifier made of a language model lacks,
    and of those that it has no place for. The caller is told the former, and says what they
    mean."""
    log = logging.getLogger("transformers.modeling_utils")

    def is_other(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    log.addFilter(is_other)
    try:
        yield
    finally:
        log.removeFilter(is_other)


def load_tokenizer(source: str, **options: Any) -> Any:
    """The tokenizer of `source`. One without a padding token pads with its end token. Raises
    ConfigError for one without an end token, and if there is none."""
    from transformers import AutoTokenizer

    place = locate_model(source, *TOKENIZER_CONFIGS)
    if holds_only_adapters(place) and not (Path(place) / "tokenizer_config.json").is_file():
        return load_tokenizer(find_adapter_base(Path(place)), **options)
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False, **options)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the tokenizer of {source} could not be loaded: {error}; set tokenizer=PATH") from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # what transformers makes of a folder without one
        raise ConfigError(f"{source} has no tokenizer; set tokenizer=PATH, for a checkpoint the run's folder `model`")
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer of {source} has no end token; the policy could never end an answer")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.chat_template is None:
        tokenizer.chat_template = _read_processor_template(place)
    return tokenizer


def _read_processor_template(place: str) -> str | None:
    """The chat template in the file where older models that see images have it; None without."""
    from transformers.utils import cached_file

    optional = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    file = cached_file(place, "chat_template.json", **optional)
    return None if file is None else read_json(Path(file)).get("chat_template")


def find_whole_model(source: str | None) -> str | None:
    """Where `source` lies if it is a model without adapters, which adapters can name as their
    base; else None."""
    place = None if source is None else locate_model(source)
    if place is None or holds_only_adapters(place):
        return None
    return str(Path(place).resolve()) if Path(place).is_dir() else place


def describe_device(model: Any) -> str:
    """Such as `cpu, 2 threads, float32` or `cuda:0 (NVIDIA H100), bfloat16`, for the model's
    first parameter."""
    parameter = next(model.parameters())
    device, dtype = parameter.device, str(parameter.dtype).removeprefix("torch.")
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)}), {dtype}"
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return f"{device}{threads}, {dtype}"
