"""The agents of examples/with_*.py look a key up and return its content. `make
accept-agents` installs the libraries in a folder of their own."""

import asyncio
import sys
from pathlib import Path

import pytest
from chat_tokenizers import bpe_tokenizer
from scripted_sampler import ScriptedSampler

from ludic.envs import DatasetQAEnv
from ludic.inference import InferenceSpec, ReturnSpec, SamplingParams
from ludic.recipes.agent_section import AgentSection, build_agent

CALL = '<tool_call>{"name": "look", "arguments":   {"key": "b"}}</tool_call>'


@pytest.mark.parametrize("isolate", ["thread", "fork"])
@pytest.mark.parametrize(("name", "library"), [("with_openai_agents", "agents"), ("with_pydantic_ai", "pydantic_ai")])
def test_an_agent_looks_a_key_up(name, library, isolate, monkeypatch):
    pytest.importorskip(library, reason="`make accept-agents` installs it")
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parents[2] / "examples")])
    use = build_agent(AgentSection(function=f"{name}:solve", isolate=isolate, sandbox="none"), context=None)
    sampler = ScriptedSampler(bpe_tokenizer(), lambda prompt, number: "yes" if number else CALL)
    protocol = use.make_protocol(sampler, system_prompt=None)
    row = {"prompt": "b", "question": "b", "answer": "yes", "store": {"b": "yes"}}
    inference = InferenceSpec(SamplingParams(1.0, 200), ReturnSpec.for_rl())
    try:
        [rollout] = asyncio.run(protocol.run(env=DatasetQAEnv(row), max_steps=1, sampling_seed=0, inference=inference))
    finally:
        use.close()
    assert [step.info["reason"] for step in rollout.steps] == ["root", "continues"]
    assert rollout.steps[0].info["tool_results"] == ["yes"]
    assert rollout.total_reward == 1.0
