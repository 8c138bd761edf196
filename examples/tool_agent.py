"""An agent learns to look things up instead of guessing. No download; about 75 s of one core.

A key is asked for; what is stored under it is hidden, and new in every episode. The tool `look`
tells. The agent is a `ReActAgent`: it may call the tool, in the format of Hermes and Qwen models,
before it answers. A small model first imitates a teacher who mostly guesses; then it is reinforced
by nothing but whether the final answer was right. The call of the tool comes before that answer, in
a model call of its own: it is a step of the same rollout, so it is a training sample with the same
credit.

    python examples/tool_agent.py
    python examples/tool_agent.py --answers-only  # no credit for calls
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Sequence

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from ludic.agents import ReActAgent
from ludic.context import FullDialog
from ludic.distributed.publisher import LocalPublisher
from ludic.envs import DatasetQAEnv
from ludic.inference import ChatClient, ChatCompletionRequest, InferenceSpec, LocalChatClient, ReturnSpec, SamplingParams
from ludic.inference.prompts.template import ChatTemplate
from ludic.interaction import SingleAgentProtocol
from ludic.models.byte_tokenizer import EOS_ID, PAD_ID, VOCAB_SIZE, make_byte_tokenizer
from ludic.parsers import ParseResult
from ludic.training import (
    ConstantCredit,
    EnvSpec,
    ProtocolSpec,
    RolloutBatchSource,
    RolloutEngine,
    RolloutRequest,
    SAWBatch,
    SAWItem,
    Trainer,
    TrainerConfig,
    make_grpo,
    make_sft,
)
from ludic.training.batching import GRPORequestStrategy
from ludic.types import ChatResponse

KEYS = "abcdefgh"
GROUP, PROMPTS = 8, 12
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}"
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}"
    '{% for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}</tool_call>{% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def make_protocol(client: ChatClient, store: dict[str, str]) -> SingleAgentProtocol:
    """A protocol whose agent has a tool that reads the store of this episode."""

    def look(key: str) -> str:
        """What is stored under a key."""
        return store.get(key, "nothing")

    agent = ReActAgent(
        [look], 3, client=client, model="small", ctx=FullDialog(), parser=lambda text: ParseResult(text, 0.0, None)
    )
    return SingleAgentProtocol(agent)


def make_engine(client: ChatClient) -> RolloutEngine:
    return RolloutEngine(
        env_registry={"question": lambda sample: DatasetQAEnv(sample)},
        protocol_registry={"react": lambda store: make_protocol(client, store)},
    )


def requests(rng: random.Random, count: int, *, temperature: float = 1.0) -> list[RolloutRequest]:
    """Questions, each with its own store that environment and tool share."""
    made = []
    for _ in range(count):
        store = {key: rng.choice(KEYS) for key in KEYS}
        key = rng.choice(KEYS)
        request = RolloutRequest(
            env=EnvSpec("question", {"sample": {"question": key, "answer": store[key]}}),
            protocol=ProtocolSpec("react", {"store": store}),
            sampling_seed=rng.randrange(2**31),
            inference=InferenceSpec(SamplingParams(temperature=temperature, max_tokens=80), ReturnSpec.for_rl()),
        )
        made.append(request)
    return made


class Teacher(ChatClient):
    """A scripted model that calls the tool in a third of the episodes and guesses in the others."""

    def __init__(self, tokenizer, rng: random.Random) -> None:
        self._tokenizer, self._template, self._rng = tokenizer, ChatTemplate(tokenizer), rng

    async def complete(self, request: ChatCompletionRequest):
        last = request.messages[-1]
        message = {"role": "assistant", "content": last["content"] if last["role"] == "tool" else self._rng.choice(KEYS)}
        text = message["content"]
        if last["role"] == "user" and self._rng.random() < 1 / 3:
            arguments = json.dumps({"key": last["content"]})
            message["tool_calls"] = [
                {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": arguments}}
            ]
            text, message["content"] = f'<tool_call>{{"name": "look", "arguments": {arguments}}}</tool_call>', None
        prompt = self._ids(self._template.render(request.messages, request.tools.tools if request.tools else []))
        ids = [*self._ids(text), EOS_ID]
        return ChatResponse(text, ids, [0.0] * len(ids), "stop", prompt), {"raw_response": {"choices": [{"message": message}]}}

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]


class Reshuffled:
    """Batches of the same samples in random order. Answers after a tool call, a sixth of all
    samples, are drawn four times as often."""

    def __init__(self, items: Sequence[SAWItem], batch_size: int, rng: random.Random) -> None:
        self._items = [item for item in items for _ in range(4 if item.meta["step_index"] else 1)]
        self._batch_size, self._rng = batch_size, rng

    async def next_batch(self) -> SAWBatch:
        return SAWBatch(self._rng.sample(self._items, self._batch_size))


def make_model() -> tuple[Qwen2ForCausalLM, object]:
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=192,
        max_position_embeddings=512,
        initializer_range=0.08,  # with 0.02, copying the tool's result is not learnt on every seed
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
    )
    return Qwen2ForCausalLM(config), tokenizer


async def measure(client: ChatClient, episodes: int = 200) -> dict[str, float]:
    """Evaluate the policy on a fixed set of questions."""
    rollouts = await make_engine(client).generate_rollouts(
        requests(random.Random("held out"), episodes), max_steps=1, concurrency=256
    )
    looked = sum(any(step.info.get("intermediate_call") for step in rollout.steps) for rollout in rollouts)
    return {"right": sum(r.total_reward for r in rollouts) / episodes, "looked": looked / episodes}


def show(stats: dict[str, float]) -> None:
    shown = {name: stats[f"train/{name}"] for name in ("step", "loss", "avg_total_reward", "avg_completion_length")}
    print("  ".join(f"{name} {value:.3g}" for name, value in shown.items()), flush=True)


async def run(*, seed: int = 0, warmup: int = 800, steps: int = 45, answers_only: bool = False) -> tuple[dict, dict]:
    """Imitate, measure, reinforce, measure. Returns the measurements before and after."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    model, tokenizer = make_model()
    client = LocalChatClient(model, tokenizer)
    sizes = {"model_device": "cpu", "max_seq_len": 512, "micro_token_budget": 16384, "pad_token_id": PAD_ID, "betas": (0.9, 0.95)}

    teacher = make_engine(Teacher(tokenizer, rng))
    lessons = await teacher.generate_batch(requests(rng, 1024), credit_assigner=ConstantCredit(), concurrency=64)
    imitation = Trainer(
        model=model,
        algo=make_sft(normalizer="tokens"),
        batch_source=Reshuffled(lessons.items, 24, rng),
        cfg=TrainerConfig(lr=3e-3, lr_scheduler_type="cosine", lr_min_ratio=0.05, warmup_steps=20, sync_every_steps=0, **sizes),
        total_training_steps=warmup,
    )
    started = time.process_time()
    await imitation.train(warmup, log_every=100, log_fn=show)
    before = await measure(client)
    print(f"imitated in {time.process_time() - started:.0f} s of processor time: {before}")

    algo = make_grpo(group_size=GROUP, normalizer="tokens")
    reinforcement = Trainer(
        model=model,
        algo=algo,
        batch_source=RolloutBatchSource(
            engine=make_engine(client),
            requests_fn=lambda: GRPORequestStrategy(GROUP).expand(requests(rng, PROMPTS)),
            algorithm=algo,
            max_steps=1,
            concurrency=GROUP * PROMPTS,
            sample_filter=(lambda item: not item.meta.get("intermediate_call")) if answers_only else None,
        ),
        publisher=LocalPublisher(client),
        cfg=TrainerConfig(lr=1e-3, lr_scheduler_type="linear", lr_min_ratio=0.1, minibatches_per_batch=2, **sizes),
        total_training_steps=steps,
    )
    started = time.process_time()
    await reinforcement.train(steps, log_every=5, log_fn=show)
    after = await measure(client)
    print(f"reinforced in {time.process_time() - started:.0f} s of processor time: {after}")
    return before, after


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warmup", type=int, default=800, help="steps of imitation")
    parser.add_argument("--steps", type=int, default=45, help="steps of reinforcement")
    parser.add_argument("--answers-only", action="store_true", help="leave the calls of the tool out of training")
    asyncio.run(run(**vars(parser.parse_args())))
