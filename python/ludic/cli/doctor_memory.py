"""`ludic doctor model=M`: what a run would need of memory, what fits, and which settings help."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from ludic.runs.memory_estimate import MemoryEstimate

GIB, MIB = 2**30, 2**20
RUNTIME_BYTES = {"cpu": 500 * 2**20, "cuda": 1000 * 2**20}
"""What Python, torch and the driver need besides, roughly."""
MARGIN = 0.9
"""The share of the memory that may be used: allocators keep more than is asked for."""
PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "kv_cache", "training", "sampling")
TITLES = ("weights", "grads", "optim", "activ", "logits", "KV", "training", "sampling")
"""Of the columns, one for each of `PARTS`."""


def advise(arguments: Sequence[str]) -> dict[str, Any]:
    """The report for the settings of a run of `ludic train`: bytes for each part, for the settings
    as they are, in each dtype, and with each remedy. Loads no weights."""
    from ludic.recipes.compose import compose
    from ludic.runs.memory_estimate import MemoryEstimator, Settings

    recipe = compose(arguments)
    estimator, settings = MemoryEstimator(recipe), Settings.of(recipe)
    device, available = find_memory(recipe.trainer.model_device)
    room = int(available * MARGIN) - RUNTIME_BYTES[device]
    own = estimator.estimate(settings)
    remedies = [(name, estimator.estimate(changed)) for name, changed in estimator.list_remedies(settings)]
    return {
        "model": estimator.name,
        "parameters": own.parameters,
        "trained": own.trained,
        "device": device,
        "available_bytes": available,
        "room_bytes": room,
        "logits": "chunked" if own.chunked else "full",
        "estimates": [_describe(name, one, room) for name, one in [("as set", own), *remedies]],
    }


def _describe(name: str, estimate: MemoryEstimate, room: int) -> dict[str, Any]:
    return {
        "settings": name,
        **{f"{part}_bytes": getattr(estimate, part) for part in PARTS},
        "peak_bytes": estimate.peak,
        "fits": estimate.peak <= room,
    }


def show_advice(report: dict[str, Any], console: Console) -> None:
    """Print the report as a table, and what to set if the run does not fit."""
    trained = "" if report["trained"] == report["parameters"] else f", {report['trained']:,} of them trained"
    console.print(f"{report['model']}: {report['parameters']:,} parameters{trained}", markup=False)
    console.print(
        f"{report['device']} has {_shown(report['available_bytes'])} available, {_shown(report['room_bytes'])} of it for the run: "
        "a tenth is a margin, and torch itself needs some",
        markup=False,
    )
    largest = max(line["peak_bytes"] for line in report["estimates"])
    unit, size = ("GiB", GIB) if largest >= GIB else ("MiB", MIB)
    console.print(f"\n[bold]{unit} of a training step, and of sampling in this process[/]")
    console.print("".join(f"{title:>9}" for title in TITLES) + "  fits  with", markup=False)
    for line in report["estimates"]:
        cells = "".join(f"{line[f'{part}_bytes'] / size:>9.2f}" for part in PARTS)
        console.print(f"{cells}  {'yes' if line['fits'] else 'no':<4}  {line['settings']}", markup=False)
    console.print()
    console.print(_conclude(report["estimates"]), markup=False)


def _conclude(estimates: Sequence[dict[str, Any]]) -> str:
    if estimates[0]["fits"]:
        return "The run fits as it is set."
    fitting = [line["settings"] for line in estimates[1:] if line["fits"]]
    if not fitting:
        return (
            "None of these settings makes it fit: take a smaller model or a lower trainer.max_seq_len, share it out over several GPUs "
            "(sharding.kind=fsdp2), or sample on a server (inference=vllm)"
        )
    if fitting == ["all of these"]:
        changes = [line["settings"] for line in estimates[1:-1]]
        return f"The run does not fit as it is set. It fits with all of {' '.join(changes)}"
    return f"The run does not fit as it is set. It fits with {' or '.join(name for name in fitting if name != 'all of these')}"


def _shown(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / MIB:.0f} MiB"


def find_memory(device: str) -> tuple[str, int]:
    """(cpu or cuda, bytes that are available): free memory of the GPU, or of this machine and of
    the control group that this process is in."""
    import torch

    if device.startswith("cuda") and torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info(torch.device(device))
        return "cuda", int(free)
    return "cpu", min([_find_free(), *_list_limits()])


def _find_free(memory: Path = Path("/proc/meminfo")) -> int:
    """Bytes that programs can still have. Where the system does not say, as on macOS, all of its
    memory."""
    if memory.is_file():
        available = _read_fields(memory).get("MemAvailable:")
        if available is not None:
            return available * 1024
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def _list_limits(group: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """What the control group leaves, if it has a limit. Pages of files that nothing has used of
    late (`inactive_file`) are given up when memory is needed, so they count as free."""
    limit, used, parts = group / "memory.max", group / "memory.current", group / "memory.stat"
    if not limit.is_file() or not used.is_file() or not limit.read_text().strip().isdecimal():
        return []
    cached = _read_fields(parts).get("inactive_file", 0) if parts.is_file() else 0
    return [max(0, int(limit.read_text()) - int(used.read_text()) + cached)]


def _read_fields(path: Path) -> dict[str, int]:
    """The lines `NAME NUMBER ...` of a file of the kernel."""
    lines = (line.split() for line in path.read_text(encoding="ascii").splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}
