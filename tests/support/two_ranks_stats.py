"""One rank that reduces statistics with another: `python two_ranks_stats.py RANK STORE OUT`. Rank 0
writes the result as JSON."""

import json
import sys
from pathlib import Path

import torch.distributed as dist

from ludic.training.stats import Stat, final_values, reduce_over_ranks

STATS_BY_RANK = [
    {
        "x": Stat(1.0, 3.0),
        "x_std": Stat(1.0, 2.0, "std", 1.0),
        "count": Stat(2.0, rule="sum"),
        "shortest": Stat(4.0, rule="min"),
        "longest": Stat(4.0, rule="max"),
        "unmeasured": Stat(0.0, 0.0),
        "mismatch/tokens": Stat(2.0, rule="sum"),
        "mismatch/abs_sum": Stat(1.0, rule="sum"),
        "mismatch/abs_max": Stat(0.75, rule="max"),
        "mismatch/kl_sum": Stat(0.5, rule="sum"),
        "mismatch/ratio_sum": Stat(2.0, rule="sum"),
        "mismatch/ratio_square_sum": Stat(4.0, rule="sum"),
    },
    {
        "only on rank 1": Stat(0.5, 4.0),
        "count": Stat(3.0, rule="sum"),
        "x": Stat(5.0, 1.0),
        "x_std": Stat(1.0, 2.0, "std", 5.0),
        "shortest": Stat(-1.0, rule="min"),
        "longest": Stat(9.0, rule="max"),
        "unmeasured": Stat(0.0, 0.0),
    },
]


def main(rank, store, out):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    reduced = final_values(reduce_over_ranks(STATS_BY_RANK[rank], "cpu"))
    path = Path(out).with_suffix(f".{rank}")
    path.write_text(json.dumps(reduced))
    dist.barrier()
    if rank == 0:
        assert json.loads(path.with_suffix(".1").read_text()) == reduced
        Path(out).write_text(json.dumps(reduced))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
