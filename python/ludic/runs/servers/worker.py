"""`ludic worker server RUN`: one inference server of a run.

It waits until the run has a policy after its warm-up, starts a server of it, says where it is, and
ends when the server does, so that the supervisor starts it again. The weights that it begins with
are never sampled from: the trainer publishes to it first.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ludic.errors import TRY_AGAIN, ConfigError, InferenceError
from ludic.inference.vllm.in_server.secret import VARIABLE
from ludic.recipes.compose import compose
from ludic.recipes.schema import Recipe
from ludic.runs.directory import RunDirectory
from ludic.runs.servers.addresses import ServerAddresses
from ludic.runs.servers.starting import MODEL_S, start_server

logger = logging.getLogger(__name__)

POLL_S = 0.2


def run_server_process(folder: Path, *, name: str, host: str) -> int:
    """Serve for the run in `folder` at the address `host` of this machine until the server ends
    (status 75), or a signal does (128 plus its number)."""
    directory = RunDirectory.open_to_read(folder)
    recipe = compose([str(directory.config)])
    if not recipe.place.servers:
        raise ConfigError(f"{folder} is a run without servers of its own; start one with place.servers=N")
    return asyncio.run(_serve(recipe, directory, name, host))


async def _serve(recipe: Recipe, directory: RunDirectory, name: str, host: str) -> int:
    stop, signals = asyncio.Event(), list[int]()

    def stop_on(number: int) -> None:
        signals.append(number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop_on, number)
    addresses = ServerAddresses(directory.servers)
    before = addresses.read(name)
    addresses.forget(name)
    secret = addresses.make_secret()
    print(f"{name} waits for the policy in {directory.model}", flush=True)
    if not await _wait_for_model(directory.model, stop):
        return 128 + signals[0]
    address = host, _choose_port(host, before)
    return await _run(recipe, directory, address, secret, addresses, name, stop) or 128 + signals[0]


async def _run(
    recipe: Recipe,
    directory: RunDirectory,
    address: tuple[str, int],
    secret: str,
    addresses: ServerAddresses,
    name: str,
    stop: asyncio.Event,
) -> int:
    """The exit status; 0 after a signal."""
    from ludic.inference.vllm.launch import stop_vllm_server, wait_for_vllm_health
    from ludic.inference.vllm.servers import server_url

    host, port = address
    proc = start_server(recipe, directory.model, host, port, weights="disk", env={VARIABLE: secret})
    try:
        ready = asyncio.create_task(asyncio.to_thread(wait_for_vllm_health, host, port, proc, recipe.inference.timeout_s))
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait([ready, stopped], return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            await asyncio.to_thread(stop_vllm_server, proc)  # the wait then ends, too
            await asyncio.gather(ready, return_exceptions=True)
            return 0
        await ready
        addresses.write(name, server_url(host, port))
        print(f"{name} answers at {server_url(host, port)}", flush=True)
        await _wait_for_end(proc, stop)
        return 0 if stop.is_set() else TRY_AGAIN
    except InferenceError as error:
        print(f"{name}: {error}", flush=True)
        return TRY_AGAIN
    finally:
        addresses.forget(name)
        await asyncio.to_thread(stop_vllm_server, proc)


async def _wait_for_model(folder: Path, stop: asyncio.Event) -> bool:
    """Whether the run has a policy, rather than a signal to stop. The folder is there whole or not
    at all."""
    deadline = asyncio.get_running_loop().time() + MODEL_S
    while not (folder / "config.json").is_file():
        if stop.is_set():
            return False
        if asyncio.get_running_loop().time() > deadline:
            raise ConfigError(f"{folder} did not appear within {MODEL_S / 3600:g} hours; has the trainer ended?")
        await asyncio.sleep(POLL_S)
    return True


async def _wait_for_end(proc: subprocess.Popen[Any], stop: asyncio.Event) -> None:
    """Wait until the server has ended, or must."""
    while proc.poll() is None and not stop.is_set():
        await asyncio.sleep(POLL_S)
    if not stop.is_set():
        print(f"the server ended with status {proc.returncode}", flush=True)


def _choose_port(host: str, before: str | None) -> int:
    """The port that the server had before, if it is free on this machine, so that clients find the
    server again; else a free one."""
    from ludic.inference.servers.ports import free_port

    port = urlsplit(before).port if before is not None and urlsplit(before).hostname == host else None
    if port is not None:
        with socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind((host, port))
                return port
            except OSError:
                pass
    return free_port(host)
