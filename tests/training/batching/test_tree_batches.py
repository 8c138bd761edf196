"""Which tokens a mini-batch of prefix trees computes, and how it is divided."""

import numpy as np
import pytest
from training_samples import branching_items, cpu_config

from ludic.models.prefix_trees import PREFIX_TREES
from ludic.training import DPOTrainerConfig
from ludic.training.batching.mini_batches import MacroBatch
from ludic.training.batching.rank_plans import RankShare
from ludic.training.batching.tree_batches import TreeMiniBatch


def test_settings_for_pairs_do_not_keep_plain_samples_from_sharing():
    items = branching_items((4,), 1)
    cfg = DPOTrainerConfig(model_device="cpu", max_seq_len=64, micro_token_budget=1000, prefix_sharing="tree")
    mini_batch = TreeMiniBatch(MacroBatch.ingest(items, 64), np.arange(4), cfg)
    [batch] = mini_batch
    assert batch.tensors[PREFIX_TREES].input_ids.numel() < sum(len(item.input_ids) for item in items)
    assert mini_batch.cfg is cfg
    assert (mini_batch.packing, cfg.packing) == ("padding_free", "optimal")


def test_a_sample_with_an_attention_mask_has_a_row_of_its_own():
    items = branching_items((4,), 2)
    items[1].attention_mask[2] = 0
    cfg = cpu_config(prefix_sharing="tree")
    macro = MacroBatch.ingest(items, 32)
    assert all(PREFIX_TREES not in batch.tensors for batch in TreeMiniBatch(macro, np.arange(4), cfg))


def test_truncated_samples_share_what_is_left_of_them():
    """Cut behind the second token of the answer, the samples are the prompt, one or two tokens of
    two kinds behind it, and up to two behind each of these: 6 tokens more than the prompt."""
    items = branching_items((6,), 5)
    prompt = items[0].action_mask.index(1)
    cfg = cpu_config(prefix_sharing="tree", max_seq_len=prompt + 2)
    macro = MacroBatch.ingest(items, prompt + 2)
    assert macro.table.lengths.max() == prompt + 2 < max(len(item.input_ids) for item in items)
    [batch] = TreeMiniBatch(macro, np.arange(len(macro.items)), cfg)
    prefixes = {tuple(item.input_ids[:end]) for item in macro.items for end in range(1, len(item.input_ids) + 1)}
    assert batch.tensors[PREFIX_TREES].input_ids.numel() == len(prefixes) <= prompt + 6


@pytest.mark.parametrize("world", [2, 3])
def test_the_ranks_of_a_shared_batch_divide_its_trees(world):
    items = branching_items((5, 4, 3, 1, 1), 11)
    cfg = cpu_config(prefix_sharing="tree", micro_token_budget=40)
    macro = MacroBatch.ingest(items, 32)
    alone = TreeMiniBatch(macro, np.arange(len(items)), cfg)
    rows, lengths = [], set()
    for rank in range(world):
        shared = MacroBatch(macro.items, macro.table, 0, 0, share=RankShare(rank, world))
        part = TreeMiniBatch(shared, np.arange(len(items)), cfg)
        lengths.add(len(part))
        assert part.padding()["perf/real_tokens"] == alone.padding()["perf/real_tokens"]
        for index, batch in enumerate(part):
            own = part.micro_batch_rows(index)
            rows += own.tolist()
            assert batch.num_items == len(own)
            assert batch.tensors[PREFIX_TREES].input_ids.numel() <= 40
    assert sorted(rows) == list(range(len(items)))
    assert len(lengths) == 1
