"""Connects trainer and actors to the servers of their run."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from ludic.distributed.adapters.supervised import SupervisedServers
from ludic.errors import ConfigError, EngineDeadError, InferenceError
from ludic.files.atomic import clear_unfinished, delete_folder
from ludic.inference.servers.http import BlockingHttp
from ludic.inference.servers.pool import Restarts
from ludic.inference.vllm.client import VLLMChatClient
from ludic.inference.vllm.servers import HEALTH_TIMEOUT_S
from ludic.recipes.schema import Recipe
from ludic.runs.launching import list_servers
from ludic.runs.servers.server import MODEL_S, ServerAddresses
from ludic.runs.stop_request import Interrupted

logger = logging.getLogger(__name__)

POLL_S = 0.2
"""How often to look for servers that are starting."""
KEEP_S = 0.5
"""How often the trainer looks for servers that lack the newest version."""


@asynccontextmanager
async def connect_to_servers(
    recipe: Recipe,
    tokenizer: Any,
    run: Path,
    *,
    pushes: bool,
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
    client = await asyncio.to_thread(lambda: VLLMChatClient(urls=urls, tokenizer=tokenizer, timeout_s=timeout_s))
    client.follow_restarts(Restarts(find_url, find_end))
    async with client:
        if not pushes:
            yield client, None
            return
        clear_versions(run / "pushed")
        publisher = SupervisedServers(
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


def clear_versions(folder: Path) -> None:
    """Delete the versions that an earlier trainer wrote: servers have read what they serve."""
    if folder.is_dir():
        clear_unfinished(folder)
    for version in folder.glob("version_*"):
        delete_folder(version)


@contextmanager
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
                f"{', '.join(missing)} did not answer within {timeout_s:g} s of the policy; see workers/{missing[0]}.log in the run's "
                "folder, and raise inference.timeout_s if it only takes long"
            )
        await asyncio.sleep(POLL_S)


def _is_healthy(url: str) -> bool:
    try:
        return BlockingHttp({}).request("GET", f"{url}/health", timeout_s=HEALTH_TIMEOUT_S).status == 200
    except (InferenceError, ConfigError):
        return False
