"""Passes over a data set: each sample once per pass, a position that can be resumed, and a shard
for each rank."""

import asyncio
import json

import pytest
from hypothesis import given, strategies as st

from ludic.errors import ConfigError
from ludic.training import SAWItem
from ludic.training.batching.epochs import ItemBatchSource


def items_of(count, **meta):
    return [
        SAWItem([i, i], [1, 1], [0, 1], 1.0, {"rollout_id": f"r{i}", "completion_length": 1, "prompt_length": 1, **meta})
        for i in range(count)
    ]


def names(batch):
    return [item.meta["rollout_id"] for item in batch.items]


def next_names(source, count):
    return [names(asyncio.run(source.next_batch())) for _ in range(count)]


@given(st.integers(1, 30), st.integers(1, 9), st.booleans(), st.integers(0, 5))
def test_every_pass_returns_every_sample_once(count, batch_size, shuffle, seed):
    source = ItemBatchSource(items_of(count), batch_size=batch_size, shuffle=shuffle, seed=seed)
    for epoch in range(3):
        assert source.epoch == epoch
        batches = [names(batch) for batch in source.iter_epoch()]
        assert len(batches) == source.num_batches_per_epoch
        assert sorted(name for batch in batches for name in batch) == sorted(f"r{i}" for i in range(count))
        assert all(len(batch) == batch_size for batch in batches[:-1])


@given(st.integers(1, 20), st.integers(1, 7), st.integers(0, 25))
def test_a_resumed_source_continues_at_its_position(count, batch_size, done):
    whole, first, second = (ItemBatchSource(items_of(count), batch_size=batch_size, seed=3) for _ in range(3))
    expected = next_names(whole, done + 5)
    assert next_names(first, done) == expected[:done]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert next_names(second, 5) == expected[done:]


def test_the_order_differs_between_passes_and_between_seeds():
    source = ItemBatchSource(items_of(50), batch_size=50)
    [first], [second] = ([names(batch) for batch in source.iter_epoch()] for _ in range(2))
    other = names(next(ItemBatchSource(items_of(50), batch_size=50, seed=1).iter_epoch()))
    assert first != second
    assert other not in (first, second)
    assert names(next(ItemBatchSource(items_of(50), batch_size=50).iter_epoch())) == first


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_the_ranks_divide_each_pass_between_them(count, world, batch_size, drop_last):
    seen, lengths = [], set()
    for rank in range(world):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ludic.training.ranks.world_size", lambda: world)
            patch.setattr("ludic.training.ranks.rank", lambda rank=rank: rank)
            if drop_last and count // world < batch_size:
                with pytest.raises(ConfigError, match="leaves no batch"):
                    ItemBatchSource(items_of(count), batch_size=batch_size, drop_last=True)
                return
            source = ItemBatchSource(items_of(count), batch_size=batch_size, drop_last=drop_last)
            batches = [names(batch) for batch in source.iter_epoch()]
            assert all(batches)
            lengths.add(tuple(len(batch) for batch in batches))
            seen.extend(name for batch in batches for name in batch)
    assert len(lengths) == 1  # every rank has the same number of batches
    if drop_last:
        assert len(set(seen)) == len(seen)
    else:
        assert set(seen) == {f"r{i}" for i in range(count)}
        assert len(seen) - count < world


def test_drop_last_leaves_out_a_partial_batch():
    source = ItemBatchSource(items_of(7), batch_size=3, shuffle=False, drop_last=True)
    assert next_names(source, 3) == [["r0", "r1", "r2"], ["r3", "r4", "r5"], ["r0", "r1", "r2"]]


def test_the_meta_of_a_batch_describes_it():
    source = ItemBatchSource(items_of(3, total_reward=0.5), batch_size=2, shuffle=False)
    assert asyncio.run(source.next_batch()).meta == {
        "num_samples": 2,
        "target_rollouts": 2,
        "epoch": 0,
        "avg_completion_length": 1.0,
        "avg_prompt_length": 1.0,
        "source": "offline",
        "avg_total_reward": 0.5,
    }
    assert "avg_total_reward" not in asyncio.run(ItemBatchSource(items_of(1), batch_size=2).next_batch()).meta


@pytest.mark.parametrize("change", [{"count": 8}, {"batch_size": 3}, {"seed": 1}, {"shuffle": False}])
def test_a_position_is_refused_for_other_data_or_settings(change):
    settings = {"count": 9, "batch_size": 2, "seed": 0, "shuffle": True}
    changed = {**settings, **change}
    state = ItemBatchSource(items_of(settings.pop("count")), **settings).state_dict()
    [value] = change.values()
    with pytest.raises(ConfigError, match=f"the saved .* is .*, here it is {value}"):
        ItemBatchSource(items_of(changed.pop("count")), **changed).load_state_dict(state)


def test_a_position_is_refused_when_tokens_changed():
    items = items_of(3)
    state = ItemBatchSource(items, batch_size=2).state_dict()
    items[1] = SAWItem([9, 9], [1, 1], [0, 1], 1.0, items[1].meta)
    with pytest.raises(ConfigError, match="digest"):
        ItemBatchSource(items, batch_size=2).load_state_dict(state)


def test_wrong_settings_are_refused():
    with pytest.raises(ConfigError, match="at least one sample"):
        ItemBatchSource([], batch_size=2)
    with pytest.raises(ConfigError, match="batch_size"):
        ItemBatchSource(items_of(2), batch_size=0)
    with pytest.raises(ConfigError, match="leaves no batch"):
        ItemBatchSource(items_of(2), batch_size=3, drop_last=True)


def test_a_position_is_refused_when_labels_changed():
    """The label of a preference is only in its meta."""
    before = ItemBatchSource(items_of(4, pair_id="p", role="chosen", label=1.0), batch_size=2).state_dict()
    with pytest.raises(ConfigError, match="digest"):
        ItemBatchSource(items_of(4, pair_id="p", role="chosen", label=0.5), batch_size=2).load_state_dict(before)


def test_two_ranks_get_the_samples_of_the_documented_example(monkeypatch):
    items = [SAWItem([index + 1], [1], [1], 1.0, {"number": index}) for index in range(5)]
    monkeypatch.setattr("ludic.training.ranks.world_size", lambda: 2)
    shares = {}
    for drop_last in (False, True):
        for rank in range(2):
            monkeypatch.setattr("ludic.training.ranks.rank", lambda rank=rank: rank)
            source = ItemBatchSource(items, batch_size=1, shuffle=False, drop_last=drop_last)
            shares[drop_last, rank] = [item.meta["number"] for batch in source.iter_epoch() for item in batch.items]
    assert shares == {(False, 0): [0, 2, 4], (False, 1): [1, 3, 0], (True, 0): [0, 2], (True, 1): [1, 3]}
