"""Architectures and attention implementations, with a fake GPU."""

import importlib.util

import pytest
import torch

from ludic.training import hardware


@pytest.fixture
def gpu(monkeypatch):
    """A fake GPU with this compute capability, CUDA version and these flash-attention packages."""

    def pretend(capability, cuda="12.8", packages=("flash_attn", "flash_attn_3")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in packages else None)

    return pretend


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((12, 0), "blackwell"),
        ((10, 0), "blackwell"),
        ((13, 0), "blackwell"),
        ((9, 0), "hopper"),
        ((9, 5), "hopper"),
        ((8, 9), "ada"),
        ((8, 6), "ampere"),
        ((8, 2), "ampere"),
        ((7, 5), "turing"),
        ((7, 0), "volta"),
        ((6, 1), "older"),
    ],
)
def test_the_architecture_follows_from_the_compute_capability(gpu, capability, name):
    gpu(capability)
    assert hardware.detect_gpu_architecture() == name


@pytest.mark.parametrize(
    ("capability", "cuda", "packages", "implementation"),
    [
        ((9, 0), "12.3", ("flash_attn", "flash_attn_3"), "flash_attention_3"),
        ((9, 0), "12.2", ("flash_attn", "flash_attn_3"), "flash_attention_2"),
        ((9, 0), "12.8", ("flash_attn",), "flash_attention_2"),
        ((8, 0), "11.6", ("flash_attn", "flash_attn_3"), "flash_attention_2"),
        ((8, 0), "11.5", ("flash_attn",), "sdpa"),
        ((7, 5), "12.8", ("flash_attn",), "sdpa"),
        ((10, 0), "12.8", ("flash_attn", "flash_attn_3"), "sdpa"),
        ((9, 0), "12.8", (), "sdpa"),
    ],
)
def test_the_attention_implementation_follows_from_gpu_and_packages(gpu, capability, cuda, packages, implementation):
    gpu(capability, cuda, packages)
    assert hardware.get_optimal_attention_impl() == implementation
    assert hardware.get_optimal_attention_impl(disable_flash_attn=True) == "sdpa"


def test_a_device_with_an_index_is_recognised_as_a_gpu(gpu):
    gpu((8, 0))
    assert hardware.configure_flash_attention("cuda:0") == hardware.configure_flash_attention("cuda") == "flash_attention_2"
    assert hardware.configure_flash_attention("cuda:0", disable_flash_attn=True) == "sdpa"


def test_without_a_gpu_nothing_is_detected(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert hardware.detect_gpu_architecture() is None
    assert hardware.get_cuda_version() is None
    assert hardware.get_optimal_attention_impl() == "sdpa"
    assert hardware.configure_flash_attention("cuda") == "eager"
    assert hardware.configure_flash_attention("cpu") == "eager"
    with caplog.at_level("INFO"):
        hardware.log_hardware_info()
    assert "attention: sdpa" in caplog.text


def test_cuda_versions_are_parsed(gpu):
    gpu((9, 0), "13.0.1")
    assert hardware.get_cuda_version() == (13, 0)
