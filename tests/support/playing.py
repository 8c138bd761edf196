"""Agents, environments and a tiny model for rollout tests."""

import asyncio
from functools import cache
from typing import ClassVar

import torch

from ludic.agents import Agent
from ludic.context import FullDialog
from ludic.envs import SingleAgentEnv
from ludic.inference import ChatCompletionRequest, InferenceSpec, ReturnSpec, SamplingParams
from ludic.interaction import SingleAgentProtocol
from ludic.parsers import ParseResult
from ludic.types import ChatResponse, StepOutcome

FOR_RL = InferenceSpec(sampling=SamplingParams(temperature=1.0, max_tokens=4), return_=ReturnSpec.for_rl())


def verbatim(text):
    return ParseResult(text, 0.0, None)


class ScriptedClient:
    """Returns the given texts in turn, with token ids and log-probabilities. Records the
    requests."""

    def __init__(self, *texts, finish_reason="stop", delay=None):
        self.texts, self.finish_reason, self.delay = texts, finish_reason, delay
        self.requests = []

    async def complete(self, request: ChatCompletionRequest):
        self.requests.append(request)
        if self.delay is not None:
            await self.delay()
        text = self.texts[(len(self.requests) - 1) % len(self.texts)]
        ids = list(text.encode())
        response = ChatResponse(text, ids, [-0.5] * len(ids), self.finish_reason, [1, 2])
        return response, {
            "prompt_token_ids": [1, 2],
            "raw_response": {"choices": [{"token_ids": ids, "logprobs": {}, "index": 0}]},
        }


def protocol(client, **agent_settings):
    agent = Agent(client=client, model="m", ctx=FullDialog(), **{"parser": verbatim, **agent_settings})
    return SingleAgentProtocol(agent)


class Counting(SingleAgentEnv):
    """Ends with reward 1 after `goal` steps. Records its seed, its actions and whether it was
    closed."""

    made: ClassVar[list] = []

    def __init__(self, goal=1, truncate=False):
        super().__init__()
        self.goal, self.truncate, self.actions, self.seed, self.closed = goal, truncate, [], None, False
        Counting.made.append(self)

    def env_reset(self, *, seed=None):
        self.seed = seed
        return f"start {seed}", {}

    def env_step(self, action):
        self.actions.append(action)
        done = len(self.actions) >= self.goal
        return StepOutcome(f"step {len(self.actions)}", float(done), done and self.truncate, done and not self.truncate, {"n": 1})

    def env_current_obs(self):
        return f"step {len(self.actions)}"

    def close(self):
        self.closed = True


@cache
def tokenizer():
    from ludic.models.byte_tokenizer import make_byte_tokenizer

    return make_byte_tokenizer()


def tiny_model(seed=0, **settings):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 259,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 64,
        "initializer_range": 0.3,  # far from uniform, so that errors become visible
        "eos_token_id": 2,
        "max_position_embeddings": 64,
        **settings,
    }
    return Qwen2ForCausalLM(Qwen2Config(**sizes)).eval()


def play(awaitable):
    return asyncio.run(awaitable)
