"""A mini-batch of a shared batch, divided over ranks: pure functions, for up to 4,096 ranks."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ludic.errors import RankError
from ludic.training import ranks
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch
from ludic.training.batching.pair_batches import PreferenceMacroBatch, PreferenceMiniBatch
from ludic.training.batching.rank_plans import RankShare, all_have_samples
from ludic.training.config import TrainerConfig
from ludic.training.rm_config import RMTrainerConfig
from ludic.training.types import SAWItem

BUDGET, LONGEST = 64, 32
WORLDS = st.sampled_from([1, 2, 3, 4, 7, 8, 64, 513, 4096])
LENGTHS = st.lists(st.integers(2, LONGEST), min_size=1, max_size=24)


def sample(length, weight=1.0, **meta):
    return SAWItem([1] * length, [1] * length, [0] + [1] * (length - 1), weight, meta)


def on_all_ranks(batch, world, cfg, make=MiniBatch, rows=None, **options):
    rows = np.arange(len(batch.items)) if rows is None else rows
    shown = range(world) if world < 16 else [*range(8), world - 1]
    return [make(replace(batch, share=RankShare(rank, world)), rows, cfg, **options) for rank in shown]


def config(packing, **options):
    return TrainerConfig(
        model_device="cpu", max_seq_len=LONGEST, micro_token_budget=BUDGET, packing=packing, overhead_tokens=16, **options
    )


def rows_of_all(mini_batch, world):
    """The rows of every micro-batch of every rank, with or without a test object."""
    if world == 1:
        return [[mini_batch.micro_batch_rows(index).tolist() for index in range(len(mini_batch))]]
    plan = mini_batch.plan
    line_rows = [mini_batch.rows[a:b] for a, b in zip(mini_batch.line_bounds, mini_batch.line_bounds[1:], strict=False)]
    return [
        [[int(row) for line in part[rank, number] for row in line_rows[line]] for part, number in plan._places]
        for rank in range(world)
    ]


@settings(deadline=None)
@given(LENGTHS, WORLDS, st.sampled_from(["optimal", "greedy", "padding_free"]))
def test_each_sample_is_on_one_rank_in_equally_many_steps_within_the_budget(lengths, world, packing):
    batch = MacroBatch.ingest([sample(length) for length in lengths], LONGEST)
    mini_batches = on_all_ranks(batch, world, config(packing))
    everyone = rows_of_all(mini_batches[0], world)
    assert sorted(row for rank in everyone for rows in rank for row in rows) == list(range(len(lengths)))
    assert {len(rank) for rank in everyone} == {len(mini_batch) for mini_batch in mini_batches} == {len(mini_batches[0])}
    assert len({mini_batch.totals for mini_batch in map(_hashable, mini_batches)}) == 1
    for rows in (rows for rank in everyone for rows in rank if rows):
        own = [lengths[row] for row in rows]
        assert (sum(own) if packing == "padding_free" else max(own) * len(own)) <= BUDGET
    for rank, mini_batch in zip(range(min(world, 8)), mini_batches, strict=False):
        assert [mini_batch.micro_batch_rows(index).tolist() for index in range(len(mini_batch))] == everyone[rank]
        for micro_batch, rows in zip(mini_batch, everyone[rank], strict=True):
            assert micro_batch.num_items == len(rows)
            if not rows:  # a row without weight
                assert not micro_batch.tensors["weight"].any()
                assert not micro_batch.tensors["action_mask"].any()
    work, time_of_ranks = mini_batches[0].lockstep()
    assert (work, time_of_ranks) == (0, 0) if world == 1 else 0 < work <= time_of_ranks


def _hashable(mini_batch):
    totals = mini_batch.totals
    mini_batch.totals = (totals.num_samples, totals.num_tokens, totals.weight_mean, totals.weight_std, totals.num_pairs)
    return mini_batch


def test_twelve_equal_samples_on_three_ranks_are_four_each():
    batch = MacroBatch.ingest([sample(16) for _ in range(12)], LONGEST)
    mini_batches = on_all_ranks(batch, 3, config("optimal"))
    assert [[len(rows) for rows in rank] for rank in rows_of_all(mini_batches[0], 3)] == [[4], [4], [4]]
    assert mini_batches[0].lockstep()[0] == mini_batches[0].lockstep()[1]


@settings(deadline=None)
@given(LENGTHS, st.lists(st.integers(2, LONGEST), max_size=5), WORLDS, st.sampled_from(["optimal", "greedy"]), st.data())
def test_a_pair_is_whole_on_one_rank_and_lone_samples_follow(lengths, lone, world, packing, data):
    others = [data.draw(st.integers(2, LONGEST)) for _ in lengths]
    items = [
        sample(length, pair_id=str(number), role=role, label=1.0, answer=role + str(number))
        for number, pair in enumerate(zip(lengths, others, strict=True))
        for role, length in zip(("chosen", "rejected"), pair, strict=True)
    ]
    items += [sample(length, pair_id=f"lone {number}", role="chosen", label=1.0) for number, length in enumerate(lone)]
    cfg = RMTrainerConfig(
        model_device="cpu", max_seq_len=LONGEST, micro_token_budget=BUDGET, packing=packing, rm_require_complete_pairs=False
    )
    batch = PreferenceMacroBatch.ingest_pairs(items, LONGEST, require_complete=False)
    mini_batches = on_all_ranks(batch, world, cfg, PreferenceMiniBatch)
    everyone = rows_of_all(mini_batches[0], world)
    assert sorted(row for rank in everyone for rows in rank for row in rows) == list(range(len(items)))
    assert {len(rank) for rank in everyone} == {len(mini_batches[0])}
    assert mini_batches[0].totals.num_pairs == len(lengths)
    for rows in (rows for rank in everyone for rows in rank if rows):
        assert max(batch.table.lengths[rows]) * len(rows) <= BUDGET
        if rows[0] < 2 * batch.num_pairs:
            assert all(row % 2 == 0 and other == row + 1 for row, other in zip(rows[::2], rows[1::2], strict=True))
        else:
            assert all(row >= 2 * batch.num_pairs for row in rows)


@settings(deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=8), WORLDS, st.sampled_from(["optimal", "padding_free"]))
def test_the_turns_of_an_episode_that_share_a_line_stay_on_one_rank(turns, world, packing):
    items = [
        SAWItem([episode] * (4 * turn + 4), [1] * (4 * turn + 4), [0] * (4 * turn + 3) + [1], 1.0, {"rollout_id": str(episode)})
        for episode, count in enumerate(turns)
        for turn in range(count)
    ]
    batch = MacroBatch.ingest(items, LONGEST, merge_turns=True)
    mini_batch = on_all_ranks(batch, world, config(packing))[0]
    everyone = rows_of_all(mini_batch, world)
    homes = {row: (rank, number) for rank, each in enumerate(everyone) for number, rows in enumerate(each) for row in rows}
    assert sorted(homes) == list(range(len(items)))
    episodes = {
        name: [row for row, item in enumerate(batch.items) if item.meta["rollout_id"] == name]
        for name in map(str, range(len(turns)))
    }
    assert all(len({homes[row] for row in rows}) == 1 for rows in episodes.values())


def test_samples_without_weight_are_skipped_on_all_ranks_and_the_step_is_taken():
    batch = MacroBatch.ingest([sample(4, weight=0.0) for _ in range(5)], LONGEST)
    for mini_batch in on_all_ranks(batch, 2, config("optimal"), skip_zero_weight=True):
        assert (len(mini_batch), mini_batch.num_skipped) == (1, 5)
        assert [micro_batch.num_items for micro_batch in mini_batch] == [0]
        assert mini_batch.totals.num_samples == 5
    [first, second] = on_all_ranks(
        MacroBatch.ingest([sample(4), *batch.items], LONGEST), 2, config("optimal"), skip_zero_weight=True
    )
    assert [[m.num_items for m in each] for each in (first, second)] == [[1], [0]]


def test_an_empty_mini_batch_has_no_step_on_any_rank():
    batch = MacroBatch.ingest([sample(4)], LONGEST)
    for mini_batch in on_all_ranks(batch, 2, config("optimal"), rows=np.zeros(0, dtype=np.int64)):
        assert len(mini_batch) == 0
        assert mini_batch.padding() == dict.fromkeys(mini_batch.padding(), 0.0)


def test_the_planned_efficiency_is_the_work_of_what_the_ranks_wait_for():
    # One sample a rank of a budget that holds no two: 24576 * 32 + 32**2 and 24576 * 24 + 24**2.
    batch = MacroBatch.ingest([sample(32), sample(24)], LONGEST)
    mini_batch = on_all_ranks(batch, 2, replace(config("optimal"), micro_token_budget=32))[1]
    assert mini_batch.lockstep() == (787456 + 590400, 2 * 787456)
    assert mini_batch.padding()["perf/real_tokens"] == mini_batch.padding()["perf/padded_tokens"] == 56
    # All in one micro-batch each: two rows of 8 cost as much as the 8 and the 6 padded to it.
    pairs = MacroBatch.ingest([sample(8), sample(8), sample(8), sample(6)], LONGEST)
    price = {length: 24576 * length + length**2 for length in (6, 8)}
    assert on_all_ranks(pairs, 2, config("optimal"))[0].lockstep() == (3 * price[8] + price[6], 2 * 2 * price[8])
    assert on_all_ranks(pairs, 2, config("padding_free"))[0].lockstep() == (3 * price[8] + price[6], 2 * 2 * price[8])


def test_one_rank_that_has_the_whole_batch_plans_as_one_process():
    items = [sample(length) for length in (3, 9, 4, 30, 7)]
    alone = MiniBatch(MacroBatch.ingest(items, LONGEST), np.arange(5), config("optimal"))
    shared = on_all_ranks(MacroBatch.ingest(items, LONGEST), 1, config("optimal"))[0]
    assert [rows.tolist() for rows in shared.plan] == [rows.tolist() for rows in alone.plan]
    assert shared.totals == alone.totals


def test_ranks_that_came_to_different_samples_are_an_error(monkeypatch):
    digest = MacroBatch.ingest([sample(4), sample(5)], LONGEST).digest()
    assert all_have_samples(digest, "cpu")
    assert not all_have_samples(None, "cpu")
    monkeypatch.setattr(ranks, "max_over_ranks", lambda values, device: [values[0], values[1] + 1, values[2]])
    with pytest.raises(RankError, match="must not depend on the rank"):
        all_have_samples(digest, "cpu")
    monkeypatch.setattr(ranks, "max_over_ranks", lambda values, device: [1.0, values[1] + 1, values[2]])
    assert not all_have_samples(digest, "cpu")  # another rank failed and has no samples to compare


def test_samples_that_would_be_planned_or_trained_differently_have_another_digest():
    def pairs(*halves):
        meta = {"label": 1.0, "request_meta": {"group_id": "g"}}
        items = [sample(4, pair_id=pair, role=role, **meta) for pair, role in halves]
        return PreferenceMacroBatch.ingest_pairs(items, LONGEST, require_complete=False)

    def turns(second):
        return [SAWItem(ids, [1] * len(ids), [0] * (len(ids) - 1) + [1], 1.0) for ids in ([5, 6], second)]

    batches = {
        "one group": MacroBatch.ingest([sample(4, pair_id=name) for name in "aab"], LONGEST),
        "another": MacroBatch.ingest([sample(4, pair_id=name) for name in "abb"], LONGEST),
        "other ids": MacroBatch.ingest([replace(sample(4, pair_id=name), input_ids=[2] * 4) for name in "aab"], LONGEST),
        "another weight": MacroBatch.ingest(
            [sample(4, weight, pair_id=name) for weight, name in ((1, "a"), (1, "a"), (2, "b"))], LONGEST
        ),
        "chained": MacroBatch.ingest(turns([5, 6, 7]), LONGEST, merge_turns=True),
        "not chained": MacroBatch.ingest(turns([5, 6, 7]), LONGEST),
        "a pair": pairs(("p", "chosen"), ("p", "rejected")),
        "no pair": pairs(("p", "chosen"), ("q", "rejected")),
        "other roles": pairs(("p", "rejected"), ("q", "chosen")),
        "a label": MacroBatch.ingest([sample(4, label=1.0)], LONGEST),
        "another label": MacroBatch.ingest([sample(4, label=0.0)], LONGEST),
    }
    digests = {name: batch.digest() for name, batch in batches.items()}
    assert len({*digests.values()}) == len(digests)
    assert all(int(float(digest)) == digest < 2**53 for digest in digests.values())
    assert MacroBatch.ingest([sample(4, pair_id=name) for name in "xxy"], LONGEST).digest() == digests["one group"]
