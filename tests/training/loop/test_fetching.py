"""Fetching a batch that all ranks have."""

from types import SimpleNamespace

import pytest
from training_samples import sorting_items

from ludic.training import TrainerConfig, ranks
from ludic.training.batching.mini_batches import MacroBatch
from ludic.training.batching.source import BatchSourceBase
from ludic.training.loop.fetching import BatchFetcher
from ludic.training.loop.timings import PhaseTimer
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
        algo=SimpleNamespace(preprocess=preprocess),
        cfg=TrainerConfig(model_device="cpu", max_seq_len=32, micro_token_budget=64),
        sync_every_steps=None,
        backend=None,
    )
    _, macro = await BatchFetcher(run, lambda items: MacroBatch.ingest(items, 32)).fetch(0, PhaseTimer())
    assert len(made) == digests
    [values] = exchanged  # that no rank failed is exchanged in any case
    assert values[0] == 0.0
    assert macro.share is not None
