"""Peak memory of a training pass over one long sample, whose tokens 1, 2 and 4 ranks compute
together (`sharding.context`): `python -m benches.python.context_memory [TOKENS]`.

Counted are the bytes of all tensors that the pass makes on rank 0, weights left out.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from benches.python.peak_bytes import PeakBytes

from ludic.models.sharding import ShardingSettings, make_mesh, shard_model
from ludic.training import SAWItem, TrainerConfig, make_sft, ranks
from ludic.training.backend.torch import TorchBackend
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch
from ludic.training.batching.rank_plans import RankShare

TOKENS, VOCABULARY, RANKS = 32768, 1024, (1, 2, 4)


def make_model(tokens: int) -> torch.nn.Module:
    """A Qwen2 of two layers with 8 heads of 16."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 8}
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            **sizes, num_key_value_heads=4, vocab_size=VOCABULARY, max_position_embeddings=tokens, tie_word_embeddings=True
        )
    )


def measure(rank: int, world: int, tokens: int, store: str, results: multiprocessing.SimpleQueue) -> None:
    """Put the peak of a pass of `world` ranks, in bytes, into `results`, on rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    ranks.split_context(world)
    settings = ShardingSettings("full")
    model = shard_model(make_model(tokens), settings, make_mesh(settings, "cpu"))
    cfg = TrainerConfig(
        model_device="cpu", max_seq_len=tokens, micro_token_budget=tokens, packing="padding_free", logits="chunked"
    )
    backend = TorchBackend(model, cfg, algo=make_sft())
    ids = np.random.default_rng(0).integers(1, VOCABULARY, tokens)
    item = SAWItem(ids.tolist(), [1] * tokens, [0] * (tokens // 2) + [1] * (tokens - tokens // 2), 1.0)
    macro = replace(MacroBatch.ingest([item], tokens), share=RankShare.of_this_rank())
    batch = MiniBatch(macro, np.arange(1), cfg)
    assert backend.skips_logits
    with PeakBytes() as peak:
        loss = backend.forward_backward(batch, totals=batch.totals).wait().loss
    if rank == 0:
        results.put((peak.peak, float(loss)))
    dist.barrier()


def measure_ranks(tokens: int, worlds: tuple[int, ...] = RANKS) -> dict[int, tuple[int, float]]:
    """Number of ranks -> (peak of rank 0 in bytes, loss)."""
    found = {}
    for world in worlds:
        results = multiprocessing.get_context("spawn").SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(measure, (world, tokens, f"{folder}/store", results), nprocs=world)
        found[world] = results.get()
    return found


def main() -> None:
    tokens = int(sys.argv[1]) if len(sys.argv) > 1 else TOKENS
    found = measure_ranks(tokens)
    print("| ranks | peak MB | of one rank's | loss |\n|---|---|---|---|")
    for world, (peak, loss) in found.items():
        print(f"| {world} | {peak / 1e6:.0f} | {peak / found[1][0]:.3f} | {loss:.6f} |")


if __name__ == "__main__":
    main()
