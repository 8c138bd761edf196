"""Which samples go into a mini-batch and its micro-batches: the examples of the docstrings."""

import numpy as np

from ludic.training import SAWItem, TrainerConfig
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch, find_line_bounds, rows_by_key, unit_key


def item(ids, actions, **meta):
    return SAWItem(ids, [1] * len(ids), [0] * (len(ids) - actions) + [1] * actions, 1.0, meta)


def test_rows_are_grouped_by_key_in_order_of_first_appearance():
    assert rows_by_key(["a", "b", "a"]) == [[0, 2], [1]]


def test_a_sample_belongs_to_its_group_then_its_pair_then_its_rollout():
    group = {"request_meta": {"group_id": "g"}, "pair_id": "p", "rollout_id": "r"}
    assert unit_key(item([1, 2], 1, **group), 7) == ("group", "g")
    assert unit_key(item([1, 2], 1, pair_id="p", rollout_id="r"), 7) == ("pair_id", "p")
    assert unit_key(item([1, 2], 1, rollout_id="r"), 7) == ("rollout_id", "r")
    assert unit_key(item([1, 2], 1), 7) == ("row", 7)


def test_a_line_is_a_chain_of_turns_or_a_single_sample():
    assert find_line_bounds(np.array([4, 4, -1, -1], dtype=np.int32)).tolist() == [0, 2, 3, 4]
    assert find_line_bounds(np.array([], dtype=np.int32)).tolist() == [0]


def test_a_micro_batch_has_the_samples_of_its_lines():
    # The budget of 5 holds one line: first the chain of 5 tokens, which costs more, then the sample
    # of 2.
    episode = [item([1, 2, 3], 1, rollout_id="r"), item([1, 2, 3, 4, 5], 1, rollout_id="r")]
    batch = MacroBatch.ingest([item([9, 8], 1), *episode], 5, merge_turns=True)
    cfg = TrainerConfig(model_device="cpu", max_seq_len=5, micro_token_budget=5, packing="padding_free")
    mini_batch = MiniBatch(batch, np.arange(3), cfg)
    assert mini_batch.line_bounds.tolist() == [0, 1, 3]
    assert mini_batch.lengths.tolist() == [2, 5]
    assert [mini_batch.micro_batch_rows(index).tolist() for index in range(len(mini_batch))] == [[1, 2], [0]]
    assert mini_batch.micro_batch_rows(2).tolist() == []


def test_a_micro_batch_of_several_lines_has_their_samples_in_line_order():
    episode = [item([1, 2, 3], 1, rollout_id="r"), item([1, 2, 3, 4], 1, rollout_id="r")]
    batch = MacroBatch.ingest([*episode, item([9, 8], 1)], 8, merge_turns=True)
    cfg = TrainerConfig(model_device="cpu", max_seq_len=8, micro_token_budget=8, packing="greedy")
    mini_batch = MiniBatch(batch, np.array([0, 1, 2]), cfg)
    assert mini_batch.plan[0].tolist() == [1, 0]  # by length: line 1 is the sample of 2 tokens
    assert mini_batch.micro_batch_rows(0).tolist() == [2, 0, 1]


def test_groups_are_never_split_between_mini_batches():
    items = [item([1, 2], 1, rollout_id=name) for name in "aabc"]
    batch = MacroBatch.ingest(items, 4)
    for step in range(20):
        parts = [part.tolist() for part in batch.divide(2, seed=0, step=step, epoch=0)]
        assert sorted(parts[0] + parts[1]) == [0, 1, 2, 3]
        assert all({0, 1} <= set(part) or not {0, 1} & set(part) for part in parts)
    assert [part.tolist() for part in batch.divide(1, seed=0, step=0, epoch=0)] == [[0, 1, 2, 3]]
