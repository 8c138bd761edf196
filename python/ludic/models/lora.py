"""Low-rank adapters: the layers that get them, and files in PEFT's layout. `adapters` merges them.

    x W^T + (alpha / rank) x A^T B^T has frozen weights W and learns A [rank, in] and
    B [out, rank]; B starts at zero (Hu et al. 2021, LoRA, section 4.1).

The adapted model is a `PeftModel`. Call `apply_lora` before the model is sharded.
"""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ludic.errors import CheckpointError, ConfigError
from ludic.files.checkpoints import ADAPTER
from ludic.models.adapters import merge_adapters, require_peft
from ludic.models.heads import find_head_parts, find_layers_outside_backbone
from ludic.models.images.features import find_image_modules
from ludic.models.names import HEAD_NAMES
from ludic.models.quantization import count_weights, find_quantized_layers, keep_trainable
from ludic.models.sharding import is_sharded
from ludic.models.state_files import write_model
from ludic.models.wrappers import evaluation_mode, has_adapters, is_classifier, unwrap_model

if TYPE_CHECKING:
    from peft import LoraConfig

PROJECTIONS: dict[str, tuple[str, ...]] = {
    "Llama, Qwen, Mistral, Gemma, OLMo": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "Phi-3, with fused projections": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "OPT, Phi, GPT-J, CodeGen": ("q_proj", "k_proj", "v_proj", "qkv_proj", "out_proj", "dense", "fc1", "fc2", "fc_in", "fc_out"),
    "GPT-2, GPT-BigCode": ("c_attn", "q_attn", "c_proj", "c_fc"),
    "GPT-NeoX, Bloom, Falcon": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "BERT, RoBERTa, ELECTRA": ("query", "key", "value", "dense"),
    "DeBERTa-v2": ("query_proj", "key_proj", "value_proj", "dense"),
    "DistilBERT": ("q_lin", "k_lin", "v_lin", "out_lin", "lin1", "lin2"),
    "ModernBERT, MPT": ("Wqkv", "Wo", "Wi", "out_proj", "up_proj", "down_proj"),
    "T5": ("q", "k", "v", "o", "wi", "wi_0", "wi_1", "wo"),
    "DeepSeek": ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    "InternLM": ("wqkv", "wo", "w1", "w2", "w3"),
}
"""Last parts of the names of attention and feed-forward projections, separate or fused, in
transformers models."""
STATE_SPACES = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
"""Model types of which PEFT refuses to adapt `out_proj`: fused kernels read its weight alone."""


@dataclass(frozen=True)
class LoraSettings:
    """The adapters that a model gets.

    >>> model = apply_lora(model, LoraSettings(rank=8))
    """

    rank: int = 8
    alpha: float | None = None
    """The adapters' output is scaled by `alpha / rank`. None means twice the rank."""
    dropout: float = 0.0
    """Dropout on the adapters' input in training."""
    target_modules: Sequence[str] | None = None
    """Last parts of the names of the layers to adapt. None means the layers that
    `find_target_modules` finds."""
    modules_to_save: Sequence[str] | None = None
    """Layers that are trained in full and saved with the adapters. None means the whole head of a
    model that scores."""
    rank_stabilized: bool = False
    """Scale by `alpha / sqrt(rank)` instead (Kalajdzievski 2023)."""

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise ConfigError(f"lora rank ({self.rank}) must be a whole number >= 1; leave LoRA out to train every weight")
        if self.alpha is not None and not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ConfigError(f"lora alpha ({self.alpha}) must be a finite number > 0; None takes twice the rank")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"lora dropout ({self.dropout}) must be in [0, 1)")
        for name in ("target_modules", "modules_to_save"):
            if isinstance(getattr(self, name), str):
                raise ConfigError(f"lora {name} ({getattr(self, name)!r}) must be a list of names, not text")

    def config(self) -> LoraConfig:
        """The settings as PEFT's config."""
        alpha: Any = 2 * self.rank if self.alpha is None else self.alpha
        alpha = int(alpha) if alpha == int(alpha) else alpha  # readers of adapter_config.json expect an integer
        return require_peft().LoraConfig(
            r=self.rank,
            lora_alpha=alpha,
            lora_dropout=self.dropout,
            target_modules=None if self.target_modules is None else list(self.target_modules),
            modules_to_save=None if self.modules_to_save is None else list(self.modules_to_save),
            use_rslora=self.rank_stabilized,
        )


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model without its adapters inside: its base model, with layers that were trained in full
    as they were loaded. Raises ConfigError for a model without adapters."""
    inner: Any = unwrap_model(model)
    if not has_adapters(inner):
        raise ConfigError(f"the model ({type(model).__name__}) has no adapters to switch off; train it with lora_config=")
    with inner.disable_adapter():
        yield


def apply_lora(model: nn.Module, settings: LoraSettings | LoraConfig | None = None, *, adapters_in_float32: bool = True) -> Any:
    """The model with adapters of PEFT; all weights except theirs and the ones of `modules_to_save`
    are frozen.

    What a `LoraConfig` leaves open (`target_modules`, `modules_to_save`, `task_type`,
    `fan_in_fan_out`) is filled in as for `LoraSettings`, in a copy. Adapters of a model in half
    precision are float32 unless `adapters_in_float32` is off, which FSDP needs. Their initial
    weights are drawn from torch's global generator.

    Raises ConfigError for a model that has adapters, that is sharded already, or that has no layers
    of a known name, and for a classifier that has no head of a known name.
    """
    peft = require_peft()
    if has_adapters(model):
        raise ConfigError(f"{type(model).__name__} has adapters already; give a model without, or leave the LoRA config out")
    if is_sharded(model):
        raise ConfigError("adapters are put in before the model is sharded; call apply_lora first, then fully_shard")
    settings = LoraSettings() if settings is None else settings
    config = settings.config() if isinstance(settings, LoraSettings) else copy.deepcopy(settings)
    _fill_in(config, model)
    keep_trainable(model)
    with _silence_peft():
        return peft.get_peft_model(model, config, autocast_adapter_dtype=adapters_in_float32)


@contextmanager
def _silence_peft() -> Iterator[None]:
    """Suppress the warning about a deprecated attribute of transformers that PEFT uses; users
    cannot fix it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated", FutureWarning)
        yield


def _fill_in(config: LoraConfig, model: Any) -> None:
    heads = find_head_parts(model)
    if config.modules_to_save is None and heads:
        config.modules_to_save = [head.rpartition(".")[2] for head in heads]
    if config.modules_to_save is None and is_classifier(model):
        outside = ", ".join(find_layers_outside_backbone(model)) or "nothing"
        raise ConfigError(
            f"{type(model).__name__} is a classifier without a head of a known name ({', '.join(HEAD_NAMES)}), and its head would not "
            f"be trained; set modules_to_save to the layers that make its scores: outside of {model.base_model_prefix} it has {outside}"
        )
    linear, of_images = dict(_find_linear_layers(model)), find_image_modules(model)
    if config.target_modules is None:
        targets = config.target_modules = set(find_target_modules(model))
        # Layers of a head or pooler that have a target's name, if other targets are in blocks.
        named = [name for name in linear if _is_target(name, targets)]
        outside_blocks = [name for name in named if not _is_in_block(name)]
        left_out = outside_blocks if len(outside_blocks) < len(named) else []
        # Modules around a linear layer that have a target's name, as in Gemma 4's towers of images
        # and sound: PEFT adapts none.
        owners = [name.rpartition(".")[0] for name in linear]
        config.exclude_modules = left_out + [name for name in owners if _is_target(name, targets)] or None
    every = str(config.target_modules).lower() == "all-linear"
    if not isinstance(config.exclude_modules, str) and (every or not isinstance(config.target_modules, str)):  # no pattern
        # A name that layers of both have means the language model's.
        of_text = {name.rpartition(".")[2] for name in linear if name not in of_images}
        in_tower = [name for name in linear if name in of_images and (every or name.rpartition(".")[2] in of_text)]
        in_tower = [name for name in in_tower if every or name not in config.target_modules]
        config.exclude_modules = [*(config.exclude_modules or ()), *in_tower] or None
    _leave_out_routers(config, model)
    adapted = [layer for name, layer in linear.items() if _is_target(name, config.target_modules)]
    config.fan_in_fan_out = bool(adapted) and all(type(layer).__name__ == "Conv1D" for layer in adapted)
    if config.task_type is None:  # for models of other libraries PEFT notes the class
        task = require_peft().TaskType
        if is_classifier(model) and heads and heads[0] in ("score", "classifier"):
            config.task_type = task.SEQ_CLS
        elif not heads and hasattr(model, "prepare_inputs_for_generation"):
            config.task_type = task.CAUSAL_LM


def _leave_out_routers(config: LoraConfig, model: nn.Module) -> None:
    """Exclude the linear layers that PEFT cannot adapt from "all-linear"; raise ConfigError if they
    are named. Example: the router of PhiMoE or Llama4, which returns a tuple."""
    routers = {name: layer for name, layer in _find_linear_layers(model) if not _returns_product(layer)}
    excluded = config.exclude_modules or []
    if routers and str(config.target_modules).lower() == "all-linear":
        if isinstance(excluded, str):  # a pattern
            config.exclude_modules = "|".join([f"(?:{excluded})", *map(re.escape, routers)])
        else:
            config.exclude_modules = {*excluded, *routers}
        return
    for name, layer in routers.items():
        if require_peft().tuners.tuners_utils.check_target_module_exists(config, name):
            raise ConfigError(
                f"{name} of {type(model).__name__} ({type(layer).__name__}) can have no adapter; name it in modules_to_save instead"
            )


def _returns_product(layer: Any) -> bool:
    """Whether a linear layer of transformers gives [1, out] for [1, in]; one of another library
    counts as if."""
    kind = type(layer)
    if not kind.__module__.startswith("transformers.models.") or kind.forward is nn.Linear.forward:
        return True
    try:
        with evaluation_mode(layer), torch.no_grad():
            output: Any = layer(layer.weight.new_zeros(1, layer.in_features))
    except Exception:  # such as groups that it expects
        return False
    return isinstance(output, Tensor) and output.shape == (1, layer.out_features)


def find_target_modules(model: nn.Module) -> list[str]:
    """Last parts of the names of the attention and feed-forward projections in the model's blocks,
    sorted; of a model that sees images, in the blocks of its language model.

    >>> find_target_modules(qwen)
    ['down_proj', 'gate_proj', 'k_proj', 'o_proj', 'q_proj', 'up_proj', 'v_proj']

    Raises ConfigError, which lists the linear layers, if none has a known name.
    """
    of_images = find_image_modules(model)
    named = [name for name, _ in _find_linear_layers(model) if name not in of_images]
    leaves = {name.rpartition(".")[2] for name in [name for name in named if _is_in_block(name)] or named}
    refused = {"out_proj"} if getattr(getattr(model, "config", None), "model_type", None) in STATE_SPACES else set()
    targets = sorted(leaves.intersection(chain(*PROJECTIONS.values())) - refused)
    if not targets:
        candidates = sorted({name.rpartition(".")[2] for name in named})
        raise ConfigError(
            f"{type(model).__name__} has no known layers; set target_modules (linear: {', '.join(candidates) or 'it has none'})"
        )
    return targets


def _find_linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(full name, linear layer). Conv1D is GPT-2's linear layer, with a transposed weight."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
            yield name, module


def _is_in_block(name: str) -> bool:
    """Whether the layer is in one of a list of blocks: its name has a number, as in
    `layers.0.mlp`."""
    return any(part.isdigit() for part in name.split("."))


def _is_target(name: str, targets: Any) -> bool:
    return not isinstance(targets, str) and name.rpartition(".")[2] in targets


def collect_adapter_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights of adapters and `modules_to_save` under their names in
    adapter_model.safetensors; they share the model's memory."""
    if not has_adapters(model):
        raise ConfigError(f"{type(model).__name__} has no adapters; call apply_lora first")
    weights: dict[str, Tensor] = require_peft().get_peft_model_state_dict(model, save_embedding_layers=False)
    return weights


def save_adapter(model: nn.Module, folder: str | Path) -> None:
    """Write adapter_config.json and adapter_model.safetensors, as PEFT, transformers and vLLM
    load them."""
    if not has_adapters(unwrap_model(model)):
        raise ConfigError(f"{type(model).__name__} has no adapters to save; call apply_lora first")
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_model(model, Path(folder))


def load_adapter(base: nn.Module, folder: str | Path, *, trainable: bool = False) -> Any:
    """`base` with the adapters in the folder; in evaluation mode and frozen unless `trainable`.
    Nothing pickled is read."""
    place = Path(folder)
    if not (place / ADAPTER).is_file():
        raise CheckpointError(f"{place} holds no {ADAPTER}; adapters in other formats can run code when they are read")
    keep_trainable(base)
    with _silence_peft():
        return require_peft().PeftModel.from_pretrained(base, str(place), is_trainable=trainable)


def save_merged(model: Any, folder: str | Path) -> None:
    """Write the model with its adapters merged, in Hugging Face layout; quantised weights are
    dequantised. The model itself is not changed. Raises ConfigError for one that transformers
    quantised while loading, which it would write quantised."""
    if getattr(model.get_base_model(), "hf_quantizer", None) is not None:
        raise ConfigError(
            f"{type(model.get_base_model()).__name__} is quantised; use save_adapter, and `ludic checkpoint export` to merge"
        )
    model.get_base_model().save_pretrained(folder, state_dict=merge_adapters(model, model.state_dict()))


def describe_trained_share(model: nn.Module) -> str:
    """How many weights of the model are trained, in words."""
    quantized = sum(layer.in_features * layer.out_features for layer in find_quantized_layers(model).values())
    stored = f", {quantized:,} of them quantised" if quantized else ""
    trained, frozen = (count_weights(model, trained=flag) for flag in (True, False))
    return f"LoRA: {trained:,} weights are trained, {frozen:,} are frozen{stored}"
