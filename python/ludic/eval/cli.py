"""Building blocks for your own evaluation scripts with argparse. The command `ludic eval` does not
use them: it reads recipes."""

from __future__ import annotations

import argparse
import inspect
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from ludic.agents import Agent
from ludic.context import FullDialog
from ludic.context.strategies import ContextStrategy
from ludic.files.jsonl import write_jsonl as write_jsonl
from ludic.inference import ChatClient, InferenceSpec, ReturnSpec, SamplingParams
from ludic.interaction import SingleAgentProtocol
from ludic.parsers import Parser
from ludic.training.rollouts.engine import EnvFactory, RolloutEngine

PROTOCOL_KIND = "single_agent"
READY_S = 600.0
"""Deadline for a server to sample its first token, including the download of the model."""
STOP_S = 30.0
"""Time between the request to stop and a kill."""
ContextFactory = Callable[..., ContextStrategy]
"""A function of the system prompt, or without arguments."""


def add_common_eval_args(parser: argparse.ArgumentParser) -> None:
    """Add the common flags of evaluation scripts."""
    parser.add_argument("--model", default="Qwen/Qwen2.5-7B-Instruct", help="name of the model on the server")
    parser.add_argument("--host", default="127.0.0.1", help="host of the server")
    parser.add_argument("--port", type=int, default=8000, help="port of the server")
    parser.add_argument("--start-server", action="store_true", help="start a vLLM server for the evaluation")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy decoding")
    parser.add_argument("--max-tokens", type=int, default=512, help="maximum tokens of an answer")
    parser.add_argument("--timeout-s", type=float, default=None, help="deadline of one model call, in seconds")
    parser.add_argument("--concurrency", type=int, default=64, help="concurrent episodes")
    parser.add_argument("--max-steps", type=int, default=1, help="maximum steps of an episode")
    parser.add_argument("--out", default=None, help="file for the records, as JSON lines")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.7, help="share of the GPU's memory for the server")
    parser.add_argument("--max-model-len", type=int, default=None, help="maximum context length of the server, in tokens")


@contextmanager
def maybe_start_vllm(args: argparse.Namespace) -> Iterator[None]:
    """With `--start-server`, run a vLLM server of `--model` at `--host` and `--port` inside the
    `with` block; it is ready at the start and stopped at the end. Otherwise do nothing.

    It runs in the interpreter that `start_vllm_server` finds. Raises ConfigError for a port in use,
    and InferenceError, with the end of the server's output, if it does not become ready.
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
    """An engine with one protocol, `single_agent`. Each episode has its own context."""
    make_context = context_factory or FullDialog

    def make_protocol() -> SingleAgentProtocol:
        context = make_context(system_prompt) if inspect.signature(make_context).parameters else make_context()
        agent = Agent(client=client, model=model, ctx=context, parser=parser)
        return SingleAgentProtocol(agent, stop_on_parse_error=stop_on_parse_error)

    return RolloutEngine(env_registry=env_registry, protocol_registry={PROTOCOL_KIND: make_protocol})


def inference_spec_from_cli(args: argparse.Namespace) -> InferenceSpec:
    """Temperature and token limit of the flags; returns token ids but no log-probabilities."""
    sampling = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
    return InferenceSpec(sampling=sampling, return_=ReturnSpec.for_eval(return_token_ids=True))
