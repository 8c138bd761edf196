"""Several processes that train one model: joining them (`start`), reductions over them, and errors
and answers that all of them learn of.

`start` reads what torchrun or Slurm's srun says. A process group that was made in another way works
too: its ranks meet at its store. Without `torch.distributed` there is one rank. No
function pickles anything.
"""

from ludic.training.ranks.collectives import (
    add_over_ranks as add_over_ranks,
    context as context,
    gather_json as gather_json,
    gather_padded as gather_padded,
    is_distributed as is_distributed,
    max_over_ranks as max_over_ranks,
    rank as rank,
    split_context as split_context,
    sum_over_ranks as sum_over_ranks,
    union_over_ranks as union_over_ranks,
    world_size as world_size,
)
from ludic.training.ranks.session import (
    agree as agree,
    ask_rank_0 as ask_rank_0,
    barrier as barrier,
    current_rendezvous as current_rendezvous,
    explain as explain,
    joined as joined,
    raise_if_failed as raise_if_failed,
    rank_0_alone as rank_0_alone,
    start as start,
    stop as stop,
)
