"""The documented functions, compared with the documented algorithm in plain Python."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from training_samples import sorting_items

from ludic.errors import DataError
from ludic.training import (
    ActorTokenLogps,
    MicroBatch,
    SampleAttachments,
    SAWItem,
    TrainerConfig,
    collate_micro_batches,
    collate_saw_items,
    split_items_by_token_budget,
)
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch
from ludic.training.batching.packing import _truncate_item


def item_of(length, *, actions=1, meta=None, logps=None):
    mask = [0] * (length - actions) + [1] * actions
    attachments = SampleAttachments(None if logps is None else ActorTokenLogps(logps))
    return SAWItem(list(range(10, 10 + length)), [1] * length, mask, 0.5, dict(meta or {}), attachments)


def documented_split(lengths, budget):
    """Stable sort by length, ascending. A new micro-batch starts when longest * rows would exceed
    the budget."""
    batches, current = [], []
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if current and lengths[index] * (len(current) + 1) > budget:
            batches.append(current)
            current = []
        current.append(index)
    return [*batches, current] if current else batches


def test_the_split_of_the_guides_example():
    items = [item_of(length) for length in (100, 150, 200, 300, 400)]
    split = split_items_by_token_budget(items, micro_token_budget=1024, max_seq_len=1024)
    assert [[len(item.input_ids) for item in batch] for batch in split] == [[100, 150, 200], [300, 400]]


@given(lengths=st.lists(st.integers(1, 30), max_size=40), budget=st.integers(30, 200), limit=st.integers(1, 30))
def test_the_split_is_the_documented_algorithm(lengths, budget, limit):
    items = [item_of(length, meta={"index": index}) for index, length in enumerate(lengths)]
    split = split_items_by_token_budget(items, micro_token_budget=budget, max_seq_len=limit)
    expected = documented_split([min(length, limit) for length in lengths], budget)
    assert [[item.meta["index"] for item in batch] for batch in split] == expected
    assert all(len(item.input_ids) == min(lengths[item.meta["index"]], limit) for batch in split for item in batch)


def test_an_empty_batch_splits_into_no_micro_batches():
    assert split_items_by_token_budget([], micro_token_budget=8, max_seq_len=8) == []
    assert collate_micro_batches([], pad_token_id=0, device="cpu", micro_token_budget=8, max_seq_len=8) == []


@pytest.mark.parametrize(("budget", "limit"), [(0, 1), (8, 0), (7, 8)])
def test_impossible_limits_are_refused(budget, limit):
    with pytest.raises(ValueError, match=r"micro_token_budget|max_seq_len"):
        split_items_by_token_budget([], micro_token_budget=budget, max_seq_len=limit)


def test_a_truncated_item_is_marked_in_its_meta():
    meta = {"completion_length": 4, "prompt_length": 6, "truncation_reason": None, "kept": "yes"}
    item = item_of(10, actions=4, meta=meta, logps=[-0.1, -0.2, -0.3, -0.4])
    before = copy.deepcopy(item)
    cut = _truncate_item(item, 8)
    assert cut.input_ids == list(range(10, 18))
    assert cut.attention_mask == [1] * 8
    assert cut.action_mask == [0] * 6 + [1, 1]
    assert cut.actor_logps.token_logps == [-0.1, -0.2]
    assert cut.meta == {
        "completion_length": 2,
        "prompt_length": 6,
        "truncation_reason": "max_seq_len",
        "kept": "yes",
        "truncated": True,
        "seq_len_truncated": True,
        "seq_len_original": 10,
        "seq_len_retained": 8,
        "seq_len_retained_frac": 0.8,
    }
    assert item == before


@pytest.mark.parametrize("make", [list, bytes, lambda mask: np.array(mask, np.uint8), lambda mask: np.array(mask, np.int8)])
def test_more_actions_than_a_byte_counts_are_cut_alike(make):
    item = item_of(600, actions=500, meta={"completion_length": 500, "prompt_length": 100}, logps=[-0.5] * 500)
    item.action_mask = make(item.action_mask)
    cut = _truncate_item(item, 450)
    assert (cut.meta["completion_length"], cut.meta["prompt_length"]) == (350, 100)
    assert cut.actor_logps.token_logps == [-0.5] * 350


def test_an_earlier_truncation_reason_is_kept_and_no_length_is_added():
    cut = _truncate_item(item_of(10, meta={"truncation_reason": "max_steps"}), 4)
    assert cut.meta["truncation_reason"] == "max_steps"
    assert "completion_length" not in cut.meta
    assert "prompt_length" not in cut.meta


def test_a_short_item_is_returned_unchanged():
    item = item_of(4)
    assert _truncate_item(item, 4) is item
    assert "seq_len_truncated" not in item.meta


def test_masks_of_another_length_are_refused():
    item = item_of(4)
    item.action_mask = [0, 1]
    with pytest.raises(DataError, match="action_mask has 2 entries, input_ids has 4"):
        _truncate_item(item, 2)
    with pytest.raises(ValueError):
        collate_saw_items([item], pad_token_id=0, device="cpu")


def test_arrays_are_truncated_like_lists():
    item = item_of(6, actions=3, logps=[-0.1, -0.2, -0.3])
    arrays = SAWItem(
        np.array(item.input_ids), np.array(item.attention_mask), np.array(item.action_mask), 0.5, {}, item.attachments
    )
    cut = _truncate_item(arrays, 4)
    assert cut.input_ids.tolist() == [10, 11, 12, 13]
    assert cut.meta["seq_len_original"] == 6
    assert cut.actor_logps.token_logps == [-0.1]


def test_collation_by_hand():
    first = item_of(3, actions=2, logps=[-0.5, -0.25])
    second = SAWItem([7, 8], [1, 1], [0, 1], -1.0, {}, SampleAttachments(ActorTokenLogps([-1.0])))
    batch = collate_saw_items([first, second], pad_token_id=99, device="cpu")
    expected = {
        "input_ids": torch.tensor([[10, 11, 12], [7, 8, 99]]),
        "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
        "action_mask": torch.tensor([[0.0, 1, 1], [0, 1, 0]]),
        "weight": torch.tensor([0.5, -1.0]),
        "actor_logps": torch.tensor([[0.0, -0.5, -0.25], [0, -1.0, 0]]),
        "old_logp_action": torch.tensor([-0.75, -1.0]),
    }
    assert batch.keys() == expected.keys()
    for name, tensor in expected.items():
        assert batch[name].dtype == tensor.dtype, name
        assert torch.equal(batch[name], tensor), name


def test_without_log_probs_the_batch_has_no_keys_for_them():
    batch = collate_saw_items([item_of(3)], pad_token_id=0, device="cpu")
    assert set(batch) == {"input_ids", "attention_mask", "action_mask", "weight"}


def test_collation_refuses_invalid_samples():
    with pytest.raises(ValueError, match="empty"):
        collate_saw_items([], pad_token_id=0, device="cpu")
    with pytest.raises(ValueError, match="Mixed presence"):
        collate_saw_items([item_of(3, logps=[-1.0]), item_of(3)], pad_token_id=0, device="cpu")
    with pytest.raises(ValueError, match="Length mismatch"):
        collate_saw_items([item_of(3, actions=2, logps=[-1.0])], pad_token_id=0, device="cpu")


def test_collated_micro_batches_equal_the_collated_split_items():
    items = sorting_items(20, seed=2)
    limits = {"micro_token_budget": 64, "max_seq_len": 10}
    collated = collate_micro_batches(items, pad_token_id=0, device="cpu", **limits)
    split = split_items_by_token_budget(items, **limits)
    assert [micro_batch.num_items for micro_batch in collated] == [len(part) for part in split]
    for micro_batch, part in zip(collated, split, strict=True):
        expected = collate_saw_items(part, pad_token_id=0, device="cpu")
        for name, tensor in expected.items():
            assert torch.equal(micro_batch.tensors[name], tensor), name


def test_each_micro_batch_has_its_own_buffers():
    items = sorting_items(3)
    first = collate_saw_items(items, pad_token_id=0, device="cpu")
    copy_of_ids = first["input_ids"].clone()
    collate_saw_items(sorting_items(3, seed=9), pad_token_id=5, device="cpu")
    assert torch.equal(first["input_ids"], copy_of_ids)


def test_a_row_of_a_packed_micro_batch_equals_its_sample():
    from ludic import _core
    from ludic.training.batching.packing import to_tensors

    items = sorting_items(4)
    table = _core.SampleTable.from_items(items)
    packed = MicroBatch(to_tensors(table.collate_padding_free([0, 1, 2, 3]), "cpu"), 4, ("a", "b", "c", "d"))
    row = packed.row(2)
    assert row.tensors["input_ids"].tolist() == [items[2].input_ids]
    assert row.tensors["cu_seqlens"].tolist() == [0, len(items[2].input_ids)]
    assert packed.tensors["max_seqlen"] == max(len(item.input_ids) for item in items)
    assert row.tensors["max_seqlen"] == len(items[2].input_ids)
    assert row.tensors["weight"].tolist() == [items[2].weight]
    assert row.sample_names == ("c",)


def test_the_costliest_micro_batch_of_a_mini_batch_comes_first():
    # Lengths 4, 4, 6, 6, 12 in a budget of 12, no overhead: padded tokens 12 (one row of 12), 12
    # (two of 6), 8 (two of 4).
    lengths = (4, 6, 12, 4, 6)
    items = [SAWItem([1] * n, [1] * n, [0] + [1] * (n - 1), 1.0) for n in lengths]
    for packing, order in (("optimal", [[12], [6, 6], [4, 4]]), ("padding_free", [[12], [6, 6], [4, 4]])):
        cfg = TrainerConfig(model_device="cpu", max_seq_len=12, micro_token_budget=12, overhead_tokens=0, packing=packing)
        mini_batch = MiniBatch(MacroBatch.ingest(items, 12), np.arange(5), cfg)
        assert [[lengths[row] for row in mini_batch.micro_batch_rows(index)] for index in range(len(mini_batch))] == order


@given(st.lists(st.integers(2, 30), min_size=1, max_size=25), st.sampled_from(["greedy", "optimal", "padding_free"]))
def test_micro_batches_are_in_order_of_cost_and_have_every_sample_once(lengths, packing):
    items = [SAWItem([1] * n, [1] * n, [0] + [1] * (n - 1), 1.0) for n in lengths]
    cfg = TrainerConfig(model_device="cpu", max_seq_len=30, micro_token_budget=45, packing=packing)
    mini_batch = MiniBatch(MacroBatch.ingest(items, 30), np.arange(len(items)), cfg)
    costs = [micro_batch.tensors["input_ids"].numel() for micro_batch in mini_batch]
    assert costs == sorted(costs, reverse=True)
    rows = [int(row) for index in range(len(mini_batch)) for row in mini_batch.micro_batch_rows(index)]
    assert sorted(rows) == list(range(len(items)))
    assert mini_batch.plan.padded_tokens == sum(costs)
