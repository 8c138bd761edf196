"""The documented path of these functions, which are in `ludic.inference.vllm.launch`."""

from ludic.inference.vllm.launch import collect_proc_output, start_vllm_server, stop_vllm_server, wait_for_vllm_health

__all__ = ["collect_proc_output", "start_vllm_server", "stop_vllm_server", "wait_for_vllm_health"]
