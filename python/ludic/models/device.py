"""The device and type of a model in words."""

from __future__ import annotations

from typing import Any

import torch


def describe_device(model: Any) -> str:
    """Such as `cpu, 2 threads, float32` or `cuda:0 (NVIDIA H100), bfloat16`, for the model's
    first parameter."""
    parameter = next(model.parameters())
    device, dtype = parameter.device, str(parameter.dtype).removeprefix("torch.")
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)}), {dtype}"
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return f"{device}{threads}, {dtype}"
