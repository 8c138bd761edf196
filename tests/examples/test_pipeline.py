"""The example with actors and a trainer learns, and its trainer goes on from its checkpoint."""

import asyncio
import importlib.util
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "pipeline.py"


@pytest.mark.integration
async def test_the_example_learns_and_resumes(redis_server, tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("pipeline_example", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.setattr(example, "URL", redis_server.url)
    actor = asyncio.create_task(example.Actor(example.WeightFolder(tmp_path / "weights")).run())
    rewards = await example.train(tmp_path, steps=20)
    rewards += await example.train(tmp_path, steps=60)
    actor.cancel()
    assert len(rewards) == 60
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 1.0  # from 0.1 to over 0.3 on average
