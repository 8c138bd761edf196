"""Runs of sharded models on 1, 2 and 4 ranks, compared with one process: `python sharded_runs.py
OUT`. The ranks are forks of this process, which writes what it found as JSON."""

import errno
import json
import logging
import os
import sys
import warnings
from pathlib import Path

import torch
from context_ranks import find_contexts
from forked_ranks import run_ranks
from preference_samples import reward_model, rm_config, sorted_pairs
from safetensors.torch import load_file, save_file
from sharded_buffers import find_buffers
from sharded_exports import find_exports
from sharded_presets import find_presets
from small_models import mixture_model
from training_samples import ListSource, cpu_config, sorting_items, tiny_model
from transformers import AutoModelForCausalLM
from used_models import find_used

from ludic.errors import LudicError
from ludic.files.checkpoints import find_checkpoint_faults
from ludic.models import shard_transfer, sharded_files, tensor_files
from ludic.models.exporting import export_model
from ludic.models.loading import load_model
from ludic.models.sharded_loading import load_sharded
from ludic.models.sharding import ShardingSettings, gather_tensor, make_mesh, shard_model
from ludic.models.state_files import read_model, read_optimizer
from ludic.training import (
    CheckpointConfig,
    LoraSettings,
    RMTrainer,
    Trainer,
    apply_lora,
    make_bradley_terry,
    make_grpo,
)

STEPS, SAMPLES = int(os.environ.get("STEPS", "4")), 16
HALF = STEPS // 2


def make_model(kind, seed=0):
    """`lora` has adapters that are not zero, on weights that do not depend on the seed; `reward` a
    head for scores."""
    if kind == "reward":
        return reward_model()
    model = tiny_model(0 if kind == "lora" else seed, hidden_size=32, intermediate_size=64)
    if kind == "lora":
        model = apply_lora(model, LoraSettings(rank=2))
        torch.manual_seed(seed + 1)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def with_optimizer(base, optimizer):
    class Optimized(base):
        def initialize_optimizer(self):
            trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            return torch.optim.SGD(trained, lr=0.1) if optimizer == "sgd" else torch.optim.AdamW(trained, lr=1e-3)

    return Optimized


def make_trainer(
    rank,
    world,
    *,
    kind="policy",
    settings=None,
    optimizer="sgd",
    first=0,
    folder=None,
    every=HALF,
    seed=0,
    layout="full",
    **options,
):
    """A trainer of a sharded model, or without `settings` of a whole one, on this rank's part of
    each batch. `first`: batches that were trained already."""
    draw, batches = (sorted_pairs if kind == "reward" else sorting_items), range(first, first + STEPS)
    parts = [draw(SAMPLES, seed=seed)[rank * SAMPLES // world : (rank + 1) * SAMPLES // world] for seed in batches]
    model = make_model(kind, seed)
    if settings is not None:
        shard_model(model, settings, make_mesh(settings, "cpu"))
    config = (rm_config if kind == "reward" else cpu_config)(
        micro_token_budget=64, max_seq_len=32, reduce_stats_across_ranks=True
    )
    return with_optimizer(RMTrainer if kind == "reward" else Trainer, optimizer)(
        model=model,
        algo=make_bradley_terry() if kind == "reward" else make_grpo(group_size=4),
        batch_source=ListSource(*parts),
        cfg=config,
        checkpoint_config=None if folder is None else CheckpointConfig(folder, every, max_to_keep=9, layout=layout),
        **options,
    )


def train(rank, world, out, steps, options):
    """Train, and write the weights to `out`. Returns loss and norm of each step."""
    trainer = make_trainer(rank, world, **options)
    rows = []
    for _ in range(steps):
        stats = trainer.train_step_sync()
        rows.append([stats["train/loss"], stats["train/grad_norm"]])
    weights = {name: gather_tensor(value.detach()).contiguous() for name, value in trainer.model.named_parameters()}
    if rank == 0:
        save_file(weights, out)
    return rows


class Runs:
    """Runs on ranks in a folder, and what they are compared by."""

    def __init__(self, folder):
        self.folder, self.count = folder, 0

    @property
    def last(self):
        """The file with the weights of the last run."""
        return str(self.folder / f"weights{self.count}.safetensors")

    def train(self, world, *, steps=STEPS, **options):
        """(weights, rows) of a run."""
        self.count += 1
        rows = run_ranks(world, train, self.last, steps, options)[0]
        return load_file(self.last), rows


def compare(run, other):
    """The largest differences of weights, losses and relative gradient norms; 0 is bit for bit."""
    (weights, rows), (expected, lines) = run, other
    assert weights.keys() == expected.keys()
    largest = max(float(value.abs().max()) for value in expected.values())
    return {
        "weights": max(float((weights[name] - expected[name]).abs().max()) for name in expected) / largest,
        "loss": max(abs(row[0] - line[0]) for row, line in zip(rows, lines, strict=True)),
        "norm": max(abs(row[1] - line[1]) / line[1] for row, line in zip(rows, lines, strict=True)),
    }


def find_equality(runs):
    """Sharded runs against one process, and twice on as many ranks."""
    full, hybrid = ShardingSettings("full"), ShardingSettings("hybrid", shards=2)
    found = {}
    for kind in ("policy", "lora", "reward"):
        one = runs.train(1, kind=kind)
        first = runs.train(2, kind=kind, settings=full)
        found[f"{kind} 2"] = compare(first, one)
        if kind == "policy":
            found["policy 2 again"] = compare(runs.train(2, settings=full), first)
            found["policy 4"] = compare(runs.train(4, settings=full), one)
            found["policy hybrid 4"] = compare(runs.train(4, settings=hybrid), one)
            found["policy whole 2"] = compare(runs.train(2), one)
            recomputed = ShardingSettings("full", activation_checkpointing=True)
            found["policy recomputed 2"] = compare(runs.train(2, settings=recomputed), one)
    return found


def find_resharding(runs):
    """Runs that were saved after half of their steps, and went on on another number of ranks."""
    found = {}
    for optimizer, world, others in (("sgd", 2, (1, 4)), ("adamw", 2, (2,)), ("sgd", 4, (2,)), ("sgd", 1, (2,))):
        folder = str(runs.folder / f"{optimizer}{world}")
        settings = ShardingSettings("full")
        whole, rows = runs.train(world, folder=folder, optimizer=optimizer, settings=settings if world > 1 else None)
        for other in others:
            resumed = {
                "first": HALF,
                "resume_from": HALF,
                "seed": 3,
                "folder": folder,
                "steps": STEPS - HALF,
                "optimizer": optimizer,
            }
            again = runs.train(other, **resumed, settings=settings if other > 1 else None)
            found[f"{optimizer} {world} to {other}"] = compare(again, (whole, rows[HALF:]))
    return found


def save_with_fault(rank, world, folder, fault, kind):
    """The error of a save in which something fails on one rank, after a save that went well."""
    trainer = make_trainer(rank, world, kind=kind, settings=ShardingSettings("full"), optimizer="adamw", folder=folder, every=0)
    trainer.train_step_sync()
    trainer.save_checkpoint()
    trainer.train_step_sync()
    place, name, failing = FAULTS[fault]
    if rank == failing:
        original, calls = getattr(place, name), iter(range(99))

        def fail(*arguments, **options):
            if next(calls) >= 1:  # in the middle: the first call goes well
                raise OSError(errno.ENOSPC, "No space left on device")
            return original(*arguments, **options)

        setattr(place, name, fail)
    try:
        trainer.save_checkpoint()
    except (OSError, LudicError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


FAULTS = {
    "disk of rank 1 full": (tensor_files.TensorFileWriter, "write", 1),
    "copy on rank 0 fails": (tensor_files.TensorFileWriter, "write", 0),
    "no room on rank 1": (shard_transfer, "make_buffers", 1),
    "optimizer of rank 1": (sharded_files, "find_own_region", 1),
    "flush of rank 0": (os, "fsync", 0),
}


def find_faults_of(runs):
    """What each rank learns of a fault on one, and whether the checkpoint before it is whole."""
    shard_transfer.BUCKET_BYTES = 10_000  # several buckets
    found = {}
    for number, fault in enumerate(FAULTS):
        folder = runs.folder / f"fault{number}"
        errors = run_ranks(2, save_with_fault, str(folder), fault, "policy")
        left = sorted(path.name for path in folder.iterdir())
        found[fault] = {"errors": errors, "left": left, "damaged": find_checkpoint_faults(folder / "step_000001")}
    return found


def find_files_of(runs):
    """The files of checkpoints of a policy and of adapters, read by others and damaged."""
    found = {}
    for kind in ("policy", "lora"):
        folder = runs.folder / kind
        weights, _ = runs.train(
            2, kind=kind, steps=1, optimizer="adamw", settings=ShardingSettings("full"), folder=str(folder), every=1
        )
        step = folder / "step_000001"
        found[kind] = {
            "files": sorted(path.name for path in step.iterdir()),
            "kinds": sorted({path.suffix for path in step.iterdir()}),
            "in one process": is_loaded(make_model(kind, 9), step, weights),
            "on two ranks of another seed": all(run_ranks(2, reads_slices, str(step), kind, runs.last)),
            "undamaged": find_checkpoint_faults(step),
        }
        if kind == "policy":
            found["pretrained"] = is_equal(AutoModelForCausalLM.from_pretrained(step), weights)
            found["exported"] = is_exported(step, runs.folder / "exported", weights)
    step = runs.folder / "policy" / "step_000001"
    found["flips"] = {path.name: find_flip(step, path) for path in sorted(step.glob("*.safetensors"))}
    return {**found, "shallow": find_shallow(runs)}


def is_exported(step, out, weights):
    out.mkdir()
    export_model(step, out)
    return is_equal(AutoModelForCausalLM.from_pretrained(out), weights)


def find_shallow(runs):
    """A checkpoint of two copies of a model with two shards each, whose ranks wrote what they
    have."""
    folder = runs.folder / "shallow"
    options = {"settings": ShardingSettings("hybrid", shards=2), "folder": str(folder), "optimizer": "adamw"}
    weights, _ = runs.train(4, steps=1, every=1, layout="shallow", **options)
    step = folder / "step_000001"
    parts = sorted(step.glob("weights-*.safetensors"))
    return {
        "files": sorted(path.name for path in step.iterdir()),
        "elements": sum(part.numel() for path in parts for part in load_file(path).values()),
        "elements of the model": sum(value.numel() for value in weights.values()),
        "in one process": is_loaded(make_model("policy", 9), step, weights),
        "on two ranks of another seed": all(run_ranks(2, reads_slices, str(step), "policy", runs.last)),
        "exported": is_exported(step, runs.folder / "exported shallow", weights),
        "undamaged": find_checkpoint_faults(step),
        "flips": {path.name: find_flip(step, path) for path in parts},
    }


def is_equal(model, weights):
    own = {name: gather_tensor(parameter.detach()) for name, parameter in model.named_parameters()}
    return own.keys() == weights.keys() and all(torch.equal(value, weights[name]) for name, value in own.items())


def is_loaded(model, step, weights):
    """Whether a model of other weights has `weights` after it was read, and AdamW a state."""
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
    read_model(model, step)
    read_optimizer(optimizer, model, step)
    return is_equal(model, weights) and len(optimizer.state) > 0


def reads_slices(rank, world, step, kind, weights):
    settings = ShardingSettings("full")
    return is_loaded(shard_model(make_model(kind, 9), settings, make_mesh(settings, "cpu")), Path(step), load_file(weights))


def find_flip(step, path):
    """What is found of one changed byte in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    original = path.read_bytes()
    path.write_bytes(content)
    faults = find_checkpoint_faults(step)
    path.write_bytes(original)
    return faults


def start_from_files(rank, world, folder, kind):
    """What a model that was started from files computes."""
    settings = ShardingSettings("full")
    mesh = make_mesh(settings, "cpu")
    if kind == "slices":
        model = load_sharded(folder, "float32", settings, mesh)
    else:
        model = shard_model(load_model(folder, "float32"), settings, mesh)
    with torch.no_grad():
        logits = model(input_ids=torch.arange(48).view(2, 24)).logits
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    model.train()
    model(input_ids=torch.arange(48).view(2, 24), labels=torch.arange(48).view(2, 24)).loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    return {"logits": logits.double().sum().item(), "tied": tied, "norm": float(gather_tensor(norm))}


def find_starts(runs):
    """Models of files that are read whole by each rank, and those that each reads its part of. The
    files of a mixture have each expert alone."""
    found = {}
    for name, model in (("dense", tiny_model(0)), ("mixture", mixture_model("DeepseekV3", tie_word_embeddings=False))):
        folder = str(runs.folder / name)
        model.save_pretrained(folder, max_shard_size="20KB")
        found[name] = {kind: run_ranks(2, start_from_files, folder, kind) for kind in ("whole", "slices")}
    return found


def import_everything():
    """Make the models and trainers once in this process: they import 900 modules, which each fork
    would import again."""
    for kind in ("policy", "lora", "reward"):
        make_trainer(0, 1, kind=kind, optimizer="adamw")


def main(out, *sections):
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    import_everything()
    runs = Runs(Path(out).parent)
    everything = {
        "equality": find_equality,
        "resharding": find_resharding,
        "faults": find_faults_of,
        "files": find_files_of,
        "buffers": find_buffers,
        "exports": find_exports,
        "starts": find_starts,
        "presets": find_presets,
        "contexts": find_contexts,
        "used": find_used,
    }
    found = {name: everything[name](runs) for name in sections or everything}
    Path(out).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
