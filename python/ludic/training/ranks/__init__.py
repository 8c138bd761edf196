"""Several processes that train one model: joining them (`start`), reductions over them, and errors
and answers that all of them learn of.

`start` reads what torchrun or Slurm's srun says. A process group that was made in another way works
too: its ranks meet at its store. Without `torch.distributed` there is one rank. No
function pickles anything.
"""

from ludic.training.ranks.session import (
    agree,
    ask_rank_0,
    barrier,
    current_rendezvous,
    explain,
    gather_json,
    is_distributed,
    joined,
    max_over_ranks,
    raise_if_failed,
    rank,
    rank_0_alone,
    start,
    stop,
    sum_over_ranks,
    union_over_ranks,
    world_size,
)

__all__ = [
    "agree",
    "ask_rank_0",
    "barrier",
    "current_rendezvous",
    "explain",
    "gather_json",
    "is_distributed",
    "joined",
    "max_over_ranks",
    "raise_if_failed",
    "rank",
    "rank_0_alone",
    "start",
    "stop",
    "sum_over_ranks",
    "union_over_ranks",
    "world_size",
]
