"""What a run needs of memory, from its configuration alone: no weight is loaded or made.

The model is built of fake tensors, which have a shape and no content, and runs forward once on a
full micro-batch, while autograd's saved tensors are counted. Weights, gradients and optimizer
follow from the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ludic.errors import ConfigError
from ludic.inference.vllm.launch import count_kv_values
from ludic.models.images.features import set_trained_parts
from ludic.models.loading import check_dtype, choose_class, locate_model, sees_images
from ludic.models.places import find_adapter_base, holds_only_adapters
from ludic.models.quantization import QuantizationSettings, find_quantizable_layers
from ludic.recipes.build import build_algorithm
from ludic.recipes.epochs_schema import EpochsRecipe, RMRecipe
from ludic.recipes.model import (
    apply_settings,
    build_lora_settings,
    build_quantization,
    build_tokenizer,
    make_small_config,
    recomputes_activations,
)
from ludic.recipes.schema import LoraSection, Recipe
from ludic.recipes.sections import QuantizationSection, switches_adapters_off
from ludic.training.backend.forward import CHUNKED_FROM
from ludic.training.backend.optimizers import hidden_matrices
from ludic.training.loss.token_scores import count_tile_elements

WIDE = 4
"""Bytes of float32."""
OPTIMIZER_STATE = {"muon": WIDE, "adafactor": 0, "adamw8bit": 2}
"""Bytes of state for a trained parameter; AdamW, and another optimizer, has two moments in float32.
Muon: for one of `hidden_matrices`."""


@dataclass(frozen=True)
class Settings:
    """What memory depends on."""

    dtype: str
    """float32, bfloat16, float16, or auto."""
    micro_token_budget: int
    max_seq_len: int
    logits: str
    """full, chunked or auto."""
    checkpointing: bool
    """Whether activations are recomputed in the backward pass."""
    concurrency: int
    """Sequences that are sampled together in this process; 0: none are."""
    lora: LoraSection
    """With the rank 0 every weight is trained."""
    optimizer: str = "adamw"
    """As `TrainerConfig.optimizer`."""
    quantization: QuantizationSection = field(default_factory=QuantizationSection)
    frozen_copies: int = 0
    """Models in memory in addition to the policy: its reference, or its teachers."""
    offload: bool = False
    """Whether nothing of that is on the device while a server samples there."""
    has_critic: bool = False
    """Whether a second model is trained, of about the size of the policy (`critic.model`)."""

    @classmethod
    def of(cls, recipe: Recipe | EpochsRecipe) -> Settings:
        """The sizes of a recipe."""
        concurrency, frozen_copies, has_critic = 0, 0, False
        if isinstance(recipe, Recipe):
            concurrency = recipe.rollout.concurrency if recipe.inference.kind in (None, "local") else 0
            algorithm = build_algorithm(recipe)
            has_critic = recipe.critic.model is not None
            if algorithm.reads_teacher:
                frozen_copies = len(recipe.teacher.by_name) if recipe.teacher.url is None else 0
            elif algorithm.reads_reference:
                frozen_copies = int(not switches_adapters_off(recipe.reference, has_adapters=bool(recipe.lora.rank)))
        return cls(
            dtype=recipe.dtype,
            micro_token_budget=recipe.trainer.micro_token_budget,
            max_seq_len=recipe.trainer.max_seq_len,
            logits=recipe.trainer.logits,
            checkpointing=recomputes_activations(recipe),
            concurrency=concurrency,
            lora=recipe.lora,
            optimizer=recipe.trainer.optimizer,
            quantization=recipe.quantization,
            frozen_copies=frozen_copies,
            has_critic=has_critic,
            offload=isinstance(recipe, Recipe) and recipe.inference.colocate and recipe.trainer.offload is not False,
        )


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes, at the peak of each."""

    settings: Settings
    parameters: int
    """Number of weights, adapters included."""
    trained: int
    """Number of them that are trained."""
    weights: int
    """With the frozen copies. Weights, gradients and optimizer include a critic that is a model."""
    gradients: int
    optimizer: int
    """The optimizer's state, and float32 masters of trained weights in half precision."""
    activations: int
    """What the backward pass of a full micro-batch needs."""
    logits: int
    """The logits of a full micro-batch with their gradient, or a tile of them."""
    chunked: bool
    """Whether no logits are kept."""
    kv_cache: int
    """Keys and values of all sequences that are sampled together, at their full length."""

    @property
    def training(self) -> int:
        """The peak of a training step."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits

    @property
    def sampling(self) -> int:
        """The peak while sampling; gradients are freed then."""
        return 0 if self.settings.offload else self.weights + self.optimizer + self.kv_cache

    @property
    def peak(self) -> int:
        return max(self.training, self.sampling)


class MemoryEstimator:
    """Estimates for one model, under any settings."""

    def __init__(self, recipe: Recipe | EpochsRecipe) -> None:
        """Raises ConfigError for a model whose config cannot be read."""
        check_dtype(recipe.dtype)
        from transformers import AutoConfig

        self._tower = recipe.images.tower
        self.name = recipe.model or "the small model that is made"
        self._scores = isinstance(recipe, RMRecipe)  # one number, and no logits
        self.config: Any
        if recipe.model is None:
            self.config = make_small_config(recipe.network, build_tokenizer(recipe))
            return
        place = locate_model(recipe.model)
        if holds_only_adapters(place):  # their model is merged
            place = locate_model(find_adapter_base(Path(place)))
        try:
            self.config = AutoConfig.from_pretrained(place, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ConfigError(f"the config of model ({recipe.model}) could not be read: {error}") from error

    def estimate(self, settings: Settings) -> MemoryEstimate:
        """The memory of a run with `settings`. Raises ConfigError for settings of adapters that
        the model cannot have."""
        dtype, quantization = self._dtype(settings.dtype), build_quantization(settings.quantization)
        tokens = max(1, settings.micro_token_budget // settings.max_seq_len) * settings.max_seq_len
        empty = self._build(dtype, settings)
        with FakeTensorMode():
            model = _fill_with_fakes(empty)
            parameters = list(model.parameters())
            saved = _count_saved_bytes(model, tokens // settings.max_seq_len, settings.max_seq_len)
        layers = [] if quantization is None else _count_quantized(empty, quantization)
        dequantized = max((dense for dense, _ in layers), default=0)
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        count = sum(parameter.numel() for parameter in trained)
        own = sum(each.numel() for each in hidden_matrices(model)) if settings.optimizer == "muon" else count
        state = own * OPTIMIZER_STATE.get(settings.optimizer, 2 * WIDE) + (count - own) * 2 * WIDE
        half = sum(parameter.numel() for parameter in trained if parameter.dtype != torch.float32)
        text = self.config.get_text_config()
        logits, is_chunked = 0 if self._scores else tokens * text.vocab_size, settings.logits == "chunked"
        if settings.logits == "auto":
            is_chunked = settings.micro_token_budget * text.vocab_size >= CHUNKED_FROM
        if settings.checkpointing:  # the input of each block, and what one block saves when it is computed again
            blocks = text.num_hidden_layers
            saved = blocks * tokens * text.hidden_size * dtype.itemsize + saved // blocks
        copy = _count_bytes(parameters) * settings.frozen_copies
        trained_models = 2 if settings.has_critic else 1
        tile = count_tile_elements(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        return MemoryEstimate(
            settings=settings,
            parameters=sum(parameter.numel() for parameter in parameters),
            trained=count,
            weights=trained_models * (_count_bytes(parameters) - sum(dense - stored for dense, stored in layers)) + copy,
            gradients=trained_models * _count_bytes(trained),
            optimizer=trained_models * (state + 2 * WIDE * half),  # a master, and its gradient
            activations=saved + dequantized,
            # All logits with their gradient, or three tiles in float32.
            logits=3 * WIDE * min(tile, logits) if is_chunked else 2 * logits * dtype.itemsize,
            chunked=is_chunked,
            kv_cache=settings.concurrency
            * settings.max_seq_len
            * count_kv_values(lambda name: getattr(text, name, None))
            * dtype.itemsize,
        )

    def list_remedies(self, settings: Settings) -> list[tuple[str, Settings]]:
        """(what to set, the settings then): single changes that save memory, and all together."""
        changes: list[tuple[str, dict[str, Any]]] = []
        if self._dtype(settings.dtype) == torch.float32:
            changes.append(("dtype=bfloat16", {"dtype": "bfloat16"}))
        if not settings.lora.rank:
            changes.append(("lora.rank=16", {"lora": replace(settings.lora, rank=16)}))
        elif settings.quantization.kind is None:
            changes.append(("quantization=nf4", {"quantization": replace(settings.quantization, kind="nf4")}))
        if settings.micro_token_budget > settings.max_seq_len:
            changes.append((f"trainer.micro_token_budget={settings.max_seq_len}", {"micro_token_budget": settings.max_seq_len}))
        if not settings.checkpointing:
            changes.append(("gradient_checkpointing=true", {"checkpointing": True}))
        if settings.logits == "full":
            changes.append(("trainer.logits=chunked", {"logits": "chunked"}))
        if settings.concurrency > 8:
            changes.append(("rollout.concurrency=8", {"concurrency": 8}))
        remedies = [(name, replace(settings, **change)) for name, change in changes]
        if len(changes) > 1:
            together: dict[str, Any] = {key: value for _, change in changes for key, value in change.items()}
            remedies.append(("all of these", replace(settings, **together)))
        return remedies

    def _dtype(self, name: str) -> torch.dtype:
        dtype: torch.dtype = (self.config.dtype or torch.float32) if name == "auto" else getattr(torch, name)
        return dtype

    def _build(self, dtype: torch.dtype, settings: Settings) -> nn.Module:
        kind = choose_class(self.config, scores=self._scores)
        if self._scores:
            self.config.num_labels, text = 1, self.config.get_text_config()
            text.pad_token_id = text.pad_token_id or 0  # a classifier has no batch without one
        with torch.device("meta"):
            model: nn.Module = kind.from_config(self.config, dtype=dtype, trust_remote_code=False)
        if sees_images(model.config):
            set_trained_parts(model, self._tower)
        model.train()
        adapters = build_lora_settings(settings.lora)
        return model if adapters is None else apply_settings(model, adapters)


def _count_quantized(model: nn.Module, settings: QuantizationSettings) -> list[tuple[int, int]]:
    """(bytes as loaded, bytes quantised) of each layer whose weights would be quantised. Adapters
    are no part of them."""
    layers = find_quantizable_layers(model, settings)
    own = [layer.weight for name, layer in layers.items() if "lora_" not in name and ".modules_to_save." not in name]
    return [(weight.numel() * weight.element_size(), settings.count_bytes(weight.numel(), weight.shape[0])) for weight in own]


def _fill_with_fakes(model: nn.Module) -> nn.Module:
    """The model with tensors of the current fake mode instead of those on the device `meta`. Ties
    stay ties."""
    made: dict[int, Any] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(fake(parameter), requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else fake(buffer)
    return model


def _count_bytes(parameters: list[nn.Parameter]) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


def _count_saved_bytes(model: nn.Module, rows: int, tokens: int) -> int:
    """Bytes that autograd saves in a forward pass of [rows, tokens], each storage once, without
    parameters."""
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    saved: dict[int, int] = {}
    kept: list[torch.Tensor] = []  # so that no storage is freed and its address used again

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage.nbytes()
            kept.append(tensor)
        return tensor

    ids = torch.zeros(rows, tokens, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=ids, use_cache=False)
    return sum(saved.values())
