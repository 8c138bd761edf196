"""`ludic serve`: runs a vLLM server with the flags that training needs, until Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from types import FrameType, SimpleNamespace
from typing import Any, get_args

from rich.console import Console

from ludic.errors import InferenceError, check_value
from ludic.event_loop import start_in_thread
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


def serve_command(options: SimpleNamespace) -> int:
    """Serve until a signal or until the server ends, and show its output. Returns the exit status 0
    after a signal; raises InferenceError if the server ended by itself. `options` are those of
    `ludic serve`, by their names."""
    check_value("--device", options.device, choices=("auto", "cpu", "cuda"))
    check_value("--weights", options.weights, choices=("auto", "gloo", "ludic_nccl", "disk", "none"))
    check_value("--logprobs-mode", options.logprobs_mode, choices=get_args(LogprobsMode))
    console = Console(stderr=True, highlight=False)
    with _stop_on_signals() as stopped:
        proc = _start(options)
        start_in_thread(proc.wait, name="server", daemon=True).add_done_callback(lambda _: stopped.set())
        try:
            if not _wait_until_ready(options, proc, stopped):
                return 0
            if os.environ.get(VARIABLE):
                secret = f"the value of {VARIABLE}, which trainers need as well"
            else:
                secret = f"trainers of this user on this machine read it from {secret_file(options.port)}"
                secret += "" if is_loopback_host(options.host) else f", others need it in {VARIABLE}"
            console.print(f"Clients need its secret: {secret}", soft_wrap=True)
            console.print(f"[bold]ready[/] at http://{options.host}:{options.port}; Ctrl-C stops it")
            stopped.wait()
            if proc.poll() is not None:
                raise InferenceError(f"the server ended by itself with status {proc.returncode}; its output is above")
            console.print("stopping")
            return 0
        finally:
            stop_vllm_server(proc)


def _start(options: SimpleNamespace) -> subprocess.Popen[Any]:
    return start_vllm_server(
        options.model,
        options.host,
        options.port,
        gpu_memory_utilization=options.gpu_memory_utilization,
        max_model_len=options.max_model_len,
        enforce_eager=not options.compiled,
        extra_args=options.flags,
        python=options.python,
        device=options.device,
        dtype=options.dtype,
        served_model_name=options.name,
        logprobs_mode=options.logprobs_mode,
        client_tags=options.client_tags,
        think_limits=options.think_limits,
        weights=_choose_weights(options),
        lora_rank=options.lora_rank,
        env={"VLLM_BATCH_INVARIANT": "1"} if options.batch_invariant else None,
    )


def _choose_weights(options: SimpleNamespace) -> WeightBackend | None:
    """The backend named; left open, host memory next to a CPU and NCCL between GPUs."""
    if options.weights != "auto":
        chosen: WeightBackend | None = None if options.weights == "none" else options.weights
        return chosen
    cpu = options.device == "cpu" or (options.device == "auto" and is_cpu_build(server_python(options.python)))
    return "gloo" if cpu else "ludic_nccl"


def _wait_until_ready(options: SimpleNamespace, proc: subprocess.Popen[Any], stopped: threading.Event) -> bool:
    """Whether the server became ready before it had to stop."""
    settings = (options.host, options.port, proc, options.ready_timeout_s)
    ready = start_in_thread(lambda: wait_for_vllm_health(*settings), name="health", daemon=True)
    while not ready.done() and not stopped.is_set():
        wait([ready], 0.1)
    if stopped.is_set() and proc.poll() is None:
        return False
    ready.result()
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
