"""Preference pairs are grouped, split by the token budget and collated. A pair is never split."""

import logging
import random
import re

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from preference_samples import TOKENIZER, pair, response, rm_config, sorted_pairs

from ludic.errors import BudgetError, ConfigError, DataError, DataKeyError
from ludic.training.batching import (
    collate_preference_items,
    compute_pair_loss_scale,
    count_pairs_in_items,
    group_preference_pairs,
    preference_batches,
    split_preference_pairs_by_token_budget,
    validate_preference_batch,
)
from ludic.training.batching.pair_batches import PreferenceMacroBatch, PreferenceMiniBatch
from ludic.training.types import SAWItem


def sample(pair_id, role, length, **meta):
    ids = list(range(1, length + 1))
    return SAWItem(ids, [1] * length, [0] + [1] * (length - 1), 1.0, {"pair_id": pair_id, "role": role, "label": 1.0, **meta})


def pairs_of_lengths(*lengths):
    return [
        (sample(index, "chosen", chosen), sample(index, "rejected", rejected)) for index, (chosen, rejected) in enumerate(lengths)
    ]


def ids_of(micro_batches):
    return [[(item.meta["pair_id"], item.meta["role"]) for item in items] for items in micro_batches]


# --- grouping


def test_pairs_are_grouped_by_id_in_order_of_first_appearance():
    a, b, c, d = sample("x", "rejected", 2), sample("y", "chosen", 2), sample("x", "chosen", 2), sample("y", "rejected", 2)
    assert group_preference_pairs([a, b, c, d]) == [(c, a), (b, d)]


def test_incomplete_pairs_are_dropped_with_a_warning_or_refused(caplog):
    whole, lone = pair("x", "12>", "12", "21"), response("y", "chosen", "3>", "3")
    with caplog.at_level(logging.WARNING):
        assert group_preference_pairs([lone, *whole]) == [tuple(whole)]
    assert "dropped 1 incomplete preference pairs: y" in caplog.text
    with pytest.raises(ValueError, match='Incomplete preference pair "y"'):
        group_preference_pairs([lone, *whole], drop_incomplete=False)


@pytest.mark.parametrize("drop_incomplete", [True, False])
def test_incomplete_pairs_are_kept_when_completeness_is_not_required(drop_incomplete):
    """The reference implementation dropped them anyway."""
    whole = pair("x", "12>", "12", "21")
    lone = [response("y", "rejected", "3>", "3"), response("z", "chosen", "4>", "4")]
    grouped = group_preference_pairs([*lone, *whole], require_complete=False, drop_incomplete=drop_incomplete)
    assert grouped == [tuple(whole), (None, lone[0]), (lone[1], None)]
    assert ids_of(split_preference_pairs_by_token_budget(grouped, micro_token_budget=20, max_seq_len=10)) == [
        [("x", "chosen"), ("x", "rejected")],
        [("y", "rejected"), ("z", "chosen")],
    ]


@pytest.mark.parametrize("key", ["pair_id", "role"])
def test_a_sample_without_id_or_role_is_named(key):
    items = pair("x", "12>", "12", "21")
    del items[1].meta[key]
    for function in (group_preference_pairs, validate_preference_batch, count_pairs_in_items):
        with pytest.raises(KeyError, match=f"sample 1 has no '{key}' .*meta"):
            function(items)


def test_a_pair_has_one_chosen_and_one_rejected_sample():
    with pytest.raises(ValueError, match='sample 1 \\("better"\\)'):
        group_preference_pairs([sample(0, "chosen", 2), sample(0, "better", 2)])
    with pytest.raises(ValueError, match="two chosen samples"):
        group_preference_pairs([sample(0, "chosen", 2), sample(0, "chosen", 2)])


def test_batches_are_validated_by_keys_labels_and_roles():
    items = sorted_pairs(3)
    assert validate_preference_batch(items) is None
    assert validate_preference_batch(items[:1], required_keys=("pair_id",)) is None
    with pytest.raises(DataKeyError, match="'source'"):
        validate_preference_batch(items, required_keys=("pair_id", "source"))
    items[3].meta["label"] = 0.25
    with pytest.raises(DataError, match=r"pair 'p1' has the labels .* and 0.25"):
        validate_preference_batch(items)
    for wrong in (1.5, float("nan"), "1", None):
        items[3].meta["label"] = wrong
        with pytest.raises(DataError, match=r"label of sample 3 .*at least 0 and at most 1"):
            validate_preference_batch(items)


def test_each_pair_is_counted_once():
    items = sorted_pairs(3)
    assert count_pairs_in_items(items) == 3
    assert count_pairs_in_items(items[:5]) == 2
    assert count_pairs_in_items([]) == 0


def test_the_loss_scale_of_a_micro_batch_is_its_fraction_of_the_pairs():
    assert compute_pair_loss_scale(3, 12) == 0.25
    assert compute_pair_loss_scale(0, 0) == 0.0
    assert compute_pair_loss_scale(3, -1) == 0.0


# --- splitting


def test_the_split_of_the_documented_example():
    # Pair lengths 5, 3, 6. Ascending 3, 5, 6: 2 * 5 * 2 = 20 <= 20, 2 * 6 * 3 = 36 > 20.
    micros = split_preference_pairs_by_token_budget(
        pairs_of_lengths((5, 4), (3, 2), (6, 6)), micro_token_budget=20, max_seq_len=10
    )
    assert ids_of(micros) == [[(1, "chosen"), (1, "rejected"), (0, "chosen"), (0, "rejected")], [(2, "chosen"), (2, "rejected")]]


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), max_size=12), st.integers(60, 200))
def test_no_pair_is_split_and_micro_batches_stay_within_the_budget(lengths, budget):
    pairs = pairs_of_lengths(*lengths)
    micros = split_preference_pairs_by_token_budget(pairs, micro_token_budget=budget, max_seq_len=30)
    pairs_in_batches = [(items[k], items[k + 1]) for items in micros for k in range(0, len(items), 2)]
    assert sorted(chosen.meta["pair_id"] for chosen, _ in pairs_in_batches) == list(range(len(pairs)))
    assert all((chosen.meta["role"], rejected.meta["role"]) == ("chosen", "rejected") for chosen, rejected in pairs_in_batches)
    assert all(chosen.meta["pair_id"] == rejected.meta["pair_id"] for chosen, rejected in pairs_in_batches)
    assert all(max(len(item.input_ids) for item in items) * len(items) <= budget for items in micros)


def test_a_pair_that_exceeds_the_budget_and_wrong_limits_are_refused():
    pairs = pairs_of_lengths((6, 5))
    with pytest.raises(BudgetError, match=r"micro_token_budget \(11\) .*longest pair \(6\)"):
        split_preference_pairs_by_token_budget(pairs, micro_token_budget=11, max_seq_len=10)
    for budget, length in ((0, 10), (10, 0), (10, 11)):
        with pytest.raises(ConfigError, match=r"micro_token_budget|max_seq_len"):
            split_preference_pairs_by_token_budget(pairs, micro_token_budget=budget, max_seq_len=length)


def test_long_samples_are_truncated_and_pairs_that_become_equal_are_dropped(caplog):
    pairs = pairs_of_lengths((9, 8), (9, 3))
    with caplog.at_level(logging.WARNING):
        micros = split_preference_pairs_by_token_budget(pairs, micro_token_budget=20, max_seq_len=8)
    assert ids_of(micros) == [[(1, "chosen"), (1, "rejected")]]
    assert micros[0][0].meta["seq_len_truncated"]
    assert len(micros[0][0].input_ids) == 8
    assert re.search(r"dropped 1 .*equal within max_seq_len \(8\)", caplog.text)


def test_no_pairs_split_into_no_micro_batches():
    assert split_preference_pairs_by_token_budget([], micro_token_budget=8, max_seq_len=8) == []


# --- collation


def test_collation_adds_the_metadata_in_the_order_of_the_items():
    items = sorted_pairs(2)[::-1]
    batch = collate_preference_items(items, pad_token_id=0, device="cpu")
    assert batch["meta"] == {
        "pair_id": ["p1", "p1", "p0", "p0"],
        "role": ["rejected", "chosen"] * 2,
        "label": [item.meta["label"] for item in items],
    }
    for row, item in enumerate(items):
        assert batch["input_ids"][row, : len(item.input_ids)].tolist() == item.input_ids
    assert batch["attention_mask"].sum() == sum(len(item.input_ids) for item in items)
    only = collate_preference_items(items, pad_token_id=0, device="cpu", meta_keys=("role",))
    assert only["meta"] == {"role": ["rejected", "chosen"] * 2}
    with pytest.raises(KeyError, match="'source'"):
        collate_preference_items(items, pad_token_id=0, device="cpu", meta_keys=("source",))


# --- what the trainer runs


def test_pairs_without_information_are_dropped_and_counted_by_reason(caplog):
    items = [
        *pair("kept", "12>", "12", "21"),
        *pair("identical", "12>", "12", "12"),
        *pair("cut equal", "12>", "1234567", "1234568"),
        response("cut empty", "chosen", "123456789>", "1"),
        response("cut empty", "rejected", "12>", "2"),
        response("lone", "chosen", "12>", "1"),
    ]
    with caplog.at_level(logging.WARNING):
        macro = PreferenceMacroBatch.ingest_pairs(items, max_seq_len=8)
    assert macro.counts() == {
        "total_pairs": 2.0,
        "pairs_incomplete": 1.0,
        "pairs_truncated_empty": 1.0,
        "pairs_truncated_equal": 1.0,
        "pairs_identical": 1.0,
    }
    assert [item.meta["pair_id"] for item in macro.items] == ["kept", "kept", "identical", "identical"]
    assert "of 1: cut equal, cut empty" in caplog.text
    assert "incomplete preference pairs: lone" in caplog.text


def test_without_required_completeness_the_half_that_truncation_leaves_is_kept():
    items = [
        *pair("kept", "12>", "12", "21"),
        response("cut empty", "chosen", "123456789>", "1"),
        response("cut empty", "rejected", "12>", "2"),
        response("lone", "chosen", "12>", "1"),
    ]
    macro = PreferenceMacroBatch.ingest_pairs(items, max_seq_len=8, require_complete=False)
    assert [(item.meta["pair_id"], item.meta["role"]) for item in macro.items] == [
        ("kept", "chosen"),
        ("kept", "rejected"),
        ("lone", "chosen"),
        ("cut empty", "rejected"),
    ]
    cfg = rm_config(max_seq_len=8, micro_token_budget=16)
    mini_batch = PreferenceMiniBatch(macro, np.arange(4), cfg)
    assert mini_batch.totals.num_pairs == 1
    micro_batches = [tuple(zip(m.tensors["meta"]["pair_id"], m.tensors["meta"]["role"], strict=True)) for m in mini_batch]
    assert micro_batches[0] == (("kept", "chosen"), ("kept", "rejected"))
    assert sorted(micro_batches[1:]) == [(("lone", "chosen"), ("cut empty", "rejected"))]
    assert mini_batch.padding()["perf/padded_tokens"] == 2 * 6 + 2 * 5
    assert [[name for part in m.parts() for name in part.sample_names[:1]] for m in mini_batch] == [
        ["pair kept"],
        ["pair lone", "pair cut empty"],
    ]


def test_samples_without_an_action_are_scored_unchanged():
    """A reward model does not read the action mask, so only truncation can remove a response."""
    items = pair("x", "12>", "12", "21")
    for item in items:
        item.action_mask = [0] * len(item.input_ids)
    assert PreferenceMacroBatch.ingest_pairs(items, max_seq_len=8).num_pairs == 1


@given(st.integers(1, 9), st.integers(1, 5), st.randoms(use_true_random=False))
def test_mini_batches_never_split_a_pair(count, parts, draw):
    items = sorted_pairs(count, seed=1)
    draw.shuffle(items)
    macro = PreferenceMacroBatch.ingest_pairs(items, max_seq_len=32)
    divided = macro.divide(parts, seed=3, step=1, epoch=0)
    assert sorted(row for rows in divided for row in rows) == list(range(2 * count))
    cfg = rm_config()
    for rows in divided:
        assert rows[::2].tolist() == [row - 1 for row in rows[1::2]]
        mini_batch = PreferenceMiniBatch(macro, rows, cfg)
        assert mini_batch.totals.num_pairs == len(rows) / 2
        for micro_batch in mini_batch:
            meta = micro_batch.tensors["meta"]
            assert meta["pair_id"][::2] == meta["pair_id"][1::2]


def test_pairs_of_one_group_stay_in_one_mini_batch():
    both = [(k, role) for k in range(6) for role in ("chosen", "rejected")]
    items = [response(f"p{k}", role, "12>", f"{k}{role}", request_meta={"group_id": k // 3}) for k, role in both]
    macro = PreferenceMacroBatch.ingest_pairs(items, max_seq_len=32)
    for rows in macro.divide(2, seed=0, step=0, epoch=0):
        assert len({macro.items[row].meta["request_meta"]["group_id"] for row in rows}) == 1


def test_a_pair_whose_samples_have_different_groups_is_not_split():
    """Each group has one sample of every pair. A pair belongs to the group of its chosen sample."""
    both = [(k, role) for k in range(6) for role in ("chosen", "rejected")]
    items = [response(f"p{k}", role, "12>", f"{k}{role}", request_meta={"group_id": role}) for k, role in both]
    macro = PreferenceMacroBatch.ingest_pairs(items, max_seq_len=32)
    assert [len(rows) for rows in macro.divide(2, seed=0, step=0, epoch=0)] == [12, 0]


def test_the_segments_of_a_micro_batch_are_its_pairs():
    macro = PreferenceMacroBatch.ingest_pairs(sorted_pairs(3), max_seq_len=32)
    [micro_batch] = PreferenceMiniBatch(macro, np.arange(6), rm_config(micro_token_budget=1000))
    parts = list(micro_batch.parts())
    assert [part.sample_names for part in parts] == [
        (f"pair {name}",) * 2 for name in micro_batch.tensors["meta"]["pair_id"][::2]
    ]
    assert all(part.tensors["meta"]["role"] == ["chosen", "rejected"] for part in parts)
    joined = torch.cat([part.tensors["input_ids"] for part in parts])
    assert torch.equal(joined, micro_batch.tensors["input_ids"])
    alone = micro_batch.row(1)
    assert alone.num_items == 1
    assert alone.tensors["meta"]["role"] == ["rejected"]


# --- batches of pairs


@given(st.integers(1, 9), st.integers(1, 4), st.booleans())
def test_a_source_returns_whole_pairs_and_every_pair_once_per_pass(count, batch_size, shuffle):
    items = sorted_pairs(count)
    random.Random(0).shuffle(items)
    source = preference_batches(items, batch_size=batch_size, shuffle=shuffle, seed=5)
    assert len(source) == count
    given_ids = []
    for batch in source.iter_epoch():
        assert len(batch.items) <= 2 * batch_size
        assert [item.meta["role"] for item in batch.items] == ["chosen", "rejected"] * (len(batch.items) // 2)
        given_ids += [item.meta["pair_id"] for item in batch.items[::2]]
        assert given_ids[-1] == batch.items[-1].meta["pair_id"]
    assert sorted(given_ids) == sorted({item.meta["pair_id"] for item in items})


INCOMPLETE = [*sorted_pairs(3), response("lone", "rejected", "12>", "1")]


def test_a_source_counts_and_drops_incomplete_pairs_or_refuses_them(caplog):
    source = preference_batches(INCOMPLETE, batch_size=2)
    assert (len(source), source.pairs_incomplete) == (3, 1)
    assert "dropped 1 incomplete preference pairs: lone" in caplog.text
    assert preference_batches(INCOMPLETE[:6], batch_size=2).pairs_incomplete == 0
    with pytest.raises(DataError, match='Incomplete preference pair "lone"'):
        preference_batches(INCOMPLETE, batch_size=2, drop_incomplete=False)


@pytest.mark.parametrize("drop_incomplete", [True, False])
def test_a_source_keeps_single_samples_when_completeness_is_not_required(drop_incomplete):
    settings = {"require_complete": False, "drop_incomplete": drop_incomplete}
    source = preference_batches(INCOMPLETE, batch_size=1, shuffle=True, **settings)
    assert (len(source), source.pairs_incomplete) == (4, 0)
    batches = [[item.meta["pair_id"] for item in batch.items] for batch in source.iter_epoch()]
    assert sorted(batches) == [["lone"], ["p0", "p0"], ["p1", "p1"], ["p2", "p2"]]


async def test_a_source_resumes_at_its_position():
    source = preference_batches(sorted_pairs(7), batch_size=2)
    for _ in range(5):
        await source.next_batch()
    resumed = preference_batches(sorted_pairs(7), batch_size=2)
    resumed.load_state_dict(source.state_dict())
    for _ in range(4):
        mine, theirs = await source.next_batch(), await resumed.next_batch()
        assert [item.meta["pair_id"] for item in mine.items] == [item.meta["pair_id"] for item in theirs.items]
    with pytest.raises(ConfigError, match="num_samples is 7, here it is 6"):
        preference_batches(sorted_pairs(6), batch_size=2).load_state_dict(source.state_dict())


def test_the_preference_samples_of_these_tests_match_the_real_tokenizer():
    [chosen, _] = pair("x", "21>", "12", "21")
    assert TOKENIZER.decode(chosen.input_ids) == "21>12<eos>"
