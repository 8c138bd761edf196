"""The tool-agent example runs and learns."""

import asyncio
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "tool_agent.py"


def load():
    spec = importlib.util.spec_from_file_location("tool_agent_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.integration
def test_the_example_runs_from_the_command_line():
    command = [sys.executable, str(EXAMPLE), "--warmup", "2", "--steps", "2"]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    assert "imitated in" in output
    assert "reinforced in" in output


def test_the_teachers_tokens_match_the_prompts_of_the_model():
    """The teacher's tokens come from the template that the local client uses, and its calls run the
    tool."""
    example = load()
    _, tokenizer = example.make_model()
    teacher = example.Teacher(tokenizer, example.random.Random(0))
    rollouts = asyncio.run(example.make_engine(teacher).generate_rollouts(example.requests(example.random.Random(1), 40), 1))
    looked = [r for r in rollouts if len(r.steps) == 2]
    assert 0 < len(looked) < 40
    assert all(r.total_reward == 1.0 for r in looked)
    call, answer = looked[0].steps
    assert tokenizer.decode(call.trace.completion_token_ids[:-1]) == call.action
    assert tokenizer.decode(answer.trace.prompt_token_ids) == f"look;u:{call.prev_obs};a:{call.action};t:{answer.action};a:"


@pytest.mark.integration
def test_the_agent_learns_to_call_the_tool():
    before, after = asyncio.run(load().run(seed=0))
    assert before["looked"] < 0.6
    assert after["looked"] > 0.9
    assert after["right"] > 0.85
