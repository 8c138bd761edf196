"""Invalid combinations of a trainer's parts: several ranks, and schedules of unknown length."""

import re

import pytest
from training_samples import ListSource, cpu_config, sorting_items, tiny_model

from ludic.errors import ConfigError
from ludic.training import (
    GatheredBatches,
    RolloutBatchSource,
    RolloutEngine,
    Trainer,
    make_dataset_sequence_requests_fn,
    make_grpo,
    ranks,
)
from ludic.training.batching.epochs import ItemBatchSource
from ludic.training.batching.overlapped import OverlappedSource
from ludic.training.loop import setup_checks


def trainer_of(*, total=None, source=None, **config):
    source = source or ListSource(sorting_items(8))
    return Trainer(
        model=tiny_model(),
        algo=make_grpo(group_size=4),
        batch_source=source,
        cfg=cpu_config(**config),
        total_training_steps=total,
    )


COSINE = {"lr_scheduler_type": "cosine", "warmup_steps": 0}


@pytest.mark.parametrize(
    ("config", "total", "warned"),
    [
        (COSINE, None, True),
        ({"lr_scheduler_type": "linear"}, None, True),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_ratio": 0.1}, None, True),
        (COSINE, 10, False),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2}, None, False),
        ({}, None, False),
    ],
)
def test_a_custom_loop_with_a_schedule_of_unknown_length_warns_once(config, total, warned, caplog):
    trainer = trainer_of(total=total, **config)
    trainer.train_step_sync()
    trainer.train_step_sync()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == warned
    assert all("1,000,000 steps" in line and "total_training_steps" in line for line in said)


def test_a_run_warns_about_an_unknown_schedule_length_only_without_a_number_of_steps(caplog):
    trainer_of(**COSINE).train_sync(2)
    assert not caplog.records

    class Two(ListSource):
        async def next_batch(self):
            if self.position == 2:
                raise StopAsyncIteration
            return await super().next_batch()

    trainer_of(source=Two(sorting_items(8)), **COSINE).train_sync()
    [record] = caplog.records
    assert "total_training_steps" in record.getMessage()


def playing_source(**options):
    requests = make_dataset_sequence_requests_fn(["a", "b"], batch_size=1, env_kind="qa", protocol_kind="single", group_size=4)
    engine = RolloutEngine(env_registry={}, protocol_registry={})
    return RolloutBatchSource(engine=engine, request_fn=requests, algorithm=make_grpo(group_size=4), **options)


@pytest.fixture
def two_ranks(monkeypatch):
    monkeypatch.setattr(ranks, "world_size", lambda: 2)
    monkeypatch.setattr(ranks, "is_distributed", lambda: True)


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("wrap", [lambda source: source, OverlappedSource])
def test_a_source_that_plays_the_same_prompts_on_every_rank_is_refused(wrap):
    with pytest.raises(ConfigError, match=r"2 ranks .*same prompts; .*SharedBatches"):
        setup_checks.check_ranks(wrap(playing_source()))


@pytest.mark.usefixtures("two_ranks")
def test_batches_that_all_ranks_have_are_not_gathered_once_more():
    source = ListSource(sorting_items(4))
    source.shards_across_ranks, source.divided_by_trainer = False, True  # as SharedBatches
    with pytest.raises(ConfigError, match="2 ranks the same samples; use SharedBatches"):
        GatheredBatches(source)


@pytest.mark.usefixtures("two_ranks")
def test_sources_that_divide_samples_between_ranks_are_accepted(caplog):
    source = playing_source(shards_across_ranks=True)
    setup_checks.check_ranks(source)
    setup_checks.check_ranks(OverlappedSource(source))
    setup_checks.check_ranks(ItemBatchSource(sorting_items(8), batch_size=2))
    assert not caplog.records


@pytest.mark.usefixtures("two_ranks")
def test_a_source_that_does_not_declare_it_causes_a_warning(caplog):
    setup_checks.check_ranks(ListSource(sorting_items(4)))
    [record] = caplog.records
    assert re.search("ListSource .*each of the 2 ranks", record.getMessage())


def test_a_single_rank_accepts_any_source(caplog):
    setup_checks.check_ranks(playing_source())
    setup_checks.check_ranks(ListSource(sorting_items(4)))
    assert not caplog.records
