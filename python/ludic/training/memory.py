"""Peaks of GPU memory in forward and backward passes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ludic.training.config import TrainerConfig

MIB = 2**20


@dataclass
class MemoryProfile:
    """One micro-batch's passes. Measures nothing unless `cfg.profile_memory` is set and the model is on a CUDA device."""

    device: torch.device | None
    before_mb: float = 0.0
    stats: dict[str, float] = field(default_factory=dict)

    @classmethod
    def start(cls, cfg: TrainerConfig) -> MemoryProfile:
        device = torch.device(cfg.model_device)
        if not cfg.profile_memory or device.type != "cuda":
            return cls(None)
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
        torch.cuda.reset_peak_memory_stats(self.device)

    def after_backward(self) -> dict[str, float]:
        """All measured keys, empty if nothing is measured. `activation` is what a peak adds to the memory before the passes."""
        if self.device is None:
            return {}
        peak = torch.cuda.max_memory_allocated(self.device) / MIB
        self.stats["gpu_backward_peak_mb"] = peak
        self.stats["gpu_backward_activation_peak_mb"] = peak - self.before_mb
        self.stats["gpu_mem_peak_mb"] = max(peak, self.stats["gpu_forward_peak_mb"])
        self.stats["gpu_activation_peak_mb"] = self.stats["gpu_mem_peak_mb"] - self.before_mb
        return dict(self.stats)
