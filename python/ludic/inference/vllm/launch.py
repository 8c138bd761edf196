"""Starts vLLM servers, waits until they can be used, and stops them with all their processes."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal

from ludic.errors import ConfigError, EngineDeadError, InferenceError
from ludic.inference.servers.answers import ModelList
from ludic.inference.servers.http import BlockingHttp
from ludic.inference.servers.server_secret import VARIABLE, drop_secret, is_this_machine, keep_secret, secret_of
from ludic.inference.vllm.environment import check_has_vllm, is_cpu_build, server_python, server_variables
from ludic.inference.vllm.in_server.flags import (
    DEFAULT_FLAGS,
    SECRET_MIDDLEWARE,
    TAG_MIDDLEWARE,
    THINK_PROCESSOR,
    WeightBackend,
    missing_flags,
    weight_flags,
)
from ludic.inference.vllm.orphan_reaper import Guard
from ludic.inference.vllm.server_queries import HEALTH_TIMEOUT_S, MODELS_TIMEOUT_S, server_url

logger = logging.getLogger(__name__)

LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
CPU_CACHE_BYTES = 64 * 2**20
TAIL_LINES = 60
KEPT_LINES = 10_000
GRACE_S = 15.0
"""Between asking a server to end and ending it."""


def start_vllm_server(
    model: str,
    host: str,
    port: int,
    *,
    gpu_memory_utilization: float = 0.7,
    max_model_len: int | None = None,
    enforce_eager: bool = True,
    stream_output: bool = True,
    extra_args: Sequence[str] | None = None,
    python: str | os.PathLike[str] | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    dtype: str | None = None,
    served_model_name: str | None = None,
    logprobs_mode: LogprobsMode = "processed_logprobs",
    client_tags: bool = False,
    weights: WeightBackend | None = None,
    think_limits: bool = False,
    env: Mapping[str, str] | None = None,
    log_path: str | os.PathLike[str] | None = None,
) -> subprocess.Popen[Any]:
    """A server as a child process in a process group of its own. It is stopped when this process
    ends, if not before, and also where that is killed: a guard beside the server sees to it.

    It runs in `python`, else in what `LUDIC_VLLM_PYTHON` names, else in ./.venv-vllm, else in this
    interpreter. `device="auto"` is the CPU if vLLM's build for CPUs is installed there: then
    weights are float32, as bfloat16 kills the worker on machines that only claim to have the
    instructions for it, the cache has 64 MiB, and nothing is compiled at the first request.
    `extra_args` come last and win.

    The log-probabilities are those of the distribution drawn from (`processed_logprobs`), sampling
    defaults are vLLM's and not the model's, and the token endpoint is on. `weights` is how new
    weights come: gloo through host memory, ludic_nccl between GPUs, disk from a folder that both
    see. Who changes what is served must send the server's secret: `LUDIC_SERVER_SECRET` if that is
    set, else a random one, which this user's processes on this machine find by themselves. Sampling
    needs none, so `host` should be this machine. `client_tags` loads the middleware that says the
    tags of clients again, `think_limits` what heeds `max_think`.

    Output goes where ours does, to `log_path`, or with `stream_output=False` is kept for
    `collect_proc_output`. Raises ConfigError for a port that is taken, and for an interpreter that
    is not there or has no vLLM.
    """
    interpreter = server_python(python)
    _check_port(host, port)
    check_has_vllm(interpreter)
    cpu = device == "cpu" or (device == "auto" and is_cpu_build(interpreter))
    if not is_this_machine(host):
        logger.warning(
            "the server listens on %s: whoever reaches it can sample, and can read what travels, the secret for new weights too",
            host,
        )
    given = list(extra_args or ())
    flags: list[tuple[str, str | None]] = [("--host", host), ("--port", str(port))]
    flags += [("--served-model-name", served_model_name)] if served_model_name is not None else []
    flags += [("--max-model-len", str(max_model_len))] if max_model_len is not None else []
    flags += [("--dtype", dtype or "float32")] if dtype is not None or cpu else []
    flags += [("--logprobs-mode", logprobs_mode), *DEFAULT_FLAGS]
    flags += [("--enforce-eager", None)] if enforce_eager else []
    flags += weight_flags(weights)
    flags += [("--logits-processors", THINK_PROCESSOR)] if think_limits else []
    if cpu:
        flags += [("--kv-cache-memory-bytes", str(CPU_CACHE_BYTES)), ("--max-num-seqs", "64")]
    else:
        flags += [("--gpu-memory-utilization", str(gpu_memory_utilization))]
    command = [interpreter, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *missing_flags(flags, given)]
    command += ["--middleware", TAG_MIDDLEWARE] if client_tags else []  # may be given several times
    command += ["--middleware", SECRET_MIDDLEWARE, *given]
    variables = server_variables(interpreter, cpu=cpu, given=env, arguments=command)
    with _secret_for(port, variables) as secret:
        proc = _start(command, {**variables, VARIABLE: secret}, stream_output=stream_output, log_path=log_path)
        _SECRETS[proc] = port, secret
    return proc


@contextlib.contextmanager
def _secret_for(port: int, variables: Mapping[str, str]) -> Iterator[str]:
    """The secret of a server that is being started. One that was not given lies where clients
    look, unless the start fails."""
    secret = secret_of(variables)
    if not variables.get(VARIABLE):
        keep_secret(port, secret)
    try:
        yield secret
    except BaseException:
        drop_secret(port, secret)
        raise


def wait_for_vllm_health(host: str, port: int, proc: subprocess.Popen[Any], timeout_s: float = 180.0) -> None:
    """Return when the server at this address is healthy and has sampled a token: engines that
    cannot are healthy until they are asked.

    Raises InferenceError, which is a RuntimeError, with the end of the server's output if it ends
    or is not ready within `timeout_s`; its processes are then stopped. A server without models to
    complete with is ready when it is healthy.
    """
    deadline = time.monotonic() + timeout_s
    url = server_url(host, port)
    try:
        while not _is_ready(BlockingHttp(), url, deadline):
            code = proc.poll()
            if code is not None:
                raise InferenceError(f"the server at {url} ended with status {code} before it was ready{_log(proc)}")
            if time.monotonic() > deadline:
                raise InferenceError(f"the server at {url} was not ready within {timeout_s} s and was stopped{_log(proc)}")
            time.sleep(0.2)
    except InferenceError:
        stop_vllm_server(proc)
        raise


def stop_vllm_server(
    proc: subprocess.Popen[Any], timeout_s: float = GRACE_S, *, ask: signal.Signals = signal.SIGTERM
) -> int | None:
    """End a server and every process that it started: asked first, ended after `timeout_s`. The
    exit status, None if it stays."""
    if proc.poll() is None:
        _signal(proc, ask)
        with contextlib.suppress(subprocess.TimeoutExpired):
            proc.wait(timeout_s)
    _signal(proc, signal.SIGKILL)  # children may outlive the process that started them
    with contextlib.suppress(subprocess.TimeoutExpired):
        proc.wait(timeout_s)
    if proc.poll() is not None and (guard := _GUARDS.pop(proc.pid, None)) is not None:
        guard.dismiss()
    if proc in _SECRETS:
        drop_secret(*_SECRETS.pop(proc))
    return proc.poll()


def collect_proc_output(proc: subprocess.Popen[Any], timeout: float | None = None) -> tuple[str, str]:
    """(standard output, standard error) of a process, waiting up to `timeout` seconds for its end;
    what there is so far if it goes on.

    Empty where the output went elsewhere.
    """
    kept = _OUTPUT.get(proc)
    if kept is None:
        try:
            out, err = proc.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as expired:
            out, err = expired.stdout, expired.stderr
        return _as_text(out), _as_text(err)
    with contextlib.suppress(subprocess.TimeoutExpired):
        proc.wait(timeout)
    return kept.text("stdout"), kept.text("stderr")


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as found:
        found.bind((host, 0))
        return int(found.getsockname()[1])


class _Output:
    """What a process writes, read as it comes: a pipe that nobody reads stops the one who
    writes."""

    def __init__(self, proc: subprocess.Popen[Any]) -> None:
        self._lines = {name: deque[str](maxlen=KEPT_LINES) for name in ("stdout", "stderr")}
        self._threads = []
        for name in self._lines:
            pipe = getattr(proc, name)
            if pipe is not None:
                self._threads.append(threading.Thread(target=self._read, args=(pipe, self._lines[name]), daemon=True))
                self._threads[-1].start()
        self._proc = weakref.ref(proc)

    def text(self, name: str) -> str:
        proc = self._proc()
        if proc is None or proc.poll() is not None:
            for thread in self._threads:
                thread.join(2.0)  # a child of the process may hold the pipe open
        return "".join(self._lines[name].copy())

    @staticmethod
    def _read(pipe: IO[str], lines: deque[str]) -> None:
        with contextlib.suppress(ValueError, OSError), pipe:
            lines.extend(iter(pipe.readline, ""))


_OUTPUT: weakref.WeakKeyDictionary[subprocess.Popen[Any], _Output] = weakref.WeakKeyDictionary()
_LOGS: weakref.WeakKeyDictionary[subprocess.Popen[Any], Path] = weakref.WeakKeyDictionary()
_RUNNING: weakref.WeakSet[subprocess.Popen[Any]] = weakref.WeakSet()
_SECRETS: weakref.WeakKeyDictionary[subprocess.Popen[Any], tuple[int, str]] = weakref.WeakKeyDictionary()
"""Port and secret."""
_GUARDS: dict[int, Guard] = {}
"""By the server's process. One whose `Popen` nobody holds any more is guarded all the same."""


@atexit.register
def _stop_all() -> None:
    for proc in list(_RUNNING):
        if proc.poll() is None:
            stop_vllm_server(proc, timeout_s=5.0)


def _start(
    command: list[str], env: dict[str, str], *, stream_output: bool, log_path: str | os.PathLike[str] | None
) -> subprocess.Popen[Any]:
    logger.info("starting %s", " ".join(command))
    guard = Guard(grace_s=GRACE_S)
    try:
        proc = _process(command, env, stream_output=stream_output, log_path=log_path)
    except BaseException:
        guard.dismiss()
        raise
    guard.watch(proc.pid)
    _GUARDS[proc.pid] = guard
    _RUNNING.add(proc)
    return proc


def _process(
    command: list[str], env: dict[str, str], *, stream_output: bool, log_path: str | os.PathLike[str] | None
) -> subprocess.Popen[Any]:
    proc: subprocess.Popen[Any]
    if log_path is not None:
        with open(log_path, "ab") as log:
            proc = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        _LOGS[proc] = Path(log_path)
    elif stream_output:
        proc = subprocess.Popen(command, env=env, start_new_session=True)
    else:
        proc = subprocess.Popen(
            command,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        _OUTPUT[proc] = _Output(proc)
    return proc


def _is_ready(http: BlockingHttp, url: str, deadline: float) -> bool:
    """Whether the server is healthy and gives a token. EngineDeadError if it is healthy and
    cannot."""

    def left_s(most: float) -> float:
        return max(0.0, min(most, deadline - time.monotonic()))

    try:
        if http.ask("GET", f"{url}/health", timeout_s=left_s(HEALTH_TIMEOUT_S)).status != 200:
            return False
        listed = http.ask("GET", f"{url}/v1/models", timeout_s=left_s(MODELS_TIMEOUT_S))
        models = listed.read(ModelList).data if listed.status == 200 else []
        if not models:
            return True
        body = {"model": models[0].id, "prompt": [[0]], "max_tokens": 1, "temperature": 0, "logprobs": 0}
        answer = http.ask("POST", f"{url}/v1/completions", json=body, timeout_s=left_s(math.inf))
    except InferenceError:
        return False
    if answer.status >= 500:
        raise EngineDeadError(f"the server at {url} is healthy and cannot sample: {answer.status}: {answer.quoted()}")
    return True


def _signal(proc: subprocess.Popen[Any], number: signal.Signals) -> None:
    """To the process group that the process leads; to it alone if it leads none."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if proc in _RUNNING:  # started here, so its group is its own, and outlives it while a child does
            os.killpg(proc.pid, number)
        elif proc.poll() is None:
            proc.send_signal(number)


def _log(proc: subprocess.Popen[Any]) -> str:
    """The end of what the process said, for an error."""
    kept, path = _OUTPUT.get(proc), _LOGS.get(proc)
    if kept is not None:
        text = kept.text("stdout") + kept.text("stderr")
    elif path is not None:
        text = path.read_text(encoding="utf-8", errors="replace")
    else:
        return "; its output is above"
    lines = text.splitlines()[-TAIL_LINES:]
    where = "" if path is None else f" ({path})"
    return f"; it wrote nothing{where}" if not lines else f"; the end of its output{where}:\n" + "\n".join(lines)


def _check_port(host: str, port: int) -> None:
    """A port that is taken would answer for a server that never came up."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError as error:
            raise ConfigError(f"port {port} of {host} cannot be listened on ({error.strerror}); choose another port") from error


def _as_text(output: str | bytes | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""
