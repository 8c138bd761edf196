"""Peak memory of each rank while a sharded model starts, on two ranks of this machine:
`python -m benches.python.sharded_start`.

whole: each rank loads the model and shards it. slices: `load_sharded`, each rank reads its part of
the files. rank 0: rank 0 loads the model, and sends the others their shards (`sharding=full`).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
import traceback
from pathlib import Path

import torch
from benches.python.random_models import make_qwen2

from ludic.launch.rank_environment import RankEnvironment
from ludic.models.loading import load_model
from ludic.models.sharded_loading import load_sharded, load_skeleton, shard_copy
from ludic.models.sharding import ShardingSettings, make_mesh, shard_model
from ludic.training import ranks

WAYS = ("whole", "slices", "rank 0")
WORLD = 2


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benches.python.sharded_start", description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12, help="layers of 25 MB")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="sharded-start-") as place:
        folder = Path(place)
        size = _save_model(folder / "model", options.layers)
        print(
            f"A model of {2 * size / 1e6:,.0f} MB in float32, from files in bfloat16, on two ranks. Memory above that before, in MB:\n"
        )
        print("| start | peak of rank 0 | of rank 1 | afterwards |\n|---|---|---|---|")
        for way in WAYS:
            rows = _run(way, folder)
            cells = [f"{row[key]:,.0f}" for key in ("peak", "left") for row in rows]
            print(f"| {way} | {cells[0]} | {cells[1]} | {cells[2]}, {cells[3]} |", flush=True)


def _save_model(folder: Path, layers: int) -> int:
    """Save a model in a process of its own, whose memory the ranks do not inherit. Returns the
    bytes of its weights."""
    pid = os.fork()
    if pid == 0:
        sizes = {"width": 512, "inner": 3328, "heads": 8, "key_value_heads": 8}
        model = make_qwen2(32_000, layers=layers, tie_word_embeddings=True, **sizes)
        model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="50MB")
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _run(way: str, folder: Path) -> list[dict[str, float]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    pids = []
    for rank in range(WORLD):
        pid = os.fork()
        if pid == 0:
            _end_as_rank(RankEnvironment(rank, WORLD, rank, "127.0.0.1", port), way, folder)
        pids.append(pid)
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    if any(statuses):
        raise SystemExit(f"{way}: a rank failed")
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(WORLD)]


def _end_as_rank(environment: RankEnvironment, way: str, folder: Path) -> None:
    status = 1
    try:
        with ranks.joined(environment):
            load_skeleton(str(folder / "model"), "float32")  # imports what every way needs
            settings = ShardingSettings("full", param_dtype=torch.bfloat16)  # weights in float32
            mesh = make_mesh(settings, "cpu")
            before = _restart_peak()
            model = _start(way, str(folder / "model"), settings, mesh)
            row = {"peak": _read_memory("VmHWM") - before, "left": _read_memory("VmRSS") - before}
            (folder / f"rank{environment.rank}.json").write_text(json.dumps(row))
            del model
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _start(way: str, model: str, settings: ShardingSettings, mesh: torch.distributed.device_mesh.DeviceMesh) -> object:
    """What a rank holds after the start; with `rank 0` that one also has the whole model."""
    if way == "whole":
        return shard_model(load_model(model, "bfloat16"), settings, mesh)
    if way == "slices":
        return load_sharded(model, "bfloat16", settings, mesh)
    whole = (load_skeleton if ranks.rank() else load_model)(model, "bfloat16")
    return whole, shard_copy(whole, settings, mesh, agree=ranks.agree)


def _read_memory(key: str) -> float:
    """A line of the memory of this process, in MB."""
    return int(next(line for line in Path("/proc/self/status").open() if line.startswith(key)).split()[1]) * 1024 / 1e6


def _restart_peak() -> float:
    """Forget the peak so far. Returns the resident memory, in MB."""
    Path("/proc/self/clear_refs").write_text("5")
    return _read_memory("VmRSS")


if __name__ == "__main__":
    main()
