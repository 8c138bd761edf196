"""One of four ranks that exchange slices and heads of rows: `context_laws.py RANK STORE OUT`.
Every rank checks the laws; rank 0 writes the errors of what is refused."""

import json
import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from small_architectures import make_architecture
from torch.nn.functional import pad
from training_samples import ListSource, cpu_config, sorting_items, tiny_model

from ludic.errors import ConfigError
from ludic.models.context_parallel import CONTEXT, RowSlice
from ludic.models.images.rows import IMAGES
from ludic.training import RLAlgorithm, Trainer, make_sft, ranks
from ludic.training.algorithm import forward_logits
from ludic.training.backend.torch import TorchBackend
from ludic.training.batching.rank_plans import RankShare

WORLD, CASES = 4, 12


def check_exchange(draw, context):
    """Of a row of S tokens, the heads are those of the whole row, and the way back is the slice."""
    copies, own_heads = draw.randint(1, 3), draw.choice([1, 2, 4, 8])
    tokens, width = draw.randint(1, 19), draw.randint(1, 5)
    heads = own_heads * copies
    if heads % context.size or (own_heads % context.size and context.size % own_heads):
        return
    row, size = RowSlice(context, tokens), context.size
    query = torch.randn(1, heads, tokens, width)
    key, value = torch.randn(1, own_heads, tokens, width), torch.randn(1, own_heads, tokens, width + 1)
    own = [cut(each.transpose(1, 2), row).transpose(1, 2).requires_grad_() for each in (query, key, value)]
    got = row.to_heads(*own)
    mine = [head * size // heads == context.rank for head in range(heads)]
    assert torch.equal(got[0], query[:, mine])
    for part, each in zip(got[1:], (key, value), strict=True):
        for head, group in enumerate(torch.tensor(mine).nonzero().flatten().view(part.shape[1], -1)):
            assert {int(at) // copies for at in group} == {int(group[0]) // copies}
            assert torch.equal(part[:, head], each[:, int(group[0]) // copies])
    # Back, joined and weighed: the gradient of this slice is that of the whole row.
    weight = torch.randn(1, tokens, heads, width)
    joined = row.join(row.to_tokens(got[0].transpose(1, 2).square()))
    assert torch.equal(joined, query.transpose(1, 2).square())
    (joined * weight).sum().backward()
    expected = cut(2 * query.transpose(1, 2) * weight, row).transpose(1, 2)
    torch.testing.assert_close(own[0].grad, expected, rtol=1e-6, atol=0)


def cut(whole, row):
    """[1, w, ...] of [1, S, ...]: `RowSlice.cut` of any shape."""
    padding = (0, 0) * (whole.ndim - 2) + (0, row.width * row.context.size - row.tokens)
    return pad(whole, padding)[:, row.start : row.start + row.width].contiguous()


def check_slices(draw, context):
    """Each place of a row is in one slice."""
    row = RowSlice(context, draw.randint(1, 19))
    places = torch.tensor([draw.randrange(row.tokens) for _ in range(7)])
    found = torch.zeros(7).index_fill(0, row.find_own(places), 1.0)
    assert torch.equal(row.add(found), torch.ones(7))
    ids = torch.arange(1, row.tokens + 1)[None]
    assert torch.equal(row.join(row.cut(ids)), ids)


def check_counts(size, rank):
    """Ranks that compute the same rows have the same share, and count once."""
    share = RankShare.of_this_rank()
    assert (share.rank, share.world) == (rank // size, WORLD // size)
    assert ranks.sum_over_ranks([1.0, 10.0 ** (rank // size)], "cpu") == [
        WORLD // size,
        sum(10.0**at for at in range(WORLD // size)),
    ]
    total = torch.tensor([1.0 + rank // size])
    ranks.add_over_ranks(total)
    assert float(total) == sum(range(1, WORLD // size + 1))


class OwnLoss(RLAlgorithm):
    def compute_loss(self, model, batch, **options):
        return super().compute_loss(model, batch, **options)


def refusals():
    """Name -> a call that raises."""
    sft, cfg = make_sft(), cpu_config()
    own = OwnLoss(sft.name, sft.credit_assigner, sft.loss)
    eager = tiny_model(num_attention_heads=4, attn_implementation="eager")
    batch = {"input_ids": torch.ones(1, 2, dtype=torch.long), CONTEXT: ranks.context(), IMAGES: object()}
    return {
        "heads": lambda: TorchBackend(tiny_model(hidden_size=24, num_attention_heads=3), cfg, algo=sft),
        "convolutions": lambda: TorchBackend(make_architecture("lfm3", vocab_size=300), cfg, algo=sft),
        "recurrence": lambda: TorchBackend(make_architecture("recurrent_gemma", vocab_size=300), cfg, algo=sft),
        "attention": lambda: TorchBackend(eager, cfg, algo=sft),
        "loss": lambda: TorchBackend(tiny_model(num_attention_heads=4), cfg, algo=own),
        "routers": lambda: TorchBackend(make_architecture("mixtral", vocab_size=300), cpu_config(router_aux_coef=0.1), algo=sft),
        "source": lambda: Trainer(model=tiny_model(), algo=sft, batch_source=ListSource(sorting_items(4)), cfg=cfg),
        "images": lambda: forward_logits(tiny_model(), batch),
        "size": lambda: ranks.split_context(3),
    }


def main(rank, store, out):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    for size in (1, 2, 4):
        ranks.split_context(size)
        check_counts(size, rank)
        if size > 1:
            draw = random.Random(rank // size)  # the same in a group
            torch.manual_seed(rank // size)
            for _ in range(CASES):
                check_exchange(draw, ranks.context())
                check_slices(draw, ranks.context())
    errors = {}
    for name, call in refusals().items():
        try:
            call()
        except ConfigError as error:
            errors[name] = str(error)
    if rank == 0:
        Path(out).write_text(json.dumps(errors))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
