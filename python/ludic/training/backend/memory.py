"""Peak memory, of the process and of the GPU in forward and backward passes."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass, field

import torch

from ludic.training.config import TrainerConfig

MIB = 2**20
_highest: dict[torch.device, float] = {}
"""Peak MiB allocated on each device, up to the last reset of torch's counter."""


def memory_peaks() -> dict[str, float]:
    """Peaks since the process started, in MiB: `process_peak_mb`, the resident memory, and if CUDA
    is in use `gpu_peak_mb`, what torch allocated on the current device. Takes microseconds, since
    both are counted anyway."""
    unit = 1 if sys.platform == "darwin" else 1024  # bytes of ru_maxrss
    peaks = {"process_peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        device = torch.device("cuda", torch.cuda.current_device())
        peaks["gpu_peak_mb"] = _update_highest(device)
    return peaks


def _update_highest(device: torch.device) -> float:
    indexed = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
    _highest[indexed] = max(_highest.get(indexed, 0.0), torch.cuda.max_memory_allocated(indexed) / MIB)
    return _highest[indexed]


@dataclass
class MemoryProfile:
    """GPU memory in the passes of one micro-batch. Measures nothing unless `cfg.profile_memory` is
    set and the model is on a CUDA device."""

    device: torch.device | None
    before_mb: float = 0.0
    stats: dict[str, float] = field(default_factory=dict)

    @classmethod
    def start(cls, cfg: TrainerConfig) -> MemoryProfile:
        device = torch.device(cfg.model_device)
        if not cfg.profile_memory or device.type != "cuda":
            return cls(None)
        _update_highest(device)
        torch.cuda.reset_peak_memory_stats(device)
        return cls(device, torch.cuda.memory_allocated(device) / MIB)

    def after_forward(self) -> None:
        if self.device is None:
            return
        peak = torch.cuda.max_memory_allocated(self.device) / MIB
        self.stats["gpu_forward_peak_mb"] = peak
        self.stats["gpu_forward_activation_peak_mb"] = peak - self.before_mb
        self.stats["gpu_mem_alloc_mb"] = torch.cuda.memory_allocated(self.device) / MIB
        self.stats["gpu_mem_reserved_mb"] = torch.cuda.memory_reserved(self.device) / MIB
        _update_highest(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)

    def after_backward(self) -> dict[str, float]:
        """All statistics; empty if nothing is measured. Keys with `activation` are peaks minus the
        memory before the passes."""
        if self.device is None:
            return {}
        peak = torch.cuda.max_memory_allocated(self.device) / MIB
        self.stats["gpu_backward_peak_mb"] = peak
        self.stats["gpu_backward_activation_peak_mb"] = peak - self.before_mb
        self.stats["gpu_mem_peak_mb"] = max(peak, self.stats["gpu_forward_peak_mb"])
        self.stats["gpu_activation_peak_mb"] = self.stats["gpu_mem_peak_mb"] - self.before_mb
        return dict(self.stats)
