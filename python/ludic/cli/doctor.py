"""`ludic doctor`: installed versions, the machine's devices, and what each optional extra adds.
With `model=M`: what a run would need of memory, what fits, and which settings help.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from ludic.distribution import DISTRIBUTION, describe_namesake, find_version, install_command

REQUIRED = (DISTRIBUTION, "torch", "transformers", "peft", "numpy", "safetensors", "hydra-core", "rich", "openai")

# extra: (modules that it installs, what it adds); without extras that `ludic` itself does not use
EXTRAS: dict[str, tuple[tuple[str, ...], str]] = {
    "wandb": (("wandb",), "WandbLogger sends metrics to Weights & Biases"),
    "mlflow": (("mlflow",), "MlflowLogger writes metrics to MLflow"),
    "tensorboard": (("tensorboard",), "TensorboardLogger writes metrics for TensorBoard"),
    "trackio": (("trackio",), "TrackioLogger sends metrics to Trackio, local or remote"),
    "datasets": (("datasets",), "training data by hub id, from parquet files and from folders"),
    "ray": (("ray",), "place.on=ray: the processes of a run on the machines of a cluster"),
    "gguf": (("gguf",), "`ludic convert`: GGUF files as folders in Hugging Face layout"),
    "reasoning-gym": (("reasoning_gym",), "task.kind=reasoning_gym: problems with verifiers"),
    "math": (("math_verify",), "the verifiers `gsm8k` and `math`, by math-verify in processes with a deadline"),
    "ifeval": (("lm_eval",), "the verifier `ifeval`, by lm-evaluation-harness in processes with a deadline"),
}


def examine() -> dict[str, Any]:
    """Collect the report. Changes nothing and uses no network."""
    core: str | None = None
    with suppress(ImportError):
        from ludic import _core

        core = _core.__version__
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: find_version(name) for name in REQUIRED},
        "namesake": describe_namesake(),
        "core": core,
        "devices": _list_devices(),
        "extras": {
            name: {"installed": all(find_spec(module) is not None for module in modules), "adds": adds}
            for name, (modules, adds) in EXTRAS.items()
        },
    }


def show(report: dict[str, Any], *, as_json: bool) -> None:
    """Print the report to standard output, as one table per topic or as one JSON object."""
    if as_json:
        print(json.dumps(report, indent=2))
        return
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"[bold]Python[/] {report['python']} on {report['platform']}")
    console.print("\n[bold]Packages[/]")
    for name, installed in report["packages"].items():
        console.print(f"  {name:<14}{installed or '[red]missing[/]: pip install ' + name}")
    console.print(f"  {'core':<14}{report['core'] or '[red]missing or stale[/]: `make setup` in a clone builds the extension'}")
    if report["namesake"]:
        console.print(f"  [red]{report['namesake']}[/]")
    console.print("\n[bold]Devices[/]")
    devices = report["devices"]
    console.print(
        f"  CPU: {devices['cpus']} usable cores; torch takes {devices['torch_threads']} threads, a small model one (`threads`)"
    )
    if devices["cpu_bf16"] is not None:
        console.print(f"  CPU, bfloat16: {_BF16[devices['cpu_bf16']]}", markup=False)
    for index, gpu in enumerate(devices["cuda"]):
        console.print(f"  CUDA {index}: {gpu['name']}, {gpu['memory_gb']} GB")
    if not devices["cuda"]:
        console.print("  CUDA: none")
    if devices["mps"]:
        console.print("  MPS: available; set trainer.model_device=mps")
    console.print("\n[bold]Optional extras[/]")
    for name, extra in report["extras"].items():
        state = "[green]installed[/]" if extra["installed"] else escape(install_command(name))
        console.print(f"  {name:<14}{extra['adds']}: {state}")


def show_memory(arguments: Sequence[str], *, as_json: bool) -> None:
    """Print what a run with these settings needs of memory, as a table or as one JSON object."""
    from ludic.runs.console import open_console, quiet_libraries

    quiet_libraries()
    with open_console(as_json) as console:
        report = advise(arguments)
        if not as_json:
            show_advice(report, console)
    if as_json:
        print(json.dumps(report, indent=2))


_BF16 = {
    True: "has instructions for it; try trainer.mixed_precision_dtype=bf16 for a large model",
    False: "has no instructions for it, so it is many times slower than float32; leave mixed_precision_dtype and dtype as they are",
}


def _list_devices() -> dict[str, Any]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    devices: dict[str, Any] = {"cpus": usable, "torch_threads": None, "cpu_bf16": None, "cuda": [], "mps": False}
    if find_spec("torch") is None:
        return devices
    import torch

    devices["torch_threads"] = torch.get_num_threads()
    if hasattr(torch.cpu, "get_capabilities"):  # older releases of torch lack it
        devices["cpu_bf16"] = any(has for name, has in torch.cpu.get_capabilities().items() if name.endswith("bf16"))
    devices["mps"] = torch.backends.mps.is_available()
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            devices["cuda"].append({"name": properties.name, "memory_gb": round(properties.total_memory / 2**30, 1)})
    return devices


GIB, MIB = 2**30, 2**20
RUNTIME_BYTES = {"cpu": 500 * 2**20, "cuda": 1000 * 2**20}
"""The memory of Python, torch and the driver, roughly."""
MARGIN = 0.9
"""The share of the memory that may be used: allocators keep more than is requested."""
PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "kv_cache", "training", "sampling")
TITLES = ("weights", "grads", "optim", "activ", "logits", "KV", "training", "sampling")
"""Of the columns, one for each of `PARTS`."""


def advise(arguments: Sequence[str]) -> dict[str, Any]:
    """The report for the settings of a run of `ludic train`, or of the command that comes first:
    bytes for each part, for the settings as they are, in each dtype, and with each remedy. Loads no
    weights."""
    from ludic.runs.directory import DIRECTORIES, RunDirectory
    from ludic.runs.memory_estimate import MemoryEstimator, Settings

    command = DIRECTORIES.get(arguments[0], RunDirectory)
    recipe = command.compose(arguments[arguments[0] in DIRECTORIES :])
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
        "estimates": [
            {
                "settings": name,
                **{f"{part}_bytes": getattr(estimate, part) for part in PARTS},
                "peak_bytes": estimate.peak,
                "fits": estimate.peak <= room,
            }
            for name, estimate in [("as set", own), *remedies]
        ],
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
