"""The name that these functions are documented under; they live in `ludic.inference.vllm.launch`."""

from ludic.inference.vllm.launch import start_vllm_server, wait_for_vllm_health

__all__ = ["start_vllm_server", "wait_for_vllm_health"]
