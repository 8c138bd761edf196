"""Engines that load a checkpoint, and their sync. The code is in `ludic.distributed.engines`."""

from __future__ import annotations

from ludic.distributed.engines import (
    InferenceEngine as InferenceEngine,
    SGLangEngine as SGLangEngine,
    VLLMEngine as VLLMEngine,
    sync_returned_engines as sync_returned_engines,
    sync_weights_to_engines as sync_weights_to_engines,
    update_sglang_weights_from_disk as update_sglang_weights_from_disk,
    update_vllm_weights_from_disk as update_vllm_weights_from_disk,
)
