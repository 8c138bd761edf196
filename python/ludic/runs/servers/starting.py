"""Starts a vLLM server of a run's policy, as the trainer does for itself (`inference=vllm`) and
`ludic worker server` for a run."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ludic.files.atomic import read_json
from ludic.inference.vllm.in_server.flags import WeightBackend
from ludic.models.positions import find_rope_limits
from ludic.recipes.processes import choose_logprob_convention
from ludic.recipes.schema import Recipe

SERVED_NAME = "policy"
"""The name of the policy in requests."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
"""The folder has all files."""
MODEL_S = 24 * 3600.0
"""How long the warm-up of the run may take, after which there is a policy to serve."""


def start_server(
    recipe: Recipe,
    folder: Path,
    host: str,
    port: int,
    *,
    weights: WeightBackend,
    log: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[Any]:
    """Start a server of the policy in `folder`. On a CPU it computes in float32, elsewhere in the
    policy's own dtype. `weights` is how new weights are sent; without `log` it writes where this
    process does."""
    from ludic.inference.vllm.launch import is_cpu_build, server_python, start_vllm_server

    section = recipe.inference
    python = server_python(section.python)
    cpu = section.device == "cpu" or (section.device == "auto" and is_cpu_build(python))
    convention = choose_logprob_convention(recipe.rollout)
    return start_vllm_server(
        str(folder),
        host,
        port,
        python=python,
        device="cpu" if cpu else "cuda",
        dtype=None if cpu else _read_dtype(folder),
        served_model_name=SERVED_NAME,
        logprobs_mode="processed_logprobs" if convention.processed else "raw_logprobs",
        weights=weights,
        max_model_len=_read_rope_limit(folder, recipe.trainer.max_seq_len),
        extra_args=section.server_args,
        env={**OFFLINE, **(env or {})},
        log_path=log,
    )


def _read_rope_limit(folder: Path, tokens: int) -> int | None:
    """The context for which vLLM chooses the RoPE that the trainer is pinned to. None means any."""
    config = SimpleNamespace(**read_json(folder / "config.json"))
    return min(find_rope_limits(config, tokens), default=None)


def _read_dtype(folder: Path) -> str:
    config = read_json(folder / "config.json")
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")
