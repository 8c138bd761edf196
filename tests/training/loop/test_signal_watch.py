"""Warnings about steps without a learning signal and batches without trainable samples. Each is
logged once."""

import re

import pytest
from training_samples import ListSource, cpu_config, sorting_items, tiny_model

from ludic.errors import EmptyBatchError
from ludic.training import Trainer, make_reinforce
from ludic.training.loop.staleness import PATIENCE, SignalWatch
from ludic.training.types import SAWItem


def items(*weights):
    return [SAWItem([1, 2], [1, 1], [0, 1], weight) for weight in weights]


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if "weight 0" in record.getMessage()]


def test_a_series_of_batches_without_a_signal_warns_once(caplog):
    watch = SignalWatch()
    for _ in range(PATIENCE - 1):
        watch.count_batch(items(0.0, 0.0))
    assert warnings_of(caplog) == []
    for _ in range(3 * PATIENCE):
        watch.count_batch(items(0.0))
    assert len(warnings_of(caplog)) == 1
    assert re.search(f"{PATIENCE} batches in a row .*weight 0", warnings_of(caplog)[0])


def test_one_sample_with_a_gradient_is_a_signal(caplog):
    watch = SignalWatch()
    for _ in range(3):
        for _ in range(PATIENCE - 1):
            watch.count_batch(items(0.0))
        watch.count_batch(items(0.0, -0.5))
    assert warnings_of(caplog) == []


def test_the_trainer_watches_the_batches_that_it_trains_on(caplog):
    flat = sorting_items(4)
    for item in flat:
        item.weight = 0.0
    trainer = Trainer(model=tiny_model(), algo=make_reinforce(), batch_source=ListSource(flat), cfg=cpu_config())
    trainer.train_sync(num_steps=PATIENCE)
    assert len(warnings_of(caplog)) == 1


def test_prompts_that_leave_no_room_warn_once_with_their_length_and_the_limit(caplog):
    source = ListSource([SAWItem(list(range(3, 13)), [1] * 10, [0] * 8 + [1] * 2, 1.0)])
    cfg = cpu_config(max_seq_len=5, max_empty_batches=7)
    trainer = Trainer(model=tiny_model(), algo=make_reinforce(), batch_source=source, cfg=cfg)
    said = r"the shortest prompt has 8 tokens, and max_seq_len is 5: raise that"
    with pytest.raises(EmptyBatchError, match=rf"7 batches in a row .*{said}"):
        trainer.train_step_sync()
    (record,) = caplog.records
    assert re.search(f"1 samples .*none to train on .{re.escape(said)}.", record.getMessage())


def test_truncation_that_leaves_room_for_an_answer_is_not_blamed(caplog):
    short = SAWItem([3, 4], [1, 1], [1, 1], 1.0)

    def drop_all(batch):
        batch.items = []
        return batch

    algo = make_reinforce()
    algo.preprocess = drop_all
    trainer = Trainer(model=tiny_model(), algo=algo, batch_source=ListSource([short]), cfg=cpu_config(max_empty_batches=2))
    with pytest.raises(EmptyBatchError, match=r"filtered or too long.*; check the filters"):
        trainer.train_step_sync()
    assert "shortest prompt" not in caplog.text
