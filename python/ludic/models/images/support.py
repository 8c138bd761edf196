"""Checks on probe images, before the first step, what a model computes exactly of samples with
images: whether it can be trained on them at all, in which layouts of micro-batches, and whether a
prompt may have several.

Nothing is decided by the name of an architecture. The reference is transformers' own path, which
gets pixels; each layout is compared with rows that are computed alone. What is compared are the
last hidden states, whatever the model's head makes of them.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from ludic import _core
from ludic.errors import ConfigError, LudicError
from ludic.images.store import ImageStore
from ludic.models.images.features import Features, encode_images, find_tower_owner
from ludic.models.images.processor import ImageProcessor, attach_processor, find_processor
from ludic.models.images.rows import KEY, RowImages, key_ids, note_image_blocks
from ludic.models.packed_attention import PACKED, get_attention, make_packed_keywords, set_attention
from ludic.models.prefix_trees import PREFIX_TREES, PrefixTrees
from ludic.models.sharding import gather_tensor, is_sharded
from ludic.models.wrappers import evaluation_mode, unwrap_transformer
from ludic.types import ImageSpan

logger = logging.getLogger(__name__)

LAYOUTS = ("padded", "padding_free", "trees")
DIFFERENCE, ROUNDING = 0.05, 1e-3
"""What counts as equal: a difference below this fraction of the change by another image, or of the
hidden states."""
PROBES = ((56, 56), (56, 56), (112, 56))
"""Width and height of the probe images; two have one size."""


@dataclass(frozen=True)
class ImageSupport:
    """What a model computes exactly of samples with images."""

    layouts: tuple[str, ...]
    """Of `LAYOUTS`."""
    several: bool = True
    """Whether a prompt may have several images, each with the features that it has alone."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Why a layout is not exact."""


_known: WeakKeyDictionary[nn.Module, ImageSupport | str] = WeakKeyDictionary()
"""What is known of a model; the message of the error for one that cannot be trained on images."""


def check_images(model: nn.Module, processor: ImageProcessor) -> ImageSupport:
    """What `model` computes exactly with images of `processor`, which is told whether a prompt may
    have several. Runs the model on a few probe images, once; all ranks that share it call this.
    Logs a line for each thing that is not exact. Raises ConfigError, in a line, for a model that
    cannot be trained on images."""
    inner = unwrap_transformer(model)
    if inner not in _known:
        with _prepared(inner, processor) as probe:
            try:
                _known[inner] = _check(model if is_sharded(model) else inner, probe)
            except ConfigError as error:  # raised again without a pass, which another rank would not join
                _known[inner] = str(error)
    if isinstance(support := _known[inner], str):
        raise ConfigError(support)
    processor.reads_several = support.several
    return support


@contextmanager
def _prepared(model: Any, processor: ImageProcessor) -> Iterator[ImageProcessor]:
    """A processor for probe images, which are in a store of their own. What the model keeps of a
    pass, the last positions of M-RoPE, is as before."""
    probe, attention = ImageProcessor(processor.processor, model.config, ImageStore()), get_attention(model)
    before, owner = find_processor(model), find_tower_owner(model)
    deltas = getattr(owner, "rope_deltas", None)
    attach_processor(model, probe)
    if attention == "sdpa":
        set_attention(model, PACKED)
    try:
        with evaluation_mode(model), torch.no_grad():
            yield probe
    finally:
        if attention is not None:
            set_attention(model, attention)
        attach_processor(model, before or processor)
        if hasattr(owner, "rope_deltas"):
            owner.rope_deltas = deltas


def _check(model: Any, processor: ImageProcessor) -> ImageSupport:
    kind = type(unwrap_transformer(model)).__name__
    if "mm_encoder_outputs" not in inspect.signature(find_tower_owner(model).forward).parameters:
        raise ConfigError(f"{kind} takes no precomputed image features (mm_encoder_outputs); it cannot be trained on images")
    draw = np.random.default_rng(0)
    pictures = [draw.integers(0, 256, (height, width, 3), dtype=np.uint8) for width, height in PROBES]
    digests = [processor.store.add(picture) for picture in pictures]
    first, other, second = digests
    try:
        features = dict(zip(digests, encode_images(model, [processor.process(digest) for digest in digests]), strict=True))
        row = _Row.make(processor, [first])
        alone = _read_pixels(model, row)
        ours = _read(model, [row], features, "padded")[0]
        changed = _read(model, [_Row.make(processor, [other])], features, "padded")[0]
        ending = _read_pixels(model, row.with_other_end())
    except LudicError:
        raise
    except Exception as error:  # of a library that we do not know
        raise ConfigError(f"{kind} does not read a probe image ({_shorten(error)})") from error
    own, size = _difference(ours, changed), float(alone.abs().mean())
    limit = max(DIFFERENCE * own, ROUNDING * size)
    if own <= 1e-6 * size:
        logger.warning("%s does not look at images: another image changes nothing (a new projector?)", kind)
    if _difference(alone[:-1], ending[:-1]) > limit:
        raise ConfigError(
            f"{kind} reads a prompt in both directions, later tokens before earlier ones; it cannot be trained on images"
        )
    if _difference(alone, ours) > limit:
        raise ConfigError(f"{kind} reads precomputed image features in another way than pixels; it cannot be trained on images")
    several = _reads_several(model, processor, [second, first], features, limit)
    if not several:
        logger.warning("%s reads an image in another way if its prompt has several; prompts of several images are refused", kind)
    return _check_layouts(model, processor, digests, features, several)


def _reads_several(
    model: Any, processor: ImageProcessor, digests: Sequence[str], features: Mapping[str, Features], limit: float
) -> bool:
    """Whether two images in a prompt are as each alone."""
    try:
        row = _Row.make(processor, digests)
        pixels, ours = _read_pixels(model, row), _read(model, [row], features, "padded")[0]
    except Exception:  # as where the placeholders are fewer
        return False
    return _difference(pixels, ours) <= limit


def _check_layouts(
    model: Any, processor: ImageProcessor, digests: Sequence[str], features: Mapping[str, Features], several: bool
) -> ImageSupport:
    """Compares the layouts on features that are drawn, so that a projector of zeros hides
    nothing."""
    draw = torch.Generator().manual_seed(0)
    scale = float(gather_tensor(model.get_input_embeddings().weight.detach()).float().std())
    drawn = {
        digest: each.with_tensors(
            [(scale * torch.randn(tensor.shape, generator=draw)).to(tensor.device, tensor.dtype) for tensor in each.tensors]
        )
        for digest, each in features.items()
    }
    first, other, second = digests
    row = _Row.make(processor, [first])
    rows = [row, row.with_other_end(), _Row.make(processor, [other]), _Row.make(processor, [second]), row.without_image()]
    alone = [_read(model, [each], drawn, "padded")[0] for each in rows]
    limit = max(DIFFERENCE * _difference(alone[0], alone[2]), ROUNDING * float(alone[0].abs().mean()))
    [span] = row.spans
    bent = {**drawn, first: drawn[first].with_tensors([torch.cat([each[:-1], -each[-1:]]) for each in drawn[first].tensors])}
    inside = slice(span.start, span.start + span.length - 1)
    has_blocks = _difference(alone[0][inside], _read(model, [row], bent, "padded")[0][inside]) > limit
    for blocks in BLOCKS if has_blocks else (None,):
        note_image_blocks(model, blocks)
        found = {layout: _find_fault(model, rows, alone, drawn, layout, limit) for layout in LAYOUTS}
        reasons = {layout: reason for layout, reason in found.items() if reason is not None}
        if not reasons:
            break
    if "padded" in reasons:
        raise ConfigError(f"{reasons['padded']}; it cannot be trained on images")
    for reason in reasons.values():
        logger.info("%s", reason)
    return ImageSupport(tuple(layout for layout in LAYOUTS if layout not in reasons), several, reasons)


def _find_fault(
    model: Any, rows: Sequence[_Row], alone: Sequence[Tensor], features: Mapping[str, Features], layout: str, limit: float
) -> str | None:
    kind, name = type(unwrap_transformer(model)).__name__, NAMES[layout]
    try:
        together = _read(model, rows, features, layout)
    except Exception as error:  # of a library that we do not know
        return f"{kind} does not accept images in {name} ({_shorten(error)})"
    worst = max(map(_difference, alone, together))
    return f"{kind} has other states for images in {name} than alone" if worst > limit else None


NAMES = {"padded": "padded rows", "padding_free": "concatenated sequences", "trees": "trees"}
BLOCKS = ("tokens_ahead", "tokens_ahead_in_windows")
"""Keywords of `packed_attention`: the tokens of an image see each other in all layers (Gemma 3), or
in those with a window (Gemma 4)."""


@dataclass(frozen=True)
class _Row:
    """A prompt as transformers' processor makes it."""

    ids: Tensor
    """[T]."""
    spans: tuple[ImageSpan, ...]
    inputs: Mapping[str, Tensor]
    """What transformers' own path reads."""

    @classmethod
    def make(cls, processor: ImageProcessor, digests: Sequence[str]) -> _Row:
        images = [processor.store.open(digest) for digest in digests]
        text = " ".join(f"Look at {processor.marker} and say what it shows." for _ in digests)
        inputs = dict(processor.processor(text=[text], images=[images], return_tensors="pt"))
        ids, spans, begin = inputs["input_ids"][0], [], 0
        places = (ids == processor.placeholder_id).nonzero()[:, 0].tolist()
        for digest in digests:
            own = places[begin : begin + processor.process(digest).num_placeholders]
            spans.append(ImageSpan(digest, own[0], own[-1] + 1 - own[0]))
            begin += len(own)
        if begin != len(places):
            raise ConfigError(f"{len(places)} placeholders for {begin} features")
        return cls(ids, tuple(spans), {name: inputs[name] for name in inputs if name != "labels"})

    def with_other_end(self) -> _Row:
        """The same with another last token."""
        ids = self.ids.clone()
        ids[-1] = ids[-2] if ids[-1] != ids[-2] else ids[-3]
        return _Row(ids, self.spans, {**self.inputs, "input_ids": ids[None]})

    def without_image(self) -> _Row:
        """Its text behind the image."""
        ids = self.ids[self.spans[-1].start + self.spans[-1].length :]
        return _Row(ids, (), {})


def _read_pixels(model: Any, row: _Row) -> Tensor:
    """[T, D] hidden states by transformers' own path."""
    dtype = next(each.dtype for each in model.parameters() if each.is_floating_point())
    inputs = {name: value.to(model.device, dtype if value.is_floating_point() else None) for name, value in row.inputs.items()}
    return _forward(model, inputs)[0]


def _forward(model: Any, inputs: Mapping[str, Any]) -> Tensor:
    """[B, T, D] the last hidden states; of a model whose parts do not give them, the logits."""
    seen: list[Any] = []
    hook = unwrap_transformer(model).base_model.register_forward_hook(lambda module, args, output: seen.append(output))
    try:
        model(**inputs, use_cache=False)
    finally:
        hook.remove()
    states: Tensor = seen[-1]["last_hidden_state"] if "last_hidden_state" in seen[-1] else seen[-1].logits
    return states.float()


def _read(model: Any, rows: Sequence[_Row], features: Mapping[str, Features], layout: str) -> list[Tensor]:
    """[T, D] hidden states of each row, from precomputed features, in one pass."""
    device, lengths = model.device, [len(row.ids) for row in rows]
    processor = find_processor(model)
    assert processor is not None
    images = RowImages(processor.placeholder_id, [row.spans for row in rows], None, features)
    batch: dict[str, Any]
    if layout == "trees":
        trees, order, computed = _make_trees(rows, processor.placeholder_id, device)
        images = RowImages(processor.placeholder_id, [rows[row].spans for row in order], computed, features)
        batch = {"input_ids": trees.input_ids, PREFIX_TREES: trees}
        keywords = trees.keywords(get_attention(model))
    elif layout == "padding_free":
        bounds = torch.tensor([0, *np.cumsum(lengths).tolist()], device=device)
        places = torch.cat([torch.arange(length) for length in lengths])[None].to(device)
        batch = {"input_ids": torch.cat([row.ids for row in rows])[None].to(device), "cu_seqlens": bounds, "position_ids": places}
        keywords = make_packed_keywords(model, batch)
    else:
        batch = {"input_ids": nn.utils.rnn.pad_sequence([row.ids for row in rows], batch_first=True).to(device)}
        sizes = torch.tensor(lengths, device=device)
        keywords = {"attention_mask": (torch.arange(max(lengths), device=device) < sizes[:, None]).long()}
    states = _forward(model, {"input_ids": batch["input_ids"], **keywords, **images.keywords(model, batch)})
    if layout == "padded":
        return [each[:length] for each, length in zip(states, lengths, strict=True)]
    if layout == "padding_free":
        return list(states[0].split(lengths))
    parts = states[0][trees.places].split(trees.lengths.tolist())
    return [part for _, part in sorted(zip(order, parts, strict=True), key=lambda each: each[0])]


def _make_trees(
    rows: Sequence[_Row], placeholder_id: int, device: torch.device
) -> tuple[PrefixTrees, list[int], list[tuple[ImageSpan, ...]]]:
    """The rows as prefix trees, their order in these, and the images that each adds."""
    numbers = {digest: number for number, digest in enumerate(dict.fromkeys(span.digest for row in rows for span in row.spans))}
    ids, lengths = [key_ids(row.ids.tolist(), row.spans, numbers) for row in rows], np.array([len(row.ids) for row in rows])
    bounds = np.concatenate([[0], lengths.cumsum()])
    table = _core.SampleTable.from_columns(np.concatenate(ids), np.ones(bounds[-1], dtype=np.uint8), bounds)
    order, shared, _, _ = table.plan_trees(range(len(rows)), int(bounds[-1]))
    arrays = table.collate_trees(order, shared)
    arrays["input_ids"][arrays["input_ids"] >= KEY] = placeholder_id
    own = [tuple(span for span in rows[row].spans if span.start >= begin) for row, begin in zip(order, shared, strict=True)]
    return PrefixTrees.from_arrays(arrays, lengths[order], shared, device), order.tolist(), own


def _shorten(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


def _difference(left: Tensor, right: Tensor) -> float:
    """The largest difference of hidden states [T, D], in the mean over tokens, of the first tokens
    that both have."""
    tokens = min(len(left), len(right))
    if not tokens:
        return 0.0
    return float((left[:tokens] - right[:tokens]).abs().nan_to_num(nan=torch.inf).amax(-1).mean())
