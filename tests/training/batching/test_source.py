"""A source needs only `next_batch`. Its other members have defaults, which its own members
replace."""

from training_samples import DrawingSource, ListSource, cpu_config, sorting_items, tiny_model

from ludic.training import OverlappedSource, SAWBatch, Trainer, make_grpo
from ludic.training.batching.source import BatchSourceBase, as_batch_source
from ludic.training.evaluators.protocol import runs_on_all_ranks


async def test_a_source_with_only_next_batch_gets_every_default():
    source = as_batch_source(ListSource(sorting_items(2)))
    assert (source.max_lag, source.overlaps, source.shards_across_ranks, source.pairs_incomplete) == (0, False, None, 0)
    assert source.state_dict() is None
    source.load_state_dict({"unknown": 1})
    await source.aclose()
    assert len((await source.next_batch()).items) == 2


async def test_the_members_of_a_users_source_replace_the_defaults():
    class UserSource(DrawingSource):
        max_lag, overlaps, shards_across_ranks, pairs_incomplete, closed = 2, True, False, 3, False

        async def aclose(self):
            self.closed = True

    own = UserSource()
    source = as_batch_source(own)
    assert (source.max_lag, source.overlaps, source.shards_across_ranks, source.pairs_incomplete) == (2, True, False, 3)
    source.load_state_dict({"drawn": 7})
    assert (own.drawn, source.state_dict()) == (7, {"drawn": 7})
    await source.aclose()
    assert own.closed


def test_a_source_with_every_member_is_not_wrapped():
    source = OverlappedSource(ListSource(sorting_items(2)))
    assert isinstance(source, BatchSourceBase)
    assert as_batch_source(source) is source


def test_trainer_batch_source_is_the_users_object():
    class Minimal:
        async def next_batch(self):
            return SAWBatch(sorting_items(4))

    source = Minimal()
    trainer = Trainer(model=tiny_model(), algo=make_grpo(group_size=4), batch_source=source, cfg=cpu_config())
    trainer.train_sync(1)
    assert trainer.batch_source is source


def test_an_evaluator_runs_on_rank_0_unless_it_says_otherwise():
    class Plain:
        async def eval(self, **_):
            return [], {}

    class Everywhere(Plain):
        on_all_ranks = True

    class Nowhere(Plain):
        on_all_ranks = False

    assert [runs_on_all_ranks(kind()) for kind in (Plain, Everywhere, Nowhere)] == [False, True, False]


def test_members_and_state_of_a_users_source_are_read_at_the_time_of_use():
    class UserSource:
        overlaps = False

        async def next_batch(self):
            raise StopAsyncIteration

        def state_dict(self):
            return 7

    own = UserSource()
    source = as_batch_source(own)
    own.overlaps = True
    assert source.overlaps
    assert source.state_dict() == 7


def test_replacing_the_trainers_source_takes_effect_at_the_next_batch():
    class Counting:
        def __init__(self):
            self.batches = 0

        async def next_batch(self):
            self.batches += 1
            return SAWBatch(sorting_items(4))

    first, second = Counting(), Counting()
    trainer = Trainer(model=tiny_model(), algo=make_grpo(group_size=4), batch_source=first, cfg=cpu_config())
    trainer.train_sync(1)
    trainer.batch_source = second
    trainer.train_sync(2)
    assert (first.batches, second.batches) == (1, 2)
