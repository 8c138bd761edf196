"""Checks before the first step whether a model computes samples in the layouts of a run as it
computes each of them alone, without padding and without neighbours.

Whatever depends on other samples of a pass or on padding shows there: positions, windows, states
that run on. A layout that is wrong is replaced by one that is right, and one line says why.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from ludic import _core
from ludic.errors import ConfigError
from ludic.models.context_parallel import CONTEXT, RowSlice
from ludic.models.heads import captured_head, reads_last_token
from ludic.models.images.processor import find_processor
from ludic.models.images.support import check_images
from ludic.models.packed_attention import OWN, PACKED, find_context, get_attention, hides_windows, set_attention
from ludic.models.prefix_trees import PREFIX_FLEX, PREFIX_TREES, PrefixTrees
from ludic.models.wrappers import evaluation_mode, is_classifier, training_mode, unwrap_transformer
from ludic.training import ranks
from ludic.training.algorithm import Batch, forward_logits
from ludic.training.backend.precision import AUTOCAST, autocast
from ludic.training.batching.packing import to_tensors
from ludic.training.config import TrainerConfig
from ludic.training.rm_config import DPOTrainerConfig, RMTrainerConfig
from ludic.training.rng import preserved_rng

logger = logging.getLogger(__name__)

Layout = Literal["padded rows", "concatenated sequences", "trees", "slices"]
LENGTHS = (8, 40, 5, 24, 48)
"""Tokens of the samples, if the run and the model have room for them."""
SHARED = (0, 3, 5, 16, 16)
"""How many of its tokens each sample shares with the last one."""
DIFFERENCE = 0.05
"""How much the logits of a layout may differ from the logits of samples alone, in the mean over the
tokens of a sample: this fraction of the largest change by another first token."""
ROUNDING = 1e-3
"""What always counts as equal, as a fraction of the logits."""
TIMES_ROUNDING, MOST_ROUNDINGS = 4.0, 8.0
"""Where rounding is coarser, as in bfloat16: this multiple of the change that the length of a pass
makes, and at most this number of roundings of the largest logit. In bfloat16 a logit of 30 is a
multiple of 1/8."""
FORBIDDEN = 6e4
"""Logits at least as large say nothing of rounding."""
_said: WeakKeyDictionary[object, set[str]] = WeakKeyDictionary()
"""Model, or class of backends -> the lines that have been logged of it."""


def with_right_layout(cfg: TrainerConfig, model: nn.Module) -> TrainerConfig:
    """Return `cfg`, with "optimal" instead of "padding_free" as `packing` if the model cannot be
    trained on padding-free batches, or only at a cost that is quadratic in the tokens of a
    micro-batch. A model with sdpa gets an attention function that processes sequences one by one
    (`packed_attention`). If the model computes padded rows wrongly, only samples of one length are
    in a micro-batch. One warning says why.

    Raises ConfigError if such a model is to compare pairs, whose samples have two lengths, or to
    train on several ranks, which need as many micro-batches each.
    """
    if cfg.packing == "padding_free":
        reason = _find_packing_fault(model, cfg)
        if reason is None:
            return cfg
        _say_once(model, f'packing="padding_free" is replaced by "optimal", which pads: {reason}')
        cfg = replace(cfg, packing="optimal")
    reason = find_fault(model, cfg, "padded rows")
    if reason is None:
        return cfg
    if isinstance(cfg, DPOTrainerConfig | RMTrainerConfig) or ranks.is_distributed():
        raise ConfigError(f"{reason}, and pairs and several ranks need padding; use another architecture")
    _say_once(model, f"only samples of one length are computed together: {reason}")
    return replace(cfg, packing="optimal", overhead_tokens=0)  # the least tokens, so no padding


def _say_once(owner: object, message: str, level: int = logging.WARNING) -> None:
    said = _said.setdefault(owner, set())
    if message not in said:
        said.add(message)
        logger.log(level, message)


def can_compute_trees(model: nn.Module, cfg: TrainerConfig) -> bool:
    """Whether `model` computes rows of prefix trees (`batching.tree_batches`). One with sdpa gets
    the attention function of packed sequences. If not, one line says why, and samples have rows of
    their own. The choice is the same on all ranks and after a resume. Runs the model on a few
    tokens; all ranks call it."""
    if cfg.prefix_sharing == "off":
        return False
    reason = _prepare_for_trees(model, cfg)
    if any(ranks.max_over_ranks([float(reason is not None)], cfg.model_device)):  # all ranks divide a batch in one way
        reason = reason or "another rank cannot share them"
    if reason is not None:
        explain_rows(reason, model, cfg)
    return reason is None


def require_slices(model: nn.Module, cfg: TrainerConfig) -> None:
    """Prepare `model` for rows that several ranks compute together (`models.context_parallel`), if
    there are such ranks. It gets the attention function of packed sequences. Raises ConfigError for
    one that computes slices differently from whole rows, as layers do that look at other tokens
    outside of attention. Runs the model on a few tokens; all ranks call it."""
    context = ranks.context()
    if context is None:
        return
    kind, name = type(unwrap_transformer(model)).__name__, get_attention(model)
    reason = f"the attention of {kind} is {name}, not sdpa" if name not in ("sdpa", *OWN) else None
    reason = reason or find_fault(model, cfg, "slices", attention=PACKED)
    if any(ranks.max_over_ranks([float(reason is not None)], cfg.model_device)):
        raise ConfigError(f"{reason or 'another rank computes other logits'}; set sharding.context ({context.size}) to 1")


def explain_rows(reason: str, owner: object, cfg: TrainerConfig) -> None:
    """Log why samples have rows of their own: once for a model, or for a class of backends. It is a
    warning with `prefix_sharing="tree"`."""
    level = logging.WARNING if cfg.prefix_sharing == "tree" else logging.INFO
    _say_once(owner, f"each sample is computed as a whole, without sharing prefixes: {reason}", level)


def _prepare_for_trees(model: nn.Module, cfg: TrainerConfig) -> str | None:
    """Make the model keep the branches of a tree apart: on a GPU by FlexAttention, elsewhere or if
    that fails by sdpa. Returns the reason if it cannot."""
    name, kind = get_attention(model), type(unwrap_transformer(model)).__name__
    if name not in ("sdpa", *OWN):
        return f"the attention of {kind} is {name}, not sdpa"
    if (reason := _find_image_fault(model, "trees")) is not None:
        return reason
    if _is_on_gpu(cfg):
        reason = find_fault(model, cfg, "trees", attention=PREFIX_FLEX)
        if reason is None:
            return None
        _say_once(model, f"prefix trees are computed by sdpa, not by FlexAttention: {reason}", logging.INFO)
    return find_fault(model, cfg, "trees", attention=PACKED)


def _is_on_gpu(cfg: TrainerConfig) -> bool:
    return torch.device(cfg.model_device).type == "cuda"


def _find_packing_fault(model: nn.Module, cfg: TrainerConfig) -> str | None:
    name, kind = get_attention(model), type(model).__name__
    if name is None:
        return f"{kind} is not a transformers model, so it is unknown whether it separates the sequences of a row"
    if name not in ("sdpa", *OWN) and "flash" not in name:
        return (
            f'attn_implementation="{name}" would build a mask of [tokens, tokens]; load the model with "sdpa" or flash attention'
        )
    reason = _find_image_fault(model, "padding_free")
    return reason or find_fault(model, cfg, "concatenated sequences", attention=PACKED if name == "sdpa" else name)


def _find_image_fault(model: nn.Module, layout: str) -> str | None:
    """Why a model that sees images does not compute them in `layout` (`support.LAYOUTS`) as
    alone."""
    processor = find_processor(model)
    if processor is None:
        return None
    try:
        with preserved_rng():
            return check_images(model, processor).reasons.get(layout)
    except ConfigError as error:  # text may still be trained
        return str(error)


def find_fault(model: nn.Module, cfg: TrainerConfig, layout: Layout, *, attention: str | None = None) -> str | None:
    """Why the model does not compute samples in `layout` as each alone; None if it does. Sets its
    attention to `attention`, and undoes that with a reason. Runs the model on a few hundred tokens,
    in evaluation mode; all ranks that share the model call it."""
    kind, before = type(unwrap_transformer(model)).__name__, get_attention(model)
    reason: str | None = None
    alone: list[Tensor] = []
    try:
        with preserved_rng(), evaluation_mode(model), autocast(cfg), torch.no_grad():
            samples, changed = _make_samples(model, cfg)
            alone = [_read_alone(model, ids, layout) for ids in samples]
            if attention is not None:
                set_attention(model, attention)
            together = _read_together(model, cfg, samples, layout)
            own = float(_differences(alone[-1], _read_alone(model, changed, layout))[len(alone[-1]) > 1 :].max())
            limit = max(
                DIFFERENCE * own if own < torch.inf else 0.0,
                ROUNDING * _mean_size(alone[-1]),
                measure_rounding(alone, find_precision(model, cfg)),
            )
            packs = layout != "padded rows" and get_attention(model) in OWN
            if packs and hides_windows(model, cfg.model_device, cfg.max_seq_len):
                reason = f"{kind} attends in windows of which only its mask knows"
            elif max(map(_mean_difference, alone, together)) > limit:
                reason = f"{kind} has other logits for {layout} than for samples alone"
            elif layout == "padded rows" and not is_classifier(unwrap_transformer(model)):
                _warn_of_answers(model, alone, limit)
            elif layout == "trees" and own == 0:  # as with a head of zeros: a model that mixes branches would pass
                reason = f"{kind} has the same logits whatever the tokens before, which tells nothing about trees"
        if layout == "trees" and get_attention(model) == PREFIX_FLEX:  # an error for dropout, which evaluation does without
            with preserved_rng(), training_mode(model), autocast(cfg), torch.no_grad():
                _read_together(model, cfg, samples, layout)
    except Exception as error:
        if layout == "padded rows" and not alone:  # the first step has the same error
            return None
        reason = f"{kind} does not accept {layout} ({type(error).__name__}: {error})"
    if reason is not None and attention is not None and before is not None:
        set_attention(model, before)
    return reason


def _warn_of_answers(model: nn.Module, alone: Sequence[Tensor], limit: float) -> None:
    """Samples that begin alike have the same logits there, unless these depend on later tokens."""
    beginning = SHARED[3]
    if len(alone[3]) > beginning and _mean_difference(alone[3][:beginning], alone[-1][:beginning]) > limit:
        _say_once(
            model,
            f"{type(unwrap_transformer(model)).__name__} reads the tokens that it predicts: its logits depend on later tokens. "
            "If its config has is_decoder, set it to true",
        )


def find_precision(model: nn.Module, cfg: TrainerConfig) -> float:
    """The relative size of a rounding in the forward pass: 2^-7 in bfloat16."""
    computed = next(model.parameters()).dtype if cfg.mixed_precision_dtype is None else AUTOCAST[cfg.mixed_precision_dtype]
    return torch.finfo(computed).eps if computed.is_floating_point else 0.0


def measure_rounding(alone: Sequence[Tensor], precision: float) -> float:
    """What rounding may change in the logits of `LENGTHS`: samples that begin alike have the same
    logits there, computed in passes of other lengths. 0.0 where they share nothing."""
    begun = [(one[:shared], alone[-1][:shared]) for one, shared in zip(alone[:-1], SHARED, strict=False) if shared]
    changed = max((_mean_difference(left, right) for left, right in begun if len(left) == len(right) > 0), default=0.0)
    sizes = alone[-1].abs()
    largest = float(sizes[sizes < FORBIDDEN].amax()) if (sizes < FORBIDDEN).any() else 0.0
    return min(TIMES_ROUNDING * changed, MOST_ROUNDINGS * precision * largest)


def _mean_difference(left: Tensor, right: Tensor) -> float:
    """Mean over tokens of the largest difference of their logits [L, V]."""
    return float(_differences(left, right).amax(dim=-1).mean())


def _differences(left: Tensor, right: Tensor) -> Tensor:
    """0 where both are the same, infinite or NaN included; infinite where only one is NaN."""
    same = (left == right) | (left.isnan() & right.isnan())
    return (left - right).abs().nan_to_num(nan=torch.inf, posinf=torch.inf).masked_fill(same, 0.0)


def _mean_size(logits: Tensor) -> float:
    """Mean size of the logits, without tokens that a model forbids: -inf, or the least number of a
    type. 0.0 if there are no others."""
    sizes = logits.abs()
    allowed = sizes[sizes < FORBIDDEN]
    return float(allowed.mean()) if len(allowed) else 0.0


def _make_samples(model: nn.Module, cfg: TrainerConfig) -> tuple[list[Tensor], Tensor]:
    """Samples of `LENGTHS`, and the last of them with another first token. Each token is one of two
    without a meaning of its own."""
    inner = unwrap_transformer(model)
    room = min(cfg.max_seq_len, find_context(inner) or cfg.max_seq_len)
    config = getattr(inner, "config", None)
    special = {getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos")} | {cfg.pad_token_id}
    tokens = torch.tensor([each for each in range(1, 9) if each not in special][:2])
    last = tokens[torch.from_numpy(np.random.default_rng(0).integers(0, 2, LENGTHS[-1]))][:room]
    samples = []
    for length, shared in zip(LENGTHS, SHARED, strict=True):
        ids = last[:length].clone()
        ids[shared:] = tokens.sum() - ids[shared:] if length < LENGTHS[-1] else ids[shared:]
        samples.append(ids.to(cfg.model_device))
    changed = samples[-1].clone()
    changed[0] = tokens.sum() - changed[0]
    return samples, changed


def _read_alone(model: nn.Module, ids: Tensor, layout: Layout) -> Tensor:
    return _read(model, {"input_ids": ids[None], "attention_mask": torch.ones_like(ids)[None]}, layout)[0]


def _read_together(model: nn.Module, cfg: TrainerConfig, samples: Sequence[Tensor], layout: Layout) -> list[Tensor]:
    lengths = np.array([len(ids) for ids in samples])
    bounds = np.concatenate([[0], lengths.cumsum()])
    table = _core.SampleTable.from_columns(torch.cat(list(samples)).cpu().numpy(), np.ones(bounds[-1], dtype=np.uint8), bounds)
    rows = list(range(len(samples)))
    if layout == "trees":
        order, shared, _, _ = table.plan_trees(rows, int(bounds[-1]))
        trees = PrefixTrees.from_arrays(table.collate_trees(order, shared), lengths[order], shared, cfg.model_device)
        row = _read(model, {"input_ids": trees.input_ids, PREFIX_TREES: trees}, layout)[0][trees.places]
        parts = dict(zip(order.tolist(), row.split(lengths[order].tolist()), strict=True))
        return [parts[index] for index in rows]
    columns = table.collate(rows, cfg.pad_token_id) if layout == "padded rows" else table.collate_padding_free(rows)
    slices = {CONTEXT: ranks.context()} if layout == "slices" else {}
    read = _read(model, {**to_tensors(columns, cfg.model_device), **slices}, layout)
    return (
        [row[:length] for row, length in zip(read, lengths, strict=True)]
        if len(read) > 1
        else list(read[0].split(lengths.tolist()))
    )


def _read(model: nn.Module, batch: Batch, layout: Layout) -> Tensor:
    """What the model says of each token of `input_ids` [B, T]: logits [B, T, V], or of a classifier
    what its head reads [B, T, D]; in padded rows its scores [B, 1, K], where it reads a whole
    row."""
    if not is_classifier(unwrap_transformer(model)):
        return forward_logits(model, batch).float()
    if layout == "padded rows":
        return forward_logits(model, batch).float()[:, None]
    with captured_head(model) as seen:
        pooled = forward_logits(model, batch)
    states, scores = seen[-1]
    if CONTEXT in batch:  # where a score is read, the whole rows have shown
        return RowSlice(batch[CONTEXT], batch["input_ids"].shape[1]).join(states).float()
    if states.shape[:-1] != batch["input_ids"].shape:
        raise ConfigError(f"its head reads {tuple(states.shape)}, not each token")
    if PREFIX_TREES not in batch and not reads_last_token(model, scores, pooled, batch["input_ids"]):
        raise ConfigError("it does not read its score at the last token")
    return states.float()
