"""What one sync does with one engine, in steps that all engines take together.

    stage     bring the weights as close as the engine can without serving them
    load      have the engine hold them, while it answers no requests
    open      let it answer again, and ask which version it serves
    withdraw  instead of the next step: serve the version before

A vLLM server stages a folder in addition to the weights that it serves. An SGLang server cannot:
its `stage` pauses it and loads the folder, so that it answers nothing until `open`. An engine of
the user has one call, which is its `stage`; it serves the new weights immediately.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, NamedTuple

from ludic.distributed.push.manifest import ServerManifest
from ludic.distributed.push.server_link import ServerLink
from ludic.errors import LudicError, PublishError, ServerTimeoutError
from ludic.inference.servers.http import ServerCalls
from ludic.inference.sglang import SGLangEndpoints
from ludic.inference.vllm.endpoints import VllmEndpoints

logger = logging.getLogger(__name__)

CLEANUP_S = 0.5
"""What a server that has not answered in time is given to be put aside."""
BACKOFF_S = 0.5
"""Wait before a stage that failed is tried again."""


class FolderVersion(NamedTuple):
    """Weights in a folder, under the version that engines report for them."""

    folder: str
    version: str


Fingerprints = tuple[dict[str, str], dict[str, str]]
"""By name: of the weights in a folder, and of the same in the server's dtypes."""
ReadFingerprints = Callable[[str, ServerManifest, bool], Fingerprints]
"""(folder, the server's manifest, whether frozen weights may be missing) -> fingerprints."""


class EngineSession(ABC):
    """One engine during one sync. Its steps take at most `timeout_s` seconds together."""

    def __init__(self, name: str, timeout_s: float, before: FolderVersion | None) -> None:
        """`before` is what the engine must serve if the sync fails; None if that is not known."""
        self.name, self.before = name, before
        self.timeout_s = self.left_s = timeout_s
        self.used_s = 0.0
        self.error: Exception | None = None
        self.serves: str | None = None
        """The version with which it answers requests. None if it answers none, or it is not known
        which."""
        self.answer: dict[str, Any] = {}
        self.fingerprint: str | None = None

    @property
    def hung(self) -> bool:
        """Whether it did not answer in time. It may still do the step."""
        return isinstance(self.error, TimeoutError)

    async def take(self, step: Callable[[], Awaitable[None]]) -> Exception | None:
        """Take a step within the seconds that are left. Keeps its error, and returns it."""
        start, self.error = time.monotonic(), None
        try:
            await step()
        except Exception as error:
            self.error = error
        elapsed_s = time.monotonic() - start
        self.used_s, self.left_s = self.used_s + elapsed_s, self.left_s - elapsed_s
        return self.error

    async def stage_with_retries(self, target: FolderVersion, retries: int) -> None:
        """Stage, and again after an error that is not a timeout."""
        for attempt in range(retries + 1):
            error = await self.take(lambda: self.stage(target))
            if error is None or self.hung or attempt == retries or self.left_s <= BACKOFF_S:
                return
            logger.warning("%s did not take version %s and is asked again: %s", self.name, target.version, error)
            await asyncio.sleep(BACKOFF_S)
            self.left_s -= BACKOFF_S

    async def go_back(self, reason: str) -> None:
        """Withdraw, with the timeout anew. `error` then says why the engine has no new weights."""
        cause, hung = self.error, self.hung
        self.left_s = CLEANUP_S if hung else self.timeout_s
        kept = await self.take(lambda: self.withdraw(hung=hung))
        self.error = cause or PublishError(reason)
        if kept is not None:
            self.error = PublishError(f"{self.error}; it could not go back either: {kept}")
            self.error.__cause__ = cause or kept

    @abstractmethod
    async def stage(self, target: FolderVersion) -> None: ...

    @abstractmethod
    async def load(self) -> None: ...

    @abstractmethod
    async def open(self) -> None: ...

    @abstractmethod
    async def withdraw(self, *, hung: bool) -> None:
        """Serve `before`, or nothing where that is not possible. `hung`: the last step did not end
        in time, and must not be waited for."""


class CustomSession(EngineSession):
    """An engine of the user: one call that loads a folder."""

    def __init__(self, engine: Any, before: FolderVersion | None) -> None:
        timeout = getattr(engine, "timeout", None)
        timeout_s = float(timeout) if isinstance(timeout, int | float) else 300.0
        name = getattr(engine, "base_url", None) or getattr(engine, "name", None) or type(engine).__name__
        super().__init__(str(name), timeout_s, before)
        self._engine = engine
        self._asked = self._loaded = False

    async def stage(self, target: FolderVersion) -> None:
        self._asked = True
        self.answer = await self._load(target)
        self.serves, self._loaded = str(self.answer.get("version", target.version)), True
        self.fingerprint = self.answer.get("fingerprint")

    async def load(self) -> None:
        """Nothing: it has the weights since `stage`."""

    async def open(self) -> None:
        """Nothing: it answers requests all the time."""

    async def withdraw(self, *, hung: bool) -> None:
        self.answer, self.fingerprint = {}, None
        if hung or not self._asked:
            return
        if self.before is None:
            kept = f"it keeps version {self.serves}" if self._loaded else "it is not known what it serves"
            raise PublishError(f"no earlier version is known, so {kept}")
        self.serves = None
        await self._load(self.before)
        self.serves = self.before.version

    async def _load(self, target: FolderVersion) -> dict[str, Any]:
        """The engine's answer. Raises PublishError if it reports a failure, or is no answer."""
        answer = self._engine.update_weights_from_checkpoint(target.folder)
        if inspect.isawaitable(answer):
            answer = await self._wait(answer)
        if not isinstance(answer, Mapping) or not isinstance(answer.get("success", True), bool):
            raise PublishError(f'{self.name} answered {str(answer)[:200]!r}; it must return a mapping like {{"success": True}}')
        if not answer.get("success", "error" not in answer):
            reason = answer.get("error") or answer.get("message") or dict(answer)
            raise PublishError(f"{self.name} did not load the weights: {reason}")
        return dict(answer)

    async def _wait(self, answer: Awaitable[Any]) -> Any:
        """The answer in the seconds that are left. A call that is late is cancelled, and soon left
        alone if it ignores that."""
        call = asyncio.ensure_future(answer)
        done, _ = await asyncio.wait([call], timeout=max(0.0, self.left_s))
        if done:
            return call.result()
        call.cancel()
        await asyncio.wait([call], timeout=CLEANUP_S)
        raise ServerTimeoutError(f"{self.name} gave no answer within {self.left_s:g} s")


class ServerSession(EngineSession):
    """An engine behind HTTP calls, which are made in a thread."""

    def __init__(
        self, name: str, timeout_s: float, before: FolderVersion | None, *, calls: ServerCalls, threads: Executor
    ) -> None:
        super().__init__(name, timeout_s, before)
        self._calls, self._threads = calls, threads
        self.paused = False
        """Whether it was asked to pause, and not yet to go on."""
        self.changed = False
        """Whether it was asked to serve other weights."""
        self.held: str | None = None
        """The version that it served when the sync began."""

    async def read_held(self) -> None:
        """Set `held`, the version that the server has."""
        await self._in_thread(self._read_held)

    async def _in_thread(self, call: Callable[..., None], *args: Any) -> None:
        self._calls.ends_at = time.monotonic() + self.left_s
        await asyncio.get_running_loop().run_in_executor(self._threads, call, *args)

    async def stage(self, target: FolderVersion) -> None:
        await self._in_thread(self._stage, target)

    async def load(self) -> None:
        await self._in_thread(self._load)

    async def open(self) -> None:
        await self._in_thread(self._open)

    async def withdraw(self, *, hung: bool) -> None:
        self.fingerprint = None
        if self.changed and (hung or self.before is None):
            self.serves = None
            await self._in_thread(self._put_aside)
            why = "it may still load the new one" if hung else "no earlier version is known"
            raise PublishError(f"{why}, so it stays paused until a sync reaches it")
        await self._in_thread(self._withdraw, hung)

    def _withdraw(self, hung: bool) -> None:
        if not self.changed:
            self._drop_staged()
            if self.paused:
                self._resume()
            self.serves = self.held
            if hung or self.before is None or self.held in (None, self.before.version):
                return
        assert self.before is not None
        self.serves = None
        self._stage(self.before)
        self._load()
        self._open()

    @abstractmethod
    def _read_held(self) -> None: ...

    @abstractmethod
    def _stage(self, target: FolderVersion) -> None: ...

    def _load(self) -> None: ...

    @abstractmethod
    def _open(self) -> None: ...

    @abstractmethod
    def _resume(self) -> None: ...

    def _drop_staged(self) -> None: ...

    def _put_aside(self) -> None:
        """Keep a server of unknown weights from answering."""


class SGLangSession(ServerSession):
    """Weights are loaded while generation is paused, and the version is read from an answer."""

    def __init__(self, server: SGLangEndpoints, timeout_s: float, before: FolderVersion | None, threads: Executor) -> None:
        super().__init__(server.url, timeout_s, before, calls=server, threads=threads)
        self._server = server
        self._target: FolderVersion | None = None

    def _stage(self, target: FolderVersion) -> None:
        if not self.changed:
            self._read_held()
        self.paused = True
        self._server.pause(timeout_s=self.timeout_s)
        self._target, self.changed = target, True
        self.answer = self._server.update_weights_from_disk(target.folder, target.version, timeout_s=self.timeout_s)

    def _read_held(self) -> None:
        info = self._server.model_info()
        if info is None:
            return
        self.held = info.weight_version or "default"
        self.before = self.before or FolderVersion(info.model_path, self.held)

    def _open(self) -> None:
        assert self._target is not None
        self._resume()
        served = self._server.weight_version()
        if served != self._target.version:
            raise PublishError(f"{self.name} answers with version {served} after it loaded {self._target.version}")
        self.serves = served

    def _resume(self) -> None:
        self._server.resume(timeout_s=self.timeout_s)
        self.paused = False

    def _put_aside(self) -> None:
        if not self.paused:
            self._server.pause(timeout_s=self.timeout_s)
            self.paused = True


class VllmSession(ServerSession):
    """The folder is staged while the server samples, loaded while it is paused, and compared with
    what the server then has."""

    def __init__(
        self,
        server: VllmEndpoints,
        timeout_s: float,
        before: FolderVersion | None,
        threads: Executor,
        *,
        partial: bool,
        read_fingerprints: ReadFingerprints,
    ) -> None:
        super().__init__(server.url, timeout_s, before, calls=server, threads=threads)
        self._link = ServerLink(server, timeout_s=timeout_s, by_folder=True)
        self._partial, self._read_fingerprints = partial, read_fingerprints
        self._staged: tuple[str, Fingerprints] | None = None

    def _stage(self, target: FolderVersion) -> None:
        self._link.drained = False
        manifest = self._link.prepare()
        if not self.changed:
            self._read_held()
        fingerprints = self._read_fingerprints(target.folder, manifest, self._partial)
        self._link.begin({"path": target.folder})
        self._link.wait_staged()
        self._staged = target.version, fingerprints

    def _read_held(self) -> None:
        self.held = self._link.endpoints.weight_version()
        model = self._link.endpoints.model_path()
        if self.before is None and self.held == "default" and model is not None:
            self.before = FolderVersion(model, self.held)

    def _load(self) -> None:
        assert self._staged is not None
        version, (sent, served) = self._staged
        self.paused = True
        self._link.pause()
        self.changed = True
        self._link.commit(version, sent, served)
        self.answer = {"message": f"{version} is served"}
        text = "\n".join(f"{name} {served[name]}" for name in sorted(served))  # one fingerprint for all weights
        self.fingerprint = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _open(self) -> None:
        assert self._staged is not None
        self._resume()
        self.serves = self._staged[0]

    def _resume(self) -> None:
        self._link.resume()
        self.paused = False

    def _drop_staged(self) -> None:
        if self.held is not None:
            try:
                self._link.abandon()
            except LudicError as error:  # what it staged is dropped when the next push begins
                logger.warning("%s could not drop the push: %s", self.name, error)

    def _put_aside(self) -> None:
        self._link.drain()

    async def withdraw(self, *, hung: bool) -> None:
        try:
            await super().withdraw(hung=hung)
        except Exception:
            if self.changed and self.serves is None and not hung:
                await self._in_thread(self._put_aside)
            raise


def resolve_folder(path: str) -> str:
    """The absolute path of a folder that exists here; other text, such as a name of a hub, as it
    is."""
    return str(Path(path).resolve()) if Path(path).exists() else path
