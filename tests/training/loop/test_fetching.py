"""Fetching a batch: one that all ranks have, and none after a stop."""

import random
import shutil
from types import SimpleNamespace

import pytest
import torch
from training_samples import DrawingSource, assert_same_tensors, cpu_config, sorting_items, tiny_model, weights_of

from ludic.errors import ConfigError, StopRequested
from ludic.training import CheckpointConfig, Trainer, TrainerConfig, make_grpo, ranks
from ludic.training.batching.mini_batches import MacroBatch
from ludic.training.batching.source import BatchSourceBase
from ludic.training.loop.staleness import BatchFetcher
from ludic.training.loop.step_record import PhaseTimer
from ludic.training.types import SAWBatch


class SameBatch(BatchSourceBase):
    divided_by_trainer = True

    async def next_batch(self):
        return SAWBatch(sorting_items(4))


@pytest.mark.parametrize(("preprocess", "digests"), [(None, 0), (lambda batch: batch, 1)])
async def test_ranks_compare_their_samples_only_where_a_function_could_have_changed_them(monkeypatch, preprocess, digests):
    exchanged, made = [], []
    digest = MacroBatch.digest
    monkeypatch.setattr(ranks, "is_distributed", lambda: True)
    monkeypatch.setattr(ranks, "max_over_ranks", lambda values, device: exchanged.append(values) or list(values))
    monkeypatch.setattr(MacroBatch, "digest", lambda batch: made.append(1) or digest(batch))
    run = SimpleNamespace(
        source=SameBatch(),
        algo=SimpleNamespace(preprocess=preprocess, reads_teacher=False),
        cfg=TrainerConfig(model_device="cpu", max_seq_len=32, micro_token_budget=64),
        should_stop=None,
        sync_every_steps=None,
        backend=None,
    )
    _, macro = await BatchFetcher(run, lambda items: MacroBatch.ingest(items, 32)).fetch(0, PhaseTimer())
    assert len(made) == digests
    [values] = exchanged  # that no rank failed is exchanged in any case
    assert values[0] == 0.0
    assert macro.share is not None


def test_a_stop_ends_the_run_before_the_next_batch_and_a_resumed_run_goes_on_with_that(tmp_path, monkeypatch):
    wanted = []

    def start(**options):
        torch.manual_seed(0)
        random.seed(0)
        places = CheckpointConfig(tmp_path, every_n_steps=2)
        return Trainer(
            model=tiny_model(),
            algo=make_grpo(group_size=4),
            batch_source=DrawingSource(),
            cfg=cpu_config(),
            checkpoint_config=places,
            **options,
        )

    whole = start()
    whole.train_sync(4)
    shutil.rmtree(tmp_path)
    stopped = start(should_stop=lambda: wanted)
    stopped.train_sync(2)
    state = stopped.source.state_dict()
    wanted.append("Ctrl-C")
    with pytest.raises(StopRequested, match="the run was asked to stop"):
        stopped.train_sync(2)
    assert (stopped.current_step, stopped.source.state_dict()) == (2, state)
    resumed = start(should_stop=list, resume_from=2)
    resumed.train_sync(2)
    assert_same_tensors(weights_of(resumed.model), weights_of(whole.model))
    monkeypatch.setattr(ranks, "is_distributed", lambda: True)
    with pytest.raises(ConfigError, match=r"should_stop .*differ between ranks; .*SharedBatches\(stop="):
        start(should_stop=list)
