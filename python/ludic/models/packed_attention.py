"""Attention over sequences that are concatenated in a row, without a mask of [S, S], and positions
that do not depend on the other sequences of a forward pass.

transformers builds such a mask for sdpa, and its time and memory are quadratic in the whole row.
Here attention stays within each sequence: on CUDA in half precision by torch's `varlen_attn`,
elsewhere by one sdpa call per group of sequences of similar length. Batches that are not
padding-free go to transformers' own sdpa, so that a model can keep this attention for both.

transformers chooses the frequencies of RoPE by the largest position of the whole pass, if their
type is `longrope` (Phi-3, MiniCPM) or `dynamic`: a sequence then has other logits in a batch with a
longer one. Here they are pinned for a run, as in vLLM: every pass uses the frequencies of
`max_seq_len` tokens. The config does not change.

Models like RoBERTa count positions from `padding_idx + 1`, and only tokens that are not padding.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ludic.models.context_parallel import divided_by_heads
from ludic.models.flops import reported_attention
from ludic.models.prefix_trees import PREFIX_FLEX, Branches, PrefixIntervals
from ludic.models.wrappers import find_text_config, unwrap_transformer

logger = logging.getLogger(__name__)

PACKED = "ludic_packed"
"""The name under which transformers knows this attention."""
OWN = (PACKED, PREFIX_FLEX)
"""This attention under both of its names. With `PREFIX_FLEX` prefix trees are left to
FlexAttention; all else is the same."""


@dataclass(frozen=True)
class SequenceGroups:
    """The sequences of a row in groups of similar length, padded on the right to the longest of the
    group. Causal attention then needs no mask: no token sees the padding after it.

    Lengths 2 and 1 in one group, tokens a b | c: `gather` is [0, 1, 2, 2], which is a b / c c,
    `shapes` ((2, 2),) and `scatter` [0, 1, 2]."""

    gather: Tensor
    """[P] the row's token at each place of the padded groups, which are concatenated."""
    shapes: tuple[tuple[int, int], ...]
    """(sequences, longest) of each group."""
    scatter: Tensor
    """[S] the place of each token of the row."""
    pairs: int = 0
    """Pairs of two tokens of one sequence."""
    windows: set[int] = field(default_factory=set)
    """The windows that layers have requested."""

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], device: torch.device) -> SequenceGroups:
        """Group sequences from the longest down. A sequence that would be padded by more than 16
        tokens and more than a quarter of the group's longest starts a new group."""
        sizes = torch.tensor(lengths)
        begins = sizes.cumsum(0) - sizes
        groups: list[list[int]] = []
        for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
            longest = lengths[groups[-1][0]] if groups else 0
            if not groups or longest - lengths[index] > max(16, longest // 4):
                groups.append([])
            groups[-1].append(index)
        gathered, places, end = [], torch.empty(int(sizes.sum()), dtype=torch.int64), 0
        for group in groups:
            group_sizes, longest = sizes[group, None], lengths[group[0]]
            columns = torch.arange(longest)[None]
            tokens = begins[group, None] + columns.minimum(group_sizes - 1)
            is_token = columns < group_sizes
            places[tokens[is_token]] = end + is_token.flatten().nonzero()[:, 0]
            gathered.append(tokens.flatten())
            end += tokens.numel()
        shapes = tuple((len(group), lengths[group[0]]) for group in groups)
        return cls(torch.cat(gathered).to(device), shapes, places.to(device), int(sizes.square().sum()))

    @property
    def padded_pairs(self) -> int:
        """The same with padding: above 8, and 5 without."""
        return sum(count * longest**2 for count, longest in self.shapes)

    def pad(self, tensor: Tensor) -> list[Tensor]:
        """[1, H, S, D] as one [B, H, T, D] per group."""
        rows = tensor[0].transpose(0, 1).index_select(0, self.gather).split([count * longest for count, longest in self.shapes])
        return [row.unflatten(0, shape).transpose(1, 2) for row, shape in zip(rows, self.shapes, strict=True)]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """[B, T, H, D] of each group as [1, S, H, D]."""
        return torch.cat([part.flatten(0, 1) for part in parts]).index_select(0, self.scatter)[None]


def get_attention(model: nn.Module) -> str | None:
    """The name of the model's attention implementation; None for a model that is not from
    transformers."""
    name: str | None = getattr(getattr(unwrap_transformer(model), "config", None), "_attn_implementation", None)
    return name


def set_attention(model: nn.Module, name: str) -> None:
    """Set the attention implementation of a transformers model to `name`, and register it if it is
    one of `OWN`."""
    if name in OWN:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

        AttentionInterface.register(name, packed_attention)
        AttentionMaskInterface.register(name, sdpa_mask)
    unwrap_transformer(model).config._attn_implementation = name


def report_kernel(model: nn.Module) -> None:
    """Have transformers' flash or flex attention, if `model` uses it, report its size to
    `models.flops`."""
    name = get_attention(model) or ""
    if name in OWN or not ("flash" in name or "flex" in name):
        return
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    kernel = ALL_ATTENTION_FUNCTIONS[name]
    if hasattr(kernel, "__wrapped__"):
        return

    @wraps(kernel)
    def reported(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
        bounds = options.get("cu_seq_lens_q")
        whole = query.shape[0] * query.shape[2] * key.shape[2]
        with reported_attention(lambda: whole if bounds is None else _count_pairs(bounds), query, key, value):
            return kernel(module, query, key, value, *args, **options)

    ALL_ATTENTION_FUNCTIONS.register(name, reported)


_pairs = WeakIdKeyDictionary()


def _count_pairs(bounds: Tensor) -> int:
    """Pairs of two tokens of one sequence; read from the device once for all layers."""
    if bounds not in _pairs:
        _pairs[bounds] = int(bounds.diff().long().square().sum())
    return int(_pairs[bounds])


def make_packed_keywords(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a forward pass over a padding-free `batch`: position ids, and the bounds
    of the sequences if the model's attention uses them."""
    keywords: dict[str, Any] = {"position_ids": batch["position_ids"] + first_position(unwrap_transformer(model))}
    keywords["attention_mask"] = None
    name = get_attention(model) or ""
    if name not in OWN and "flash" not in name:
        return keywords
    bounds = batch["cu_seqlens"].to(torch.int32)
    longest = batch["max_seqlen"] if "max_seqlen" in batch else int(bounds.diff().max())
    keywords |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
    if name in OWN:
        # transformers passes a 4D mask on unchanged; an empty one cannot be used by mistake.
        keywords["attention_mask"] = bounds.new_empty(1, 1, 0, 0, dtype=torch.bool)
        keywords["sequence_groups"] = SequenceGroups.from_lengths(bounds.diff().tolist(), bounds.device)
    return keywords


@torch.no_grad()
def hides_windows(model: nn.Module, device: torch.device | str, max_seq_len: int) -> bool:
    """Whether layers of a transformers model attend in windows or chunks of which only its mask
    knows, as in Qwen2MoE, PhiMoE and Llama4. The attention of this module, whose name the
    model has, uses no mask. Runs the model on two tokens if samples can exceed its windows."""
    config = find_text_config(model)
    longest = min(max_seq_len, getattr(config, "max_position_embeddings", max_seq_len))
    if (getattr(config, "attention_chunk_size", None) or longest) < longest:
        return True
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if not window or window >= longest:
        return False
    if kinds is not None and "sliding_attention" not in kinds:
        return False
    ids = torch.tensor([[1, 2]], device=device)
    batch = {"position_ids": torch.zeros_like(ids), "cu_seqlens": torch.tensor([0, 1, 2], device=device)}
    keywords = make_packed_keywords(model, batch)
    model(input_ids=ids, use_cache=False, **keywords)
    return not keywords["sequence_groups"].windows


@divided_by_heads
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sequence_groups: SequenceGroups | None = None,
    prefix_branches: Branches | None = None,
    prefix_intervals: PrefixIntervals | None = None,
    tokens_ahead: Tensor | None = None,
    tokens_ahead_in_windows: Tensor | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence: [1, S, H, D] from `query` [1, H, S, D] and `key`,
    `value` [1, H_kv, S, D]. With `sliding_window` each token sees that many tokens, itself
    included. `tokens_ahead` [S]: how many tokens behind itself it sees in addition, as in an image
    whose tokens see each other; `tokens_ahead_in_windows`: in layers with a window alone.
    `prefix_branches` or `prefix_intervals`: within each path of a tree instead. Without all of
    these it is transformers' sdpa."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if sliding_window is not None and tokens_ahead is None:
        tokens_ahead = tokens_ahead_in_windows
    if prefix_intervals is not None:
        dtype = _find_compute_dtype(query)
        cast = (tensor.to(dtype) for tensor in (query, key, value))
        with reported_attention(lambda: prefix_intervals.count_pairs(sliding_window), query, key, value):
            return prefix_intervals.attend(*cast, window=sliding_window, tokens_ahead=tokens_ahead, **options), None
    if prefix_branches is not None:

        def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            part: Tensor = sdpa_attention_forward(module, q, k, v, mask, **options)[0]
            return part

        with reported_attention(prefix_branches.count_pairs, query, key, value):
            dtype = _find_compute_dtype(query)
            return prefix_branches.attend(attend, query, key, value, sliding_window, dtype, tokens_ahead), None
    if sequence_groups is None:
        attended, _ = sdpa_attention_forward(module, query, key, value, attention_mask, sliding_window=sliding_window, **options)
        return attended, None
    if sliding_window is not None:
        sequence_groups.windows.add(sliding_window)
    if tokens_ahead is None and _has_kernel(query, value, options):
        with reported_attention(lambda: sequence_groups.pairs, query, key, value):
            return _attend_varlen(query, key, value, sliding_window, options), None
    parts = list(zip(*(sequence_groups.pad(tensor) for tensor in (query, key, value)), strict=True))
    reaches = [None] * len(parts) if tokens_ahead is None else sequence_groups.pad(tokens_ahead[None, None, :, None])
    bounds = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
    rest = {name: option for name, option in options.items() if name not in bounds}
    with reported_attention(lambda: sequence_groups.padded_pairs, query, key, value):
        attended_parts = [
            sdpa_attention_forward(module, q, k, v, _find_seen(q, sliding_window, reach), **rest)[0]
            for (q, k, v), reach in zip(parts, reaches, strict=True)
        ]
    return sequence_groups.join(attended_parts), None


def _find_seen(query: Tensor, window: int | None, tokens_ahead: Tensor | None) -> Tensor | None:
    """[B or 1, 1, L, L] the tokens that each token sees: itself, the `window - 1` before it, and
    `tokens_ahead` [B, 1, L, 1] behind it. None if every token sees all before it.

    Window 2, three tokens: [[1, 0, 0], [1, 1, 0], [0, 1, 1]]; with `tokens_ahead` [1, 0, 0]:
    [[1, 1, 0], [1, 1, 0], [0, 1, 1]]."""
    length = query.shape[2]
    window = None if window is None or length <= window else window
    if window is None and tokens_ahead is None:
        return None
    place = torch.arange(length, device=query.device)
    before = (place[:, None] - place[None, :])[None, None]
    seen = before >= (0 if tokens_ahead is None else -tokens_ahead)
    return seen if window is None else seen & (before < window)


def _has_kernel(query: Tensor, value: Tensor, options: Mapping[str, Any]) -> bool:
    """Whether `varlen_attn`, torch's kernel for sequences of different lengths, supports this."""
    half = _find_compute_dtype(query) in (torch.bfloat16, torch.float16)
    plain = not options.get("dropout") and options.get("position_bias") is None and options.get("softcap") is None
    return query.is_cuda and half and plain and query.shape[-1] == value.shape[-1] <= 256 and _find_varlen()[0] is not None


def _find_compute_dtype(query: Tensor) -> torch.dtype:
    kind = query.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype


def _attend_varlen(query: Tensor, key: Tensor, value: Tensor, sliding_window: int | None, options: Mapping[str, Any]) -> Tensor:
    attend, shares_heads = _find_varlen()
    assert attend is not None
    dtype = _find_compute_dtype(query)
    q, k, v = (tensor[0].transpose(0, 1).to(dtype) for tensor in (query, key, value))
    bounds, longest = options["cu_seq_lens_q"], options["max_length_q"]
    left = -1 if sliding_window is None else sliding_window - 1
    rest: dict[str, Any] = {"scale": options.get("scaling"), "window_size": (left, 0)}
    if q.shape[1] != k.shape[1]:
        if shares_heads:
            rest["enable_gqa"] = True
        else:
            k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
    row: Tensor = attend(q, k, v, bounds, bounds, longest, longest, **rest)[None]
    return row


@cache
def _find_varlen() -> tuple[Callable[..., Tensor] | None, bool]:
    """torch's `varlen_attn` and whether it has `enable_gqa`, which torch 2.11 lacks.
    (None, False) for a torch that has no `varlen_attn` with windows."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None, False
    names = inspect.signature(varlen_attn).parameters
    if not {"scale", "window_size"} <= names.keys():
        return None, False
    attend: Any = varlen_attn
    return attend, "enable_gqa" in names


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
    config = find_text_config(model)
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
