"""What a call of an agent costs the gateway: processor time of this process, without sampling.

    python -m benches.python.gateway --sessions 1000 --turns 4
    python -m benches.python.gateway --sessions 100 --turns 30

The agents are in another process. Each session sends its whole history with ten tools at every
turn, as programs do, and the result of a tool of `--chars` characters is new. Sampling is a sleep.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import resource
import time
from pathlib import Path
from typing import Any

import msgspec

from ludic.columns import join_ids
from ludic.inference.client import Sampled
from ludic.inference.gateway.gateway import Gateway
from ludic.inference.gateway.session import Limits, Session
from ludic.inference.request import SamplingParams
from ludic.training.rollouts.episodes import trace_columns
from ludic.types import TokenTrace

TEXT = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"tool_{i}",
            "description": "does a thing " * 8,
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "n": {"type": "integer"}},
                "required": ["path"],
            },
        },
    }
    for i in range(10)
]
ANSWER = 'I will read the file.\n<tool_call>\n{"name": "tool_1", "arguments": {"path": "src/main.py", "n": 3}}\n</tool_call>'
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n'
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer() -> Any:
    """A BPE of 4,096 tokens, trained on the pages of the documentation."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=4096, special_tokens=special, initial_alphabet=alphabet))
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.chat_template = TEMPLATE
    return made


class Sleeper:
    """A client whose every answer is the same after a fifth of a second."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.ids = [*tokenizer(ANSWER, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]

    async def complete_tokens(self, prompt_token_ids: Any, *, sampling: Any = None, seed: Any = None) -> TokenTrace:
        return (await self.sample_tokens(prompt_token_ids)).trace

    async def sample_tokens(self, prompt_token_ids: Any, *, sampling: Any = None, seed: Any = None) -> Sampled:
        await asyncio.sleep(0.2)
        trace = TokenTrace.from_arrays(prompt_token_ids, self.ids, [-0.5] * len(self.ids), "stop")
        return Sampled(trace, ended=True, policy_version=0)


def play_sessions(port: int, keys: list[str], turns: int, chars: int) -> None:
    """The agents: one connection each, the whole history in every request."""

    async def episode(number: int, key: str) -> None:
        rng = random.Random(number)
        await asyncio.sleep(2 * rng.random())
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        messages: list[Any] = [{"role": "system", "content": "You are an agent. " * 50}]
        messages.append({"role": "user", "content": f"Task {number}: {TEXT[:1000]}"})
        for _ in range(turns):
            body = msgspec.json.encode({"model": "policy", "messages": messages, "tools": TOOLS})
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
            length = next(int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length"))
            message = msgspec.json.decode(await reader.readexactly(length))["choices"][0]["message"]
            start = rng.randrange(len(TEXT) - chars)
            result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": TEXT[start : start + chars]}
            messages += [message, result]
        writer.close()

    async def everyone() -> None:
        await asyncio.gather(*(episode(number, key) for number, key in enumerate(keys)))

    asyncio.run(everyone())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--chars", type=int, default=1000)
    given = parser.parse_args()
    client = Sleeper(make_tokenizer())
    with Gateway(client, client.tokenizer) as gateway:
        limits, sampling = Limits(max_calls=10**6), SamplingParams(1.0, 200)
        sessions: list[Session] = [gateway.open(sampling=sampling, seed=i, limits=limits) for i in range(given.sessions)]
        context, keys = multiprocessing.get_context("spawn"), [session.api_key for session in sessions]
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        agents = context.Process(target=play_sessions, args=(gateway._bound, keys, given.turns, given.chars))
        before, began = time.process_time(), time.monotonic()
        agents.start()
        agents.join()
        spent, seconds = time.process_time() - before, time.monotonic() - began
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 1024
    calls = [call for session in sessions for call in session.calls]
    ids = [join_ids(*trace_columns(call.trace)[:2]) for call in calls]
    tokens = sum(len(each) - call.shared for each, call in zip(ids, calls, strict=True))
    exact = sum(call.parent is not None for call in calls)
    print(
        f"{len(calls)} calls of {given.sessions} sessions in {seconds:.1f} s: {1e3 * spent / max(1, len(calls)):.2f} ms of processor time "
        f"a call; {exact} continue another of {len(calls) - len(sessions)}; calls of up to {max(map(len, ids))} tokens, {tokens} different "
        f"ones; {grown:.0f} MB more"
    )


if __name__ == "__main__":
    main()
