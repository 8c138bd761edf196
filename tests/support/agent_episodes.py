"""Plays episodes of agents against a model that always answers "yes"."""

from pathlib import Path

import pytest
from chat_tokenizers import bpe_tokenizer
from scripted_sampler import ScriptedSampler

from ludic.envs import DatasetQAEnv
from ludic.envs.code_exec.bubblewrap import is_bubblewrap_available
from ludic.inference import InferenceSpec, ReturnSpec, SamplingParams
from ludic.interaction.agent_program import AgentUse
from ludic.training.rollouts.engine import RolloutEngine
from ludic.training.types import EnvSpec, ProtocolSpec, RolloutRequest

FETCHED = Path(__file__).parents[2] / "target" / "bubblewrap"
REACH = """
import socket
def reach():
    found = {}
    for name, address in {"network": ("1.1.1.1", 53), "ssh": ("127.0.0.1", 22), "own": ("127.0.0.1", 8000)}.items():
        try:
            socket.create_connection(address, 1).close()
            found[name] = True
        except OSError:
            found[name] = False
    return found
"""
ASK = """
import json, os, sys, urllib.request
def ask(text):
    body = json.dumps({"model": os.environ["LUDIC_MODEL"], "messages": [{"role": "user", "content": text}]}).encode()
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(asked, timeout=20))["choices"][0]["message"]["content"]
"""
ROW = {"prompt": "question", "question": "question", "answer": "yes", "size": 3, "kind": "image"}


def quoted(program):
    return program.replace("{", "{{").replace("}", "}}")


def needs_bubblewrap():
    if not is_bubblewrap_available():
        pytest.skip("no bwrap: `make bubblewrap` fetches it")


async def play(agent, *, count=1, row=ROW, **settings):
    use = AgentUse(agent, **settings)
    sampler = ScriptedSampler(bpe_tokenizer(), lambda *_: "yes")
    engine = RolloutEngine(
        env_registry={"question": lambda: DatasetQAEnv(row)},
        protocol_registry={"agent": lambda: use.make_protocol(sampler, system_prompt=None)},
        max_retries=0,
    )
    inference = InferenceSpec(SamplingParams(1.0, 40), ReturnSpec.for_rl())
    requests = [
        RolloutRequest(
            EnvSpec("question"), ProtocolSpec("agent"), sampling_seed=i, inference=inference, meta={"group_id": str(i)}
        )
        for i in range(count)
    ]
    try:
        return await engine.generate_rollouts(requests, max_steps=1, for_training=True)
    finally:
        use.close()
