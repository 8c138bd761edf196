"""The GPU: its architecture, and the attention implementation for it."""

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
