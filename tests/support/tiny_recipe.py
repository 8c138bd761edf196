"""A recipe that completes all its phases in a few seconds."""

from pathlib import Path

import pytest

TINY = [
    "threads=1",
    "warmup.steps=3",
    "warmup.batch_size=4",
    "steps=3",
    "rollout.prompts=2",
    "rollout.group_size=4",
    "rollout.log_every=2",
    "evaluation.prompts=3",
    "evaluation.samples_per_prompt=2",
    "network.hidden_size=16",
    "network.num_heads=2",
    "network.num_kv_heads=1",
    "network.intermediate_size=16",
]


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    """Arguments of `ludic train` that write below the folder of the test."""
    return [*TINY, f"output={tmp_path}", "name=run"]
