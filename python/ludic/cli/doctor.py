"""`ludic doctor`: installed versions, the machine's devices, and what each optional extra adds."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

REQUIRED = ("ludic", "torch", "transformers", "peft", "numpy", "safetensors", "hydra-core", "rich", "openai")

# extra: (modules that it installs, what it adds); without extras that `ludic` itself does not use
EXTRAS: dict[str, tuple[tuple[str, ...], str]] = {
    "wandb": (("wandb",), "WandbLogger sends metrics to Weights & Biases"),
    "mlflow": (("mlflow",), "MlflowLogger writes metrics to MLflow"),
    "tensorboard": (("tensorboard",), "TensorboardLogger writes metrics for TensorBoard"),
    "trackio": (("trackio",), "TrackioLogger sends metrics to Trackio, local or remote"),
    "datasets": (("datasets",), "training data by hub id, from parquet files and from folders"),
    "ray": (("ray",), "place.on=ray: the processes of a run on the machines of a cluster"),
    "math": (("math_verify",), "the verifiers `gsm8k` and `math`, by math-verify in processes with a deadline"),
}


def examine() -> dict[str, Any]:
    """Collect the report. Changes nothing and uses no network."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _find_version(name) for name in REQUIRED},
        "core": _find_core_version(),
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
    from rich.console import Console

    console = Console(soft_wrap=True, highlight=False)
    console.print(f"[bold]Python[/] {report['python']} on {report['platform']}")
    console.print("\n[bold]Packages[/]")
    for name, installed in report["packages"].items():
        console.print(f"  {name:<14}{installed or '[red]missing[/]: pip install ' + name}")
    console.print(f"  {'core':<14}{report['core'] or '[red]missing[/]: `make setup` builds the extension'}")
    console.print("\n[bold]Devices[/]")
    for line in _describe_devices(report["devices"]):
        console.print(f"  {line}")
    console.print("\n[bold]Optional extras[/]")
    for name, extra in report["extras"].items():
        state = "[green]installed[/]" if extra["installed"] else f"pip install 'ludic\\[{name}]'"
        console.print(f"  {name:<14}{extra['adds']}: {state}")


def show_memory(arguments: Sequence[str], *, as_json: bool) -> None:
    """Print what a run with these settings needs of memory, as a table or as one JSON object."""
    from ludic.cli.console import open_console, quiet_libraries
    from ludic.cli.doctor_memory import advise, show_advice

    quiet_libraries()
    with open_console(as_json) as console:
        report = advise(arguments)
        if not as_json:
            show_advice(report, console)
    if as_json:
        print(json.dumps(report, indent=2))


def _find_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _find_core_version() -> str | None:
    try:
        from ludic import _core
    except ImportError:
        return None
    return _core.__version__


def _list_devices() -> dict[str, Any]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    devices: dict[str, Any] = {"cpus": usable, "torch_threads": None, "cuda": [], "mps": False}
    if find_spec("torch") is None:
        return devices
    import torch

    devices["torch_threads"] = torch.get_num_threads()
    devices["mps"] = torch.backends.mps.is_available()
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            devices["cuda"].append({"name": properties.name, "memory_gb": round(properties.total_memory / 2**30, 1)})
    return devices


def _describe_devices(devices: dict[str, Any]) -> list[str]:
    lines = [f"CPU: {devices['cpus']} usable cores; torch takes {devices['torch_threads']} threads (the recipes set `threads`)"]
    lines += [f"CUDA {i}: {gpu['name']}, {gpu['memory_gb']} GB" for i, gpu in enumerate(devices["cuda"])]
    lines += [] if devices["cuda"] else ["CUDA: none"]
    return lines + (["MPS: available; set trainer.model_device=mps"] if devices["mps"] else [])
