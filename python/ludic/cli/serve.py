"""`ludic serve`: runs a vLLM server with the flags that training needs, until Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal, cast, get_args

from rich.console import Console

from ludic.errors import InferenceError, check_value
from ludic.inference.vllm.in_server.secret import VARIABLE, is_loopback_host, secret_file
from ludic.inference.vllm.in_server.server import WeightBackend
from ludic.inference.vllm.launch import (
    LogprobsMode,
    is_cpu_build,
    server_python,
    start_vllm_server,
    stop_vllm_server,
    wait_for_vllm_health,
)


@dataclass(frozen=True)
class ServeSettings:
    """The options of `ludic serve`, by their names."""

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    name: str | None = None
    python: str | None = None
    device: str = "auto"
    dtype: str | None = None
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.7
    logprobs_mode: str = "processed_logprobs"
    weights: str = "auto"
    client_tags: bool = False
    think_limits: bool = False
    batch_invariant: bool = False
    lora_rank: int = 0
    compiled: bool = False
    ready_timeout_s: float = 600.0
    flags: Sequence[str] = ()
    """vLLM's own flags, passed on unchanged."""

    def __post_init__(self) -> None:
        for option, value, allowed in (
            ("--device", self.device, ("auto", "cpu", "cuda")),
            ("--weights", self.weights, ("auto", "gloo", "ludic_nccl", "disk", "none")),
            ("--logprobs-mode", self.logprobs_mode, get_args(LogprobsMode)),
        ):
            check_value(option, value, choices=allowed)


def serve_command(settings: ServeSettings) -> int:
    """Serve until a signal or until the server ends, and show its output. Returns the exit status 0
    after a signal; raises InferenceError if the server ended by itself."""
    console = Console(stderr=True, highlight=False)
    with _stop_on_signals() as stopped:
        proc = _start(settings)

        def set_when_ended() -> None:
            proc.wait()
            stopped.set()

        threading.Thread(target=set_when_ended, daemon=True).start()
        try:
            if not _wait_until_ready(settings, proc, stopped):
                return 0
            if os.environ.get(VARIABLE):
                secret = f"the value of {VARIABLE}, which trainers need as well"
            else:
                secret = f"trainers of this user on this machine read it from {secret_file(settings.port)}"
                secret += "" if is_loopback_host(settings.host) else f", others need it in {VARIABLE}"
            console.print(f"Clients need its secret: {secret}", soft_wrap=True)
            console.print(f"[bold]ready[/] at http://{settings.host}:{settings.port}; Ctrl-C stops it")
            stopped.wait()
            if proc.poll() is not None:
                raise InferenceError(f"the server ended by itself with status {proc.returncode}; its output is above")
            console.print("stopping")
            return 0
        finally:
            stop_vllm_server(proc)


def _start(settings: ServeSettings) -> subprocess.Popen[Any]:
    lora = ["--enable-lora", "--max-lora-rank", str(settings.lora_rank), "--max-loras", "2"] if settings.lora_rank else []
    return start_vllm_server(
        settings.model,
        settings.host,
        settings.port,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        max_model_len=settings.max_model_len,
        enforce_eager=not settings.compiled,
        extra_args=[*lora, *settings.flags],
        python=settings.python,
        device=cast(Literal["auto", "cpu", "cuda"], settings.device),
        dtype=settings.dtype,
        served_model_name=settings.name,
        logprobs_mode=cast(LogprobsMode, settings.logprobs_mode),
        client_tags=settings.client_tags,
        think_limits=settings.think_limits,
        weights=_choose_weights(settings),
        env={"VLLM_BATCH_INVARIANT": "1"} if settings.batch_invariant else None,
    )


def _choose_weights(settings: ServeSettings) -> WeightBackend | None:
    """The backend named; left open, host memory next to a CPU and NCCL between GPUs."""
    if settings.weights != "auto":
        return None if settings.weights == "none" else cast(WeightBackend, settings.weights)
    cpu = settings.device == "cpu" or (settings.device == "auto" and is_cpu_build(server_python(settings.python)))
    return "gloo" if cpu else "ludic_nccl"


def _wait_until_ready(settings: ServeSettings, proc: subprocess.Popen[Any], stopped: threading.Event) -> bool:
    """Whether the server became ready before it had to stop."""
    failures: list[InferenceError] = []

    def wait() -> None:
        try:
            wait_for_vllm_health(settings.host, settings.port, proc, settings.ready_timeout_s)
        except InferenceError as error:
            failures.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    while waiting.is_alive() and not stopped.is_set():
        waiting.join(0.1)
    if stopped.is_set() and proc.poll() is None:
        return False
    waiting.join()
    if failures:
        raise failures[0]
    return True


@contextmanager
def _stop_on_signals() -> Iterator[threading.Event]:
    """Yields an event that Ctrl-C, SIGTERM and a closed terminal set. The server has its own
    process group and does not receive these signals."""
    stopped = threading.Event()

    def stop(_number: int, _frame: FrameType | None) -> None:
        stopped.set()

    numbers = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if os.name == "posix" else [])]
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
