"""The trainer's log-probabilities of sampled tokens, in the log beside the rollouts."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from training_samples import (
    DrawingSource,
    ListSource,
    assert_same_tensors,
    cpu_config,
    dialogues,
    sorting_items,
    tiny_model,
    weights_of,
)

from ludic.training import CheckpointConfig, Trainer, make_cispo
from ludic.training.batching.source import BATCH_NUMBER
from ludic.training.loop.step_record import DIGITS, TokenLog


def train(items, log, *, steps=1, **changes):
    trainer = Trainer(
        model=tiny_model(),
        algo=make_cispo(group_size=4),
        batch_source=ListSource(items),
        cfg=cpu_config(**changes),
        token_log=log,
    )
    trainer.train_sync(steps)
    return trainer


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def logps_by_hand(item, length):
    """log softmax of the untrained model at each predicted action token of the first `length`."""
    ids = torch.tensor(item.input_ids[:length])
    with torch.no_grad():
        table = tiny_model().eval()(ids[None]).logits[0].double().log_softmax(-1)
    places = [place for place in np.flatnonzero(item.action_mask[:length]) if place > 0]
    return [float(table[place - 1, ids[place]]) for place in places]


@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    budget=st.integers(100, 400),
    packing=st.sampled_from(["greedy", "padding_free"]),
    merge_turns=st.booleans(),
    cut=st.sampled_from([100, 12]),
)
def test_the_log_has_the_log_probabilities_with_which_the_step_begins(tmp_path, budget, packing, merge_turns, cut):
    """Whatever the micro-batches are, samples of weight 0 too; of a sample that was cut, those of
    the tokens that are left."""
    items, path = dialogues((1, 2, 1)), tmp_path / "logps.jsonl"
    path.unlink(missing_ok=True)
    train(items, TokenLog(path, 1), micro_token_budget=budget, max_seq_len=cut, packing=packing, merge_turns=merge_turns, lr=0.5)
    expected = [(item, logps_by_hand(item, cut)) for item in items]
    found = read(path)
    assert [(line["id"], line["step"], line["skipped"]) for line in found] == [
        (item.meta["rollout_id"], item.meta["step_index"], 0) for item, logps in expected if logps
    ]
    for line, (_, logps) in zip(found, [each for each in expected if each[1]], strict=True):
        np.testing.assert_allclose(line["logps"], logps, atol=10**-DIGITS)


def test_a_first_token_has_no_prediction_and_is_skipped(tmp_path):
    [item] = sorting_items(1)
    item = replace(
        item, input_ids=[5, 6, 7], attention_mask=[1, 1, 1], action_mask=[1, 0, 1], attachments=type(item.attachments)()
    )
    from ludic.training.batching.mini_batches import MacroBatch

    TokenLog(tmp_path / "log", 1).write(MacroBatch.ingest([item], 10), {0: torch.tensor([-0.25])})
    assert read(tmp_path / "log") == [{"id": item.meta["rollout_id"], "step": 0, "skipped": 1, "logps": [-0.25]}]


def test_a_value_that_is_not_finite_is_null(tmp_path):
    from ludic.training.batching.mini_batches import MacroBatch

    [item] = sorting_items(1)
    count = sum(item.action_mask)
    TokenLog(tmp_path / "log", 1).write(MacroBatch.ingest([item], 100), {0: torch.full((count,), -torch.inf)})
    assert read(tmp_path / "log")[0]["logps"] == [None] * count


@pytest.mark.parametrize(("every", "lines"), [(1, 3), (2, 2), (3, 1), (0, 0)])
def test_every_so_manieth_batch_is_logged_and_training_is_the_same(tmp_path, every, lines):
    items = sorting_items(4)
    logged = train(items, TokenLog(tmp_path / "log", every), steps=3)
    plain = train(items, None, steps=3)
    assert_same_tensors(weights_of(logged.model), weights_of(plain.model))
    found = read(tmp_path / "log") if every else []
    assert len(found) == lines * len(items)


@given(empty=st.sets(st.integers(0, 7), max_size=5), every=st.integers(1, 3))
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_batches_are_counted_as_their_source_counts_them(tmp_path, empty, every):
    """A batch without samples is no step, and is counted: what is logged are batches 0, every, 2 *
    every, ... of the source."""

    class Counted(ListSource):
        async def next_batch(self):
            number = self.position
            batch = await super().next_batch()
            batch.items = (
                [] if number in empty else [replace(i, meta={**i.meta, "rollout_id": f"b{number}"}) for i in batch.items]
            )
            batch.meta[BATCH_NUMBER] = number
            return batch

    path = tmp_path / "logps.jsonl"
    path.unlink(missing_ok=True)
    trainer = Trainer(
        model=tiny_model(),
        algo=make_cispo(group_size=4),
        batch_source=Counted(sorting_items(4)),
        cfg=cpu_config(),
        token_log=TokenLog(path, every),
    )
    trainer.train_sync(8 - len(empty))
    logged = {line["id"] for line in read(path)} if path.exists() else set()
    assert logged == {f"b{number}" for number in range(0, 8, every) if number not in empty}


def test_a_resumed_run_logs_each_batch_once(tmp_path):
    """A checkpoint of step 2, and a run that is killed after step 3: step 3 is repeated."""
    log, places = tmp_path / "logps.jsonl", CheckpointConfig(tmp_path / "checkpoints", every_n_steps=2)

    def make(**options):
        return Trainer(
            model=tiny_model(),
            algo=make_cispo(group_size=4),
            batch_source=DrawingSource(4),
            cfg=cpu_config(),
            checkpoint_config=places,
            token_log=TokenLog(log, 1),
            **options,
        )

    make().train_sync(3)
    killed = read(log)
    again = make(resume_from=2)
    assert read(log) == killed[:8]  # 2 steps of 4 samples
    again.train_sync(2)
    assert len(read(log)) == 16
    assert read(log)[:12] == killed
