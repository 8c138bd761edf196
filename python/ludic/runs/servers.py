"""The inference servers of a run (`place.servers`): processes of their own, which the supervisor of
the run restarts.

    server --address--> servers/NAME.json --> trainer and actors
    trainer --publish--> pushed/version_N --> servers

Here is where they are (`servers/NAME.json` in the run's folder) and the secret of all of them; how
one is started, by the trainer for itself (`inference=vllm`) too; its process, `ludic worker server
RUN`; and how trainer and actors connect to them.

The process waits until the run has a policy after its warm-up, starts a server of it, says where it
is, and ends when the server does, so that the supervisor starts it again. The weights that it
begins with are never sampled from: the trainer publishes to it first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from ludic.distributed.adapters.lora import SupervisedAdapters
from ludic.distributed.adapters.supervised import SupervisedServers
from ludic.distributed.push.target import PushUrls
from ludic.errors import TRY_AGAIN, CheckpointError, ConfigError, EngineDeadError, InferenceError
from ludic.files.atomic import clear_unfinished, delete_folder, read_json, write_json
from ludic.inference.servers.http import BlockingHttp
from ludic.inference.servers.pool import Restarts
from ludic.inference.vllm.client import VLLMChatClient
from ludic.inference.vllm.in_server.secret import HEADER, VARIABLE
from ludic.inference.vllm.in_server.server import WeightBackend
from ludic.inference.vllm.servers import HEALTH_TIMEOUT_S, server_url
from ludic.models.packed_attention import find_rope_limits
from ludic.models.places import base_folder
from ludic.models.published import has_frozen_weights
from ludic.recipes.compose import compose
from ludic.recipes.model import serves_base
from ludic.recipes.processes import choose_logprob_convention
from ludic.recipes.schema import Recipe
from ludic.runs.adapters import SERVED_NAME, try_adapters
from ludic.runs.directory import RunDirectory
from ludic.runs.launching import list_servers
from ludic.runs.stop_request import Interrupted, listen_for_signals

logger = logging.getLogger(__name__)

SECRET = "secret"


class ServerAddresses:
    """The addresses that the servers of a run wrote, by name."""

    def __init__(self, folder: Path) -> None:
        """`folder` is `servers` in the run's folder."""
        self._folder = folder

    def write(self, name: str, url: str) -> None:
        """The server `name` answers at `url` from now on."""
        self._folder.mkdir(parents=True, exist_ok=True)
        write_json(self._path(name), {"url": url, "host": socket.gethostname(), "pid": os.getpid(), "since": time.time()})

    def read(self, name: str) -> str | None:
        """The last address; None if there is none."""
        try:
            return str(read_json(self._path(name))["url"])
        except (FileNotFoundError, KeyError, CheckpointError):
            return None

    def forget(self, name: str) -> None:
        """The server is not ready."""
        self._path(name).unlink(missing_ok=True)

    def make_secret(self) -> str:
        """The secret of all servers of the run: `LUDIC_SERVER_SECRET` if it is set, else a random
        one in a file that only this user can read."""
        if given := os.environ.get(VARIABLE):
            return given
        self._folder.mkdir(parents=True, exist_ok=True)
        aside = self._folder / f".{SECRET}.{os.getpid()}"
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(32))
        with contextlib.suppress(FileExistsError):  # another server was faster
            os.link(aside, self._folder / SECRET)
        aside.unlink()
        return (self._folder / SECRET).read_text(encoding="ascii")

    def secret_headers(self) -> Mapping[str, str]:
        """What requests need that change what the servers serve. Raises ConfigError before the
        first server has started."""
        given = os.environ.get(VARIABLE)
        try:
            return {HEADER: given or (self._folder / SECRET).read_text(encoding="ascii")}
        except FileNotFoundError as error:
            raise ConfigError(f"{error.filename} does not exist: no server of the run has started") from error

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"


OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
"""The folder has all files."""
WITHOUT_LORA = ("bloom", "dbrx", "falcon", "falcon_mamba", "gemma3n", "gpt2", "gptj", "mamba", "mamba2", "stablelm", "zamba2")
"""Types of models in transformers that vLLM 0.32 does not start with `--enable-lora`."""
MODEL_S = 24 * 3600.0
"""How long the warm-up of the run may take, after which there is a policy to serve."""


COLOCATED_SHARE = 0.9
"""Of a device whose trainer takes turns with the server. The rest is for what neither of them can
free: contexts of CUDA, kernels, workspaces."""


def start_server(
    recipe: Recipe,
    folder: Path,
    host: str,
    port: int,
    *,
    weights: WeightBackend,
    takes_adapters: bool,
    log: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[Any]:
    """Start a server of the policy in `folder`; if it `takes_adapters` and the recipe pushes them,
    of the base beside it. On a CPU it computes in float32, elsewhere in the policy's own dtype.
    `weights` is how new weights are sent; without `log` it writes where this process does."""
    from ludic.inference.vllm.launch import is_cpu_build, server_python, start_vllm_server

    section = recipe.inference
    rank = recipe.lora.rank if takes_adapters and serves_base(recipe) else 0
    folder = base_folder(folder) if rank else folder
    python = server_python(section.python)
    options: dict[str, Any] = {}
    cpu = section.device == "cpu" or (section.device == "auto" and is_cpu_build(python))
    if section.colocate:  # the trainer has left the device
        options = {"sleep_mode": True, "gpu_memory_utilization": COLOCATED_SHARE}
    if cpu and recipe.trainer.replay_routing:
        raise ConfigError(
            "vLLM 0.32 returns no routed experts on a CPU; set inference=local, or leave trainer.replay_routing off"
        )
    convention, config = choose_logprob_convention(recipe.rollout), read_json(folder / "config.json")
    return start_vllm_server(
        str(folder),
        host,
        port,
        python=python,
        device="cpu" if cpu else "cuda",
        dtype=None if cpu else str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        served_model_name=SERVED_NAME,
        logprobs_mode="processed_logprobs" if convention.processed else "raw_logprobs",
        weights=weights,
        lora_rank=0 if config.get("model_type") in WITHOUT_LORA else rank,
        max_model_len=_read_rope_limit(folder, recipe.trainer.max_seq_len),
        extra_args=[*section.server_args, *(["--enable-return-routed-experts"] if recipe.trainer.replay_routing else [])],
        env={**OFFLINE, **(env or {})},
        log_path=log,
        **options,
    )


def _read_rope_limit(folder: Path, tokens: int) -> int | None:
    """The context for which vLLM chooses the RoPE that the trainer is pinned to. None means any."""
    config = read_json(folder / "config.json")
    return min(find_rope_limits(SimpleNamespace(**config.get("text_config", config)), tokens), default=None)


POLL_S = 0.2
"""How often to look for a policy, and for servers that are starting."""


def run_server_process(folder: Path, *, name: str, host: str) -> int:
    """Serve for the run in `folder` at the address `host` of this machine until the server ends
    (status 75), or a signal does (128 plus its number)."""
    directory = RunDirectory.open_to_read(folder)
    recipe = compose([str(directory.config)])
    if not recipe.place.servers:
        raise ConfigError(f"{folder} is a run without servers of its own; start one with place.servers=N")
    return asyncio.run(_serve(recipe, directory, name, host))


async def _serve(recipe: Recipe, directory: RunDirectory, name: str, host: str) -> int:
    from ludic.inference.vllm.launch import stop_vllm_server, wait_for_vllm_health

    stop, signals = listen_for_signals()
    addresses = ServerAddresses(directory.servers)
    before = addresses.read(name)
    addresses.forget(name)
    secret = addresses.make_secret()
    print(f"{name} waits for the policy in {directory.model}", flush=True)
    if not await _wait_for_model(directory.model, stop):
        return 128 + signals[0]
    port = _choose_port(host, before)
    proc = start_server(recipe, directory.model, host, port, weights="disk", takes_adapters=True, env={VARIABLE: secret})
    try:
        ready = asyncio.create_task(asyncio.to_thread(wait_for_vllm_health, host, port, proc, recipe.inference.timeout_s))
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait([ready, stopped], return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            await asyncio.to_thread(stop_vllm_server, proc)  # the wait then ends, too
            await asyncio.gather(ready, return_exceptions=True)
            return 128 + signals[0]
        await ready
        addresses.write(name, server_url(host, port))
        print(f"{name} answers at {server_url(host, port)}", flush=True)
        while proc.poll() is None and not stop.is_set():
            await asyncio.sleep(POLL_S)
        if stop.is_set():
            return 128 + signals[0]
        print(f"the server ended with status {proc.returncode}", flush=True)
        return TRY_AGAIN
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


KEEP_S = 0.5
"""How often the trainer looks for servers that lack the newest version."""


@contextlib.asynccontextmanager
async def connect_to_servers(
    recipe: Recipe,
    model: Any,
    tokenizer: Any,
    run: Path,
    *,
    pushes: bool,
    note: Callable[[str], None],
    is_stopped: Callable[[], bool],
    find_end: Callable[[], str | None],
) -> AsyncIterator[tuple[VLLMChatClient, SupervisedServers | None]]:
    """(client, publisher if `pushes`) of the servers of the run in the folder `run`, once all
    answer. The client takes no answer of other weights than those that were published, and waits
    while servers are started again, unless `find_end` says that none will be. Raises Interrupted
    once `is_stopped`."""
    addresses, names = ServerAddresses(run / "servers"), list_servers(recipe.place)

    def find_url(number: int) -> str | None:
        return addresses.read(names[number])

    timeout_s = recipe.inference.timeout_s
    urls = await _wait_for_addresses(addresses, names, run / "model", timeout_s, is_stopped, find_end)
    client = await make_client(recipe, tokenizer, urls)
    client.follow_restarts(Restarts(find_url, find_end))
    async with client:
        if not pushes:
            yield client, None
            return
        clear_versions(run / "pushed")
        make: Callable[..., SupervisedServers] = partial(SupervisedServers, partial=has_frozen_weights(model))
        target = PushUrls(urls, addresses.secret_headers())
        if (trial := await asyncio.to_thread(try_adapters, recipe, target, model, run, note)) is not None:
            make = partial(SupervisedAdapters, model=model, run=trial.run)
        publisher = make(
            client,
            run / "pushed",
            count=len(names),
            find_url=find_url,
            headers=addresses.secret_headers(),
            timeout_s=timeout_s,
            answer_s=recipe.inference.push_timeout_s,
            wait_s=recipe.inference.push_wait_s,
            find_end=find_end,
            is_stopped=is_stopped,
        )
        try:
            with kept_current(publisher):
                yield client, publisher
        finally:
            await asyncio.to_thread(publisher.close)


async def make_client(recipe: Recipe, tokenizer: Any, urls: list[str]) -> VLLMChatClient:
    """A client of the servers at `urls`, once they are healthy."""
    section = recipe.inference
    shared: Any = {"timeout_s": section.timeout_s, "routing": section.routing, "max_kv_use": section.max_kv_use}
    return await asyncio.to_thread(lambda: VLLMChatClient(urls=urls, tokenizer=tokenizer, **shared))


def clear_versions(folder: Path) -> None:
    """Delete the versions that an earlier trainer wrote: servers have read what they serve."""
    if folder.is_dir():
        clear_unfinished(folder)
    for version in folder.glob("version_*"):
        delete_folder(version)


@contextlib.contextmanager
def kept_current(publisher: SupervisedServers, every_s: float = KEEP_S) -> Iterator[None]:
    """While entered, servers that come back get the newest version, from a thread."""
    ended = threading.Event()

    def keep() -> None:
        while not ended.wait(every_s):
            try:
                publisher.bring_back()
            except Exception:
                logger.exception("servers could not be brought back; this is tried again")

    thread = threading.Thread(target=keep, name="servers that come back", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()  # a push that hangs has its own deadline, and ends with the process


async def _wait_for_addresses(
    addresses: ServerAddresses,
    names: list[str],
    model: Path,
    timeout_s: float,
    is_stopped: Callable[[], bool],
    find_end: Callable[[], str | None],
) -> list[str]:
    """The addresses of all servers once each answers: within `timeout_s` of the policy that they
    serve, which is there within `MODEL_S`. Raises Interrupted once `is_stopped`, EngineDeadError
    with what `find_end` says, and InferenceError at a deadline."""
    clock = asyncio.get_running_loop().time
    began, answer_by = clock(), None
    while True:
        urls = {name: url for name in names if (url := addresses.read(name)) is not None}
        healthy = [name for name, url in urls.items() if await asyncio.to_thread(_is_healthy, url)]
        if len(healthy) == len(names):
            return [urls[name] for name in names]
        if is_stopped():
            raise Interrupted
        if (end := find_end()) is not None:
            raise EngineDeadError(end)
        if answer_by is None and model.is_dir():
            answer_by = clock() + timeout_s
        if answer_by is None and clock() > began + MODEL_S:
            raise InferenceError(f"{model} did not appear within {MODEL_S / 3600:g} hours; has the trainer ended?")
        if answer_by is not None and clock() > answer_by:
            missing = [name for name in names if name not in healthy]
            raise InferenceError(
                f"{', '.join(missing)} did not answer within {timeout_s:g} s (inference.timeout_s); see workers/{missing[0]}.log in the "
                "run's folder"
            )
        await asyncio.sleep(POLL_S)


def _is_healthy(url: str) -> bool:
    try:
        return BlockingHttp({}).request("GET", f"{url}/health", timeout_s=HEALTH_TIMEOUT_S).status == 200
    except (InferenceError, ConfigError):
        return False
