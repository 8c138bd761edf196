"""Turns samples into micro-batches: truncates, packs and pads them. `ludic._core` does the work;
this module converts samples and tensors.

The core computes the plans, which divide lines into micro-batches within the token budget
(`crates/ludic-core/src/plan`); `TrainerConfig.packing` selects the algorithm. A **line** is one
sequence in a micro-batch: a sample, or the turns of one episode that share their prefix.

The trainer uses `mini_batches`. `collate_micro_batches` and the functions that it calls are for
code with its own training loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ludic import _core
from ludic.errors import DataError, check_value
from ludic.models.context_parallel import CONTEXT
from ludic.models.images.rows import IMAGES, RowImages
from ludic.models.prefix_trees import PREFIX_TREES
from ludic.training.batching.candidates import collate_candidates
from ludic.training.batching.image_keys import SampleImages
from ludic.training.batching.routes import collate_routes, key_routes, restore_ids
from ludic.training.batching.token_columns import count_in_part, table_of_items
from ludic.training.config import Packing as PackingName, TrainerConfig, check_budget
from ludic.training.types import ActorTokenLogps, SampleAttachments, SAWItem
from ludic.types import stored

Rows = NDArray[np.int64]
"""Indices of samples."""


@dataclass(frozen=True)
class MicroBatch:
    """Samples that go through the model in one forward pass.

    >>> tensors = {"input_ids": ids_BT, "attention_mask": ..., "action_mask": ..., "weight": w_B}
    >>> MicroBatch(tensors, num_items=4)
    """

    tensors: dict[str, Any]
    """Padded `[B, T]`, or padding-free `[1, S]` with `cu_seqlens` `[B + 1]` and the `int`
    `max_seqlen`; then also `prefix_trees`, if the model computes these. If samples share a row,
    `turns` `[N, 3]` has the row, start and end of each. Samples with images have `images`, a
    `RowImages`; samples that several ranks compute together `context`, a `ContextGroup`. Preference
    samples have a `meta` in addition to their tensors."""
    num_items: int
    """N: number of samples; equal to the number of rows unless samples share one."""
    sample_names: tuple[str, ...] = ()
    """`rollout_id/step_index` of each sample, for error messages; may be empty."""

    def parts(self) -> Iterator[MicroBatch]:
        """Iterate over the smallest parts that a loss can be computed on: single samples."""
        return (self.row(index) for index in range(self.num_items))

    def row(self, index: int) -> MicroBatch:
        """Return a micro-batch of only the sample at `index`.

        Example with shared rows: `turns` [[0, 1, 2], [0, 2, 3]] are two samples in row 0 of three
        tokens. Sample 1 is row 0 with `turns` [[0, 2, 3]] and an action mask that is zero except at
        token 2.
        """
        own = slice(index, index + 1)
        names = self.sample_names[own]
        if "turns" not in self.tensors:
            return MicroBatch(select_rows(self.tensors, own, own), 1, names)
        row, begin, end = self.tensors["turns"][index].tolist()
        alone = select_rows({name: value for name, value in self.tensors.items() if name != "turns"}, slice(row, row + 1), own)
        mask = alone["action_mask"].clone()
        mask[:, :begin], mask[:, end:] = 0.0, 0.0
        turns = self.tensors["turns"].new_tensor([[0, begin, end]])
        return MicroBatch({**alone, "action_mask": mask, "turns": turns}, 1, names)


def select_rows(tensors: Mapping[str, Any], rows: slice, samples: slice) -> dict[str, Any]:
    """Select `rows` from tensors with a value per token, and `samples` from tensors with a value
    per sample.

    Padding-free example: `cu_seqlens` [0, 3, 5] are rows of 3 and 2 tokens. Row 1 is the slice 3:5
    of `[1, 5]`, with `cu_seqlens` [0, 2] and `max_seqlen` 2. It is in no tree.
    """
    if IMAGES in tensors:
        others = {name: value for name, value in tensors.items() if name != IMAGES}
        return {**select_rows(others, rows, samples), IMAGES: tensors[IMAGES].select(rows)}
    if CONTEXT in tensors:
        others = {name: value for name, value in tensors.items() if name != CONTEXT}
        return {**select_rows(others, rows, samples), CONTEXT: tensors[CONTEXT]}
    if "cu_seqlens" not in tensors:
        return {name: value[rows if value.ndim >= 2 else samples] for name, value in tensors.items()}
    bounds = tensors["cu_seqlens"][rows.start : rows.stop + 1]
    start, end = int(bounds[0]), int(bounds[-1])
    alone = {
        name: value[:, start:end] if value.ndim >= 2 else value[samples]
        for name, value in tensors.items()
        if name not in ("cu_seqlens", "max_seqlen", PREFIX_TREES)
    }
    return {**alone, "cu_seqlens": bounds - start, "max_seqlen": int(bounds.diff().max())}


def without_trees(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The same samples as sequences of their own."""
    images = {IMAGES: tensors[IMAGES].select(slice(None))} if IMAGES in tensors else {}
    return {**{name: value for name, value in tensors.items() if name != PREFIX_TREES}, **images}


def to_tensors(columns: Mapping[str, NDArray[Any] | int], device: torch.device | str) -> dict[str, Any]:
    """Convert the core's arrays to tensors: on the CPU they share memory, to another `device` they
    are copied. An `int` stays an `int`."""
    on_cpu = torch.device(device).type == "cpu"

    def to_tensor(column: NDArray[Any] | int) -> Tensor | int:
        if isinstance(column, int):
            return column
        tensor = torch.from_numpy(column)
        return tensor if on_cpu else tensor.to(device, non_blocking=True)

    return {name: to_tensor(column) for name, column in columns.items()}


def token_lengths(items: Sequence[SAWItem]) -> NDArray[np.int32]:
    """[N] number of tokens of each sample."""
    return np.fromiter((len(stored(item, "input_ids")) for item in items), dtype=np.int32, count=len(items))


def collate_saw_items(items: Sequence[SAWItem], *, pad_token_id: int, device: torch.device | str) -> dict[str, Any]:
    """Return right-padded `input_ids` and `attention_mask` int64 `[B, T]`, `action_mask` float32
    `[B, T]`, and `weight` float32 `[B]`.

    If the items have sampled log-probabilities, also `actor_logps` float32 `[B, T]`, 0 outside the
    action tokens, and their sums `old_logp_action` `[B]`. Raises DataError if only some items have
    them, or if an item does not have exactly one per action token. With `action_fractions` the mask
    has them in place of ones, and sums are weighted by them. Items with images give `images`.
    """
    if not items:
        raise DataError("cannot collate an empty list of items")
    images = SampleImages.of_items(items) if any(item.images for item in items) else None
    table = table_of_items(items if images is None else images.key(items))
    tensors = collate_rows(table, images, np.arange(len(items)), device, pad_token_id=pad_token_id)
    return tensors | collate_candidates(items, tensors) | collate_routes(items, tensors)


def collate_rows(
    table: _core.SampleTable,
    images: SampleImages | None,
    rows: Rows,
    device: Any,
    *,
    pad_token_id: int | None,
    routed: Any = None,
) -> dict[str, Any]:
    """The tensors of the samples at `rows`, padded, or with None as `pad_token_id` concatenated.
    `routed`: the ids of keys (`key_routes`)."""
    columns = table.collate_padding_free(rows) if pad_token_id is None else table.collate(rows, pad_token_id)
    if routed is not None:
        restore_ids(columns, routed)
    if images is None:
        return count_in_part(to_tensors(columns, device))
    images.restore(columns)
    last = find_line_bounds(table.chains[rows])[1:] - 1  # of each line: it has the images of the others
    return {
        **count_in_part(to_tensors(columns, device)),
        IMAGES: RowImages(images.placeholder_id, images.select(rows[last]).spans),
    }


_SEQUENCES = ("input_ids", "attention_mask", "action_mask")


def truncate_item(item: SAWItem, max_seq_len: int) -> SAWItem:
    """Cut the item on the right to `max_seq_len` tokens, or before the image that would be divided,
    and record the cut in its metadata. Returns the same object if it is short enough. Raises
    DataError if its first image leaves nothing.

    Example, `max_seq_len=3`: ids [5, 6, 7, 8] with action mask [0, 1, 1, 1] become [5, 6, 7] and
    [0, 1, 1]; of the three log-probabilities, two are kept, for the remaining action tokens.
    """
    ids, attention, mask = (stored(item, name) for name in _SEQUENCES)
    total = len(ids)
    _check_mask_length("attention_mask", attention, total)
    _check_mask_length("action_mask", mask, total)
    if total <= max_seq_len:
        return item
    kept = next((start for _, start, length in item.images if start < max_seq_len < start + length), max_seq_len)
    if kept == 0:
        raise DataError(f"the first image has {item.images[0].length} tokens, max_seq_len is {max_seq_len}; raise it")
    mask = mask[:kept]
    # Not `sum(mask)`: of 300 ones in a uint8 array that is 300 - 256 = 44.
    num_actions = sum(mask) if isinstance(mask, bytes) else int(np.count_nonzero(mask))
    logps, reference, fractions = item.actor_logps, item.attachments.reference_logps, item.attachments.action_fractions
    columns, candidates = item.attachments.token_columns, item.attachments.candidates
    return replace(
        item,
        input_ids=ids[:kept],
        attention_mask=attention[:kept],
        action_mask=mask,
        meta=_truncated_meta(item.meta, total, kept, num_actions),
        attachments=SampleAttachments(
            None if logps is None else ActorTokenLogps(stored(logps, "token_logps")[:num_actions]),
            None if reference is None else reference[:num_actions],
            None if fractions is None else fractions[:num_actions],
            {name: values[:num_actions] for name, values in columns.items()} if columns else columns,
            None if candidates is None else candidates[:num_actions],
            None if item.attachments.routes is None else item.attachments.routes.cut(kept),
        ),
        images=tuple(span for span in item.images if span.start < kept),
    )


_truncate_item = truncate_item  # its documented name


def truncate_and_flag(item: SAWItem, max_seq_len: int) -> SAWItem:
    """`truncate_item`, and set `seq_len_truncated` in the metadata, to False if the item was not
    cut. Does not change `item`."""
    truncated = truncate_item(item, max_seq_len)
    if "seq_len_truncated" in truncated.meta:
        return truncated
    meta = {**truncated.meta, "seq_len_truncated": False}
    if type(truncated) is not SAWItem:
        return replace(truncated, meta=meta)
    # `replace` in a fifth of its time
    ids, attention, mask = (stored(truncated, name) for name in _SEQUENCES)
    return SAWItem(ids, attention, mask, truncated.weight, meta, truncated.attachments, truncated.images)


def _check_mask_length(name: str, mask: Sequence[int], total: int) -> None:
    if len(mask) != total:
        raise DataError(f"{name} has {len(mask)} entries, input_ids has {total}; they must have the same length")


def _truncated_meta(meta: Mapping[str, Any], total: int, retained: int, num_actions: int) -> dict[str, Any]:
    truncated = {
        **meta,
        "seq_len_truncated": True,
        "seq_len_original": total,
        "seq_len_retained": retained,
        "seq_len_retained_frac": retained / total,
        "truncated": True,
    }
    if truncated.get("truncation_reason") is None:
        truncated["truncation_reason"] = "max_seq_len"
    if "completion_length" in truncated:
        truncated["completion_length"] = num_actions
    if "prompt_length" in truncated:
        truncated["prompt_length"] = retained - num_actions
    return truncated


def split_items_by_token_budget(items: Sequence[SAWItem], *, micro_token_budget: int, max_seq_len: int) -> list[list[SAWItem]]:
    """Split items greedily into micro-batches: cut to `max_seq_len`, sort by length (stable), and
    start a new micro-batch when `longest * rows` would exceed the budget.

    Example: lengths 4, 1, 2 and a budget of 4 give [[1, 2], [4]], with 2*2 and 4*1 tokens.
    """
    check_limits(micro_token_budget, max_seq_len)
    if not items:
        return []
    truncated = [truncate_item(item, max_seq_len) for item in items]
    plan = _core.plan_greedy(token_lengths(truncated), micro_token_budget)
    return [[truncated[index] for index in indices] for indices in plan.to_lists()]


def collate_micro_batches(
    items: Sequence[SAWItem],
    *,
    pad_token_id: int,
    device: torch.device | str,
    micro_token_budget: int,
    max_seq_len: int,
) -> list[MicroBatch]:
    """Split items as `split_items_by_token_budget` does, and collate each micro-batch. Reads the
    items only once."""
    check_limits(micro_token_budget, max_seq_len)
    if not items:
        return []
    table, kept, images, routed = read_table(items, max_seq_len)
    plan = _core.plan_greedy(table.lengths, micro_token_budget)
    micro_batches = []
    for rows in (plan[k] for k in range(len(plan))):
        tensors = collate_rows(table, images, rows, device, pad_token_id=pad_token_id, routed=routed)
        own = [kept[row] for row in rows]
        tensors |= collate_candidates(own, tensors) | collate_routes(own, tensors)
        micro_batches.append(MicroBatch(tensors, len(rows)))
    return micro_batches


def check_limits(micro_token_budget: int, max_seq_len: int) -> None:
    """Raise ConfigError unless both are positive, and BudgetError unless a sample of `max_seq_len`
    tokens fits into the budget."""
    for name, value in (("micro_token_budget", micro_token_budget), ("max_seq_len", max_seq_len)):
        check_value(name, value, above=0)
    check_budget(micro_token_budget, max_seq_len)


def read_table(
    items: Sequence[SAWItem], max_seq_len: int, *, merge_turns: bool = False
) -> tuple[_core.SampleTable, list[SAWItem], SampleImages | None, Any]:
    """The items, cut to `max_seq_len` tokens: as a table, as items (`truncate_and_flag`), and their
    images and the ids of `key_routes`, None without any. With images the items are cut first, since
    no image is divided, and the table has keyed ids. `merge_turns`: items that continue the one
    before them are chained."""
    if any(item.images for item in items):
        kept = [truncate_and_flag(item, max_seq_len) for item in items]
        images = SampleImages.of_items(kept)
        keyed, routed = key_routes(images.key(kept))
        table = table_of_items(keyed)
        return table.chained() if merge_turns else table, kept, images, routed
    keyed, routed = key_routes(items)
    table = table_of_items(keyed)
    table = (table.chained() if merge_turns else table).truncate(max_seq_len)
    return table, [truncate_and_flag(item, max_seq_len) for item in items], None, routed


def plan_lines(lengths: NDArray[np.int32], cfg: TrainerConfig, packing: PackingName | None = None) -> _core.Plan:
    """Plan micro-batches for lines of these lengths with the algorithm `packing`. None means
    `cfg`'s."""
    packing = packing or cfg.packing
    if packing == "padding_free":
        return _core.plan_padding_free(lengths, cfg.micro_token_budget)
    if packing == "greedy":
        return _core.plan_greedy(lengths, cfg.micro_token_budget)
    return _core.plan_optimal(lengths, cfg.micro_token_budget, cfg.overhead_tokens)


def find_line_bounds(chains: NDArray[np.int32]) -> Rows:
    """[L + 1] bounds of the lines: consecutive samples with the same chain number form a line; a
    sample without a chain (-1) is a line by itself. Example: chains [4, 4, -1, -1] give
    [0, 2, 3, 4]."""
    begins = np.flatnonzero((chains[1:] != chains[:-1]) | (chains[1:] < 0)) + 1
    return np.concatenate([[0], begins, [len(chains)]]) if len(chains) else np.zeros(1, dtype=np.int64)


@dataclass(frozen=True)
class Packing:
    """A plan: the lines of each micro-batch."""

    micro_batches: Sequence[Rows]
    num_tokens: int
    """Real tokens."""
    padded_tokens: int
    """Computed tokens."""

    def __len__(self) -> int:
        return len(self.micro_batches)

    def __getitem__(self, index: int, /) -> Rows:
        return self.micro_batches[index]
