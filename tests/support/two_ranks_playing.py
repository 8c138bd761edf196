"""One rank of two with a batch source that plays rollouts: `python two_ranks_playing.py RANK STORE
OUT`. Rank 0 writes the trainer's error."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from training_samples import cpu_config, tiny_model

from ludic.errors import ConfigError
from ludic.training import RolloutBatchSource, RolloutEngine, Trainer, make_dataset_sequence_requests_fn, make_grpo


def main(rank, store, out):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    requests = make_dataset_sequence_requests_fn(["a", "b"], batch_size=1, env_kind="qa", protocol_kind="single", group_size=4)
    engine = RolloutEngine(env_registry={}, protocol_registry={})
    source = RolloutBatchSource(engine=engine, request_fn=requests, algorithm=make_grpo(group_size=4))
    try:
        Trainer(model=tiny_model(), algo=make_grpo(group_size=4), batch_source=source, cfg=cpu_config())
        message = None
    except ConfigError as error:
        message = str(error)
    if rank == 0:
        Path(out).write_text(json.dumps({"message": message}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
