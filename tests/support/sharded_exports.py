"""Weights of a sharded model on their way to servers: memory, and faults of a publisher. A section
of `sharded_runs`."""

import asyncio
from pathlib import Path

import torch
from forked_ranks import run_ranks
from safetensors.torch import load_file
from training_samples import ListSource, cpu_config, tiny_model

from ludic.distributed.push.manifest import VersionFolders
from ludic.errors import PublishError
from ludic.inference.client import Publisher
from ludic.inference.vllm.in_server.weight_fingerprint import tensor_fingerprint
from ludic.models import shard_transfer
from ludic.models.lora import LoraSettings, apply_lora, collect_adapter_weights
from ludic.models.sharding import ShardingSettings, gather_tensor, make_mesh, shard_model
from ludic.training import Trainer, make_grpo
from ludic.training.backend.torch import TorchBackend


def make_backend():
    settings = ShardingSettings("full")
    model = tiny_model(0, vocab_size=4000, hidden_size=512, intermediate_size=1024, num_attention_heads=8)
    return TorchBackend(shard_model(model, settings, make_mesh(settings, "cpu")), cpu_config(), algo=make_grpo(group_size=4))


def measure_export(rank, world, folder, how):
    """Peak memory above the shards, in MB, of an export: read one by one, or collected by rank 0;
    and whether the weights are right, in two passes and from a folder of a version."""
    shard_transfer.BUCKET_BYTES = 4_000_000
    backend = make_backend()

    def export(read):
        stream = backend.stream_weights()
        with stream.shared():
            return read(stream) if rank == 0 else {}

    before = restart_peak()
    first = export({"streamed": fingerprint_each, "collected": lambda stream: fingerprint_each(dict(stream).items())}[how])
    extra = read_memory("VmHWM") - before
    stored = export(lambda stream: load_file(VersionFolders(folder).write_stream(stream, 1) / "model.safetensors"))
    twice = export(lambda stream: {"first": fingerprint_each(stream), "second": fingerprint_each(stream)})
    whole = {name: tensor_fingerprint(gather_tensor(value.detach())) for name, value in backend.model.named_parameters()}
    right = rank != 0 or whole == first == twice["first"] == twice["second"] == fingerprint_each(stored.items())
    sizes = [value.numel() * 4 / 1e6 for value in backend.model.parameters()]
    return {"right": right, "extra_mb": extra, "bucket_mb": 4.0, "largest_mb": max(sizes), "model_mb": sum(sizes)}


def fingerprint_each(stream):
    read = {}
    for name, tensor in stream:
        read[name] = tensor_fingerprint(tensor)
        del tensor
    return read


def read_memory(key):
    """A line of the memory of this process, in MB."""
    return int(next(line for line in Path("/proc/self/status").open() if line.startswith(key)).split()[1]) * 1024 / 1e6


def restart_peak():
    """Forget the peak so far. Returns the resident memory, in MB."""
    Path("/proc/self/clear_refs").write_text("5")
    return read_memory("VmRSS")


def fail_to_publish(rank, world):
    """The error of this rank when the publisher fails in the middle."""
    shard_transfer.BUCKET_BYTES = 4_000_000
    stream = make_backend().stream_weights()
    with stream.shared():
        if rank == 0:
            next(iter(stream))
            raise PublishError("the server is gone")


def publish_adapters(rank, world):
    """What a publisher of adapters gets from a sharded model: whether they are right, and their
    share of the model's weights. Only rank 0 knows that it takes adapters."""
    model = apply_lora(tiny_model(0, hidden_size=32), LoraSettings(rank=2), adapters_in_float32=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    whole = {name: tensor.clone() for name, tensor in collect_adapter_weights(model).items()}
    settings, given = ShardingSettings("full"), {}

    class Recorder(Publisher):
        takes_adapters = True

        def publish(self, state_dict, version=None):
            given.update(state_dict)

    trainer = Trainer(
        model=shard_model(model, settings, make_mesh(settings, "cpu")),
        algo=make_grpo(group_size=4),
        batch_source=ListSource([]),
        publisher=Recorder() if rank == 0 else object(),
        cfg=cpu_config(),
    )
    asyncio.run(trainer.publish())
    right = given.keys() == whole.keys() and all(torch.equal(given[name], whole[name]) for name in whole)
    return {"right": right, "given": len(given), "sharded": sum(hasattr(value, "placements") for value in given.values())}


def find_exports(runs):
    return {
        "adapters": run_ranks(2, publish_adapters),
        **{how: run_ranks(2, measure_export, str(runs.folder / "versions"), how) for how in ("streamed", "collected")},
        "failed": run_ranks(2, fail_to_publish, may_fail=True),
    }
