"""The GPU: its architecture, the attention implementation for it, its peak in FLOPs per second."""

from __future__ import annotations

import importlib.util
import logging

import torch

logger = logging.getLogger(__name__)

GPU_ARCHITECTURES: dict[tuple[int, int], str] = {
    (12, 1): "blackwell",
    (12, 0): "blackwell",
    (11, 0): "blackwell",
    (10, 3): "blackwell",
    (10, 0): "blackwell",
    (9, 0): "hopper",
    (8, 9): "ada",
    (8, 7): "ampere",
    (8, 6): "ampere",
    (8, 0): "ampere",
    (7, 5): "turing",
    (7, 0): "volta",
}
"""Compute capability to architecture."""

PEAK_TFLOPS: dict[str, tuple[float, float, float]] = {
    "GB200": (2500, 1250, 80),
    "B200": (2250, 1125, 75),
    "H200": (989.4, 494.7, 67),
    "H100 PCIe": (756, 378, 51),
    "H100": (989.4, 494.7, 67),
    "A100": (312, 156, 19.5),
    "A10": (125, 62.5, 31.2),
    "L40S": (362.05, 183, 91.6),
    "L4": (121, 60, 30.3),
    "RTX 4090": (165.2, 82.6, 82.6),
    "MI300X": (1307.4, 653.7, 163.4),
}
"""Peaks of a device in 10^12 FLOPs per second without sparsity, by words of its name: of bfloat16
and float16, of TF32, and of float32. From the data sheets and architecture papers of NVIDIA and
AMD, which give most peaks with sparsity: twice as much. GeForce: with float32 sums."""
OTHER_CHIPS = frozenset({"MIG", "NVL", "Laptop", "Max-Q", "D"})
"""Words in the names of slower variants, and of parts of a GPU, whose peaks are not known here."""

FLASH_2 = frozenset({"ampere", "ada", "hopper"})
FLASH_3 = frozenset({"hopper"})


def detect_gpu_architecture() -> str | None:
    """Return the architecture of the current GPU; None without CUDA. An unlisted compute capability
    counts as the next lower listed one; below 8.0 it is `older`."""
    if not torch.cuda.is_available():
        return None
    capability = torch.cuda.get_device_capability()
    if capability in GPU_ARCHITECTURES:
        return GPU_ARCHITECTURES[capability]
    if capability < (8, 0):
        return "older"
    return GPU_ARCHITECTURES[max(listed for listed in GPU_ARCHITECTURES if listed <= capability)]


def find_peak_tflops(device: torch.device | str, dtype: torch.dtype) -> float | None:
    """The peak of a device that computes in `dtype`, in 10^12 FLOPs per second; None if it is not
    in `PEAK_TFLOPS`. Float32 is TF32 where torch may round products to that."""
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return peak_of(torch.cuda.get_device_name(device), dtype, tf32=torch.get_float32_matmul_precision() != "highest")


def peak_of(name: str, dtype: torch.dtype, *, tf32: bool = False) -> float | None:
    """`find_peak_tflops` of a device of this name, such as `NVIDIA A100-SXM4-80GB`."""
    words = {*name.split(), *(word.partition("-")[0] for word in name.split())}
    found = [peaks for chip, peaks in PEAK_TFLOPS.items() if words >= set(chip.split())]
    if not found or words & OTHER_CHIPS or dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return None
    half, rounded, single = found[0]
    return half if dtype != torch.float32 else rounded if tf32 else single


def get_cuda_version() -> tuple[int, int] | None:
    """Return (major, minor) of the CUDA version that torch was built with; None without CUDA."""
    if not torch.cuda.is_available() or not torch.version.cuda:
        return None
    major, minor, *_ = [*torch.version.cuda.split("."), "0"]
    return int(major), int(minor)


def get_optimal_attention_impl(*, disable_flash_attn: bool = False) -> str:
    """Return the value for `attn_implementation`: `flash_attention_3` on Hopper (CUDA >= 12.3),
    `flash_attention_2` on Ampere and later (CUDA >= 11.6), each if its package is installed; else
    `sdpa`."""
    architecture, version = detect_gpu_architecture(), get_cuda_version()
    if disable_flash_attn or architecture is None or version is None or not _is_installed("flash_attn"):
        return "sdpa"
    if architecture in FLASH_3 and version >= (12, 3) and _is_installed("flash_attn_3"):
        return "flash_attention_3"
    if architecture in FLASH_2 and version >= (11, 6):
        return "flash_attention_2"
    return "sdpa"


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def configure_flash_attention(device: str | torch.device = "cuda", *, disable_flash_attn: bool = False) -> str:
    """Enable torch's flash kernels and return the attention implementation for a device; `eager` if
    the device is not a GPU of this machine."""
    if torch.device(device).type != "cuda" or not torch.cuda.is_available():
        return "eager"
    if not disable_flash_attn:
        torch.backends.cuda.enable_flash_sdp(True)
    return get_optimal_attention_impl(disable_flash_attn=disable_flash_attn)


def log_hardware_info() -> None:
    """Log torch, CUDA, the GPUs and the attention implementation."""
    logger.info("torch %s, CUDA %s, architecture %s", torch.__version__, get_cuda_version(), detect_gpu_architecture())
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        logger.info("GPU %d: %s, %.0f GiB", index, properties.name, properties.total_memory / 2**30)
    logger.info("attention: %s", get_optimal_attention_impl())
