"""Models and tokenizers from a folder or the hub. Weights are read from safetensors, never from
pickle, and no code that comes with a model is run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ludic.errors import ConfigError
from ludic.models.lora import load_adapter
from ludic.models.places import CONFIGS, TOKENIZER_CONFIGS, check_place, find_adapter_base, find_place, holds_only_adapters

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
    """A causal language model. `source` is a folder in Hugging Face layout, the folder of a run, a
    folder of PEFT adapters, which are merged, or a hub id. `options` go to `from_pretrained`."""
    check_dtype(dtype)
    place = locate_model(source)
    if holds_only_adapters(place):
        base = load_model(find_adapter_base(Path(place)), dtype, **options)
        with explain_load_errors(f"the adapters in {source} could not be loaded"):
            return load_adapter(base, place).merge_and_unload().requires_grad_(True)  # PEFT froze the base
    from transformers import AutoModelForCausalLM

    with explain_load_errors(f"model ({source}) could not be loaded"):
        return AutoModelForCausalLM.from_pretrained(place, dtype=dtype, use_safetensors=True, trust_remote_code=False, **options)


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
    from transformers import AutoModelForSequenceClassification

    check_dtype(dtype)
    place = locate_model(source)
    failure = f"{description} could not be loaded with a head for scores"
    try:
        with explain_load_errors(failure), _without_load_report():
            model, loading = AutoModelForSequenceClassification.from_pretrained(
                place, dtype=dtype, use_safetensors=True, trust_remote_code=False, output_loading_info=True, **options
            )
    except RuntimeError as error:
        raise ConfigError(f"{failure}: {error}") from error
    return model, set(loading["missing_keys"])


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
    return tokenizer


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
