"""Ranks as forks of one process that has imported everything: an import of torch takes seconds."""

import datetime
import faulthandler
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.device_mesh
import torch.distributed.fsdp
import torch.distributed.tensor

DEADLINE_S = 600


def run_ranks(world, function, *arguments, may_fail=False):
    """[result of each rank] of `function(rank, world, *arguments)`, which is JSON, on `world` ranks
    of a gloo group. A rank that raises ends all with an error; with `may_fail` its result is
    `{"error"}`."""
    with tempfile.TemporaryDirectory() as place:
        pids = [_fork(rank, world, Path(place), function, arguments, may_fail) for rank in range(world)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        assert codes == [0] * world, f"ranks ended with {codes}"
        return [json.loads((Path(place) / f"rank{rank}").read_text()) for rank in range(world)]


def _fork(rank, world, place, function, arguments, may_fail):
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        faulthandler.dump_traceback_later(DEADLINE_S, exit=True)
        torch.set_num_threads(1)
        timeout = datetime.timedelta(seconds=300)
        dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=world, timeout=timeout)
        try:
            result = function(rank, world, *arguments)
        except Exception as error:
            if not may_fail:
                raise
            result = {"error": f"{type(error).__name__}: {error}"}
        (place / f"rank{rank}").write_text(json.dumps(result))
        dist.barrier()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
