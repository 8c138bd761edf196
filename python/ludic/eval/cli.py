"""Parts for evaluation scripts of one's own that use argparse. The command `ludic eval` is
another thing: it reads recipes."""

from __future__ import annotations

import argparse
import inspect
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from ludic.agents import Agent
from ludic.context import FullDialog
from ludic.context.base import ContextStrategy
from ludic.files.jsonl import write_jsonl as write_jsonl
from ludic.inference import ChatClient, InferenceSpec, ReturnSpec, SamplingParams
from ludic.interaction import SingleAgentProtocol
from ludic.parsers import Parser
from ludic.training.rollouts.engine import EnvFactory, RolloutEngine

PROTOCOL_KIND = "single_agent"
READY_S = 600.0
"""What a server may take until it samples, a download of the model included."""
STOP_S = 30.0
"""Between asking it to end and ending it."""
ContextFactory = Callable[..., ContextStrategy]
"""Takes the system prompt, or nothing."""


def add_common_eval_args(parser: argparse.ArgumentParser) -> None:
    """The flags that evaluation scripts share."""
    parser.add_argument("--model", default="Qwen/Qwen2.5-7B-Instruct", help="name of the model on the server")
    parser.add_argument("--host", default="127.0.0.1", help="host of the server")
    parser.add_argument("--port", type=int, default=8000, help="port of the server")
    parser.add_argument("--start-server", action="store_true", help="start a vLLM server for the time of the evaluation")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the most likely token")
    parser.add_argument("--max-tokens", type=int, default=512, help="tokens of an answer at most")
    parser.add_argument("--timeout-s", type=float, default=None, help="seconds that one model call may take")
    parser.add_argument("--concurrency", type=int, default=64, help="episodes played at once")
    parser.add_argument("--max-steps", type=int, default=1, help="steps of an episode at most")
    parser.add_argument("--out", default=None, help="file for the records, as JSON lines")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.7, help="share of the GPU's memory for the server")
    parser.add_argument("--max-model-len", type=int, default=None, help="longest context of the server, in tokens")


@contextmanager
def maybe_start_vllm(args: argparse.Namespace) -> Iterator[None]:
    """With `--start-server`, a vLLM server of `--model` at `--host` and `--port` that is ready
    within, and stopped after. Else nothing.

    It runs in the interpreter that `start_vllm_server` finds. Raises ConfigError for a port that is
    taken, and InferenceError with the end of the server's output where it does not come up.
    """
    if not getattr(args, "start_server", False):
        yield
        return
    from ludic.inference.vllm.launch import start_vllm_server, stop_vllm_server, wait_for_vllm_health

    proc = start_vllm_server(
        args.model,
        args.host,
        args.port,
        gpu_memory_utilization=args.gpu_memory_utilization,
        max_model_len=args.max_model_len,
    )
    try:
        wait_for_vllm_health(args.host, args.port, proc, READY_S)
        yield
    finally:
        stop_vllm_server(proc, STOP_S, ask=signal.SIGINT)


def build_single_agent_engine(
    *,
    client: ChatClient,
    model: str,
    parser: Parser,
    env_registry: Mapping[str, EnvFactory],
    system_prompt: str | None = None,
    stop_on_parse_error: bool = False,
    context_factory: ContextFactory | None = None,
) -> RolloutEngine:
    """An engine whose only protocol, `single_agent`, plays with one agent; each episode has a
    context of its own."""
    make_context = context_factory or FullDialog

    def make_protocol() -> SingleAgentProtocol:
        agent = Agent(client=client, model=model, ctx=_context(make_context, system_prompt), parser=parser)
        return SingleAgentProtocol(agent, stop_on_parse_error=stop_on_parse_error)

    return RolloutEngine(env_registry=env_registry, protocol_registry={PROTOCOL_KIND: make_protocol})


def inference_spec_from_cli(args: argparse.Namespace) -> InferenceSpec:
    """Temperature and token limit as given; token ids come back, log-probabilities do not."""
    sampling = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
    return InferenceSpec(sampling=sampling, return_=ReturnSpec.for_eval(return_token_ids=True))


def _context(make: ContextFactory, system_prompt: str | None) -> ContextStrategy:
    if inspect.signature(make).parameters:
        return make(system_prompt)
    return make()
