"""Positions that do not depend on the other sequences of a forward pass.

transformers chooses the frequencies of RoPE by the largest position of the whole pass, if their
type is `longrope` (Phi-3, MiniCPM) or `dynamic`: a sequence then has other logits in a batch with a
longer one. Here they are pinned for a run, as in vLLM: every pass uses the frequencies of
`max_seq_len` tokens. The config does not change.

Models like RoBERTa count positions from `padding_idx + 1`, and only tokens that are not padding.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

_PIN = "ludic_pinned_rope"
"""Attribute of a RoPE module: the `_Pin` of its model."""


class _Pin:
    """Hooks of RoPE modules: a position more, the last of a sequence of `tokens` tokens, goes
    through each pass. Copies of a model share it, so that a sampler's copy follows the trainer."""

    def __init__(self) -> None:
        self.tokens: int | None = None
        """None means the frequencies of the model's whole context."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Pin:
        return self

    def extend(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tokens = self.tokens or module.config.max_position_embeddings
        values = {**dict(zip(("x", "position_ids", "layer_type"), args, strict=False)), **kwargs}
        positions, kind = values["position_ids"], values.get("layer_type")
        if module.ludic_rope_tokens.get(kind) != tokens:
            module.ludic_rope_tokens[kind] = tokens
            module.forward(**{**values, "position_ids": torch.zeros_like(positions)})  # forgets a longer sequence
        last = torch.full_like(positions[..., :1], tokens - 1)
        return (), {**values, "position_ids": torch.cat([positions, last], dim=-1)}

    def cut(self, module: nn.Module, args: Any, output: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        return output[..., :-1, :] if isinstance(output, Tensor) else tuple(part[..., :-1, :] for part in output)


def pin_rope(model: nn.Module, tokens: int | None = None, *, again: bool = False) -> None:
    """Compute the RoPE of `model` as for sequences of `tokens` tokens, whatever is in a pass. None
    means the whole context, until a number is given. Only `again` replaces a number."""
    modules: Any = [each for each in model.modules() if _depends_on_length(getattr(each, "rope_type", None))]
    pin = next((getattr(each, _PIN) for each in modules if hasattr(each, _PIN)), _Pin())
    for module in modules:
        if not hasattr(module, _PIN):
            setattr(module, _PIN, pin)
            module.ludic_rope_tokens = {}
            module.register_forward_pre_hook(pin.extend, with_kwargs=True)
            module.register_forward_hook(pin.cut)
    if modules and tokens is not None and (again or pin.tokens is None) and pin.tokens != tokens:
        pin.tokens = tokens
        logger.info("the RoPE of %s is computed for sequences of %d tokens, in every pass", type(model).__name__, tokens)


def _depends_on_length(rope_type: Any) -> bool:
    kinds = rope_type.values() if isinstance(rope_type, Mapping) else [rope_type]
    return any(kind == "longrope" or "dynamic" in str(kind) for kind in kinds)


def find_context(model: nn.Module) -> int | None:
    """Maximum number of tokens of a sequence: `max_position_embeddings`, or where the RoPE that the
    model is pinned to ends. None if unknown."""
    config = getattr(model, "config", None)
    context = getattr(config, "max_position_embeddings", None)
    pin = next((getattr(each, _PIN) for each in model.modules() if hasattr(each, _PIN)), None)
    limits = [] if pin is None or pin.tokens is None else list(find_rope_limits(config, pin.tokens))
    return min([*limits, *([] if context is None else [int(context)])], default=None)


def find_rope_limits(config: Any, tokens: int) -> Iterator[int]:
    """The lengths up to which RoPE that depends on length is the same as for `tokens` tokens, where
    there is such a length."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    parameters = getattr(config, "rope_parameters", None) or {}
    for each in [parameters, *parameters.values()]:
        if isinstance(each, Mapping) and _depends_on_length(each.get("rope_type")):
            original = each.get("original_max_position_embeddings") or config.max_position_embeddings
            if tokens <= original:
                yield int(original)


def first_position(transformer: Any) -> int:
    """The position of the first token of a sequence in a model of transformers without wrappers: 0,
    or `padding_idx + 1` of one like RoBERTa."""
    embeddings: Any = getattr(getattr(transformer, "base_model", None), "embeddings", None)
    counts_padding = hasattr(embeddings, "create_position_ids_from_input_ids")
    return int(embeddings.padding_idx) + 1 if counts_padding else 0
