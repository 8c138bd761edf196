"""Inference engines that load a checkpoint while they run, and their sync: all engines serve the
new version, or all serve the one before.

    engines = [SGLangEngine("http://127.0.0.1:30000"), VLLMEngine("http://127.0.0.1:8000")]
    answers = await sync_weights_to_engines(engines, "checkpoints/step_000010")

The engines take each step together: bring the weights close, hold them, answer requests again and
say which version they serve (`ludic.distributed.push.engine_sessions`). No server answers with new
weights before all servers hold them. An engine of your own has one method and loads at once:

    class MyEngine:
        async def update_weights_from_checkpoint(self, checkpoint_path: str) -> dict:
            ...
            return {"success": True}

The SGLang engine was written from the source code of SGLang 0.5.23 and is tested with a stub; it
has not been run against a real server.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, Protocol

from ludic.distributed.push.engine_sessions import (
    CustomSession,
    EngineSession,
    Fingerprints,
    FolderVersion,
    ServerSession,
    SGLangSession,
    VllmSession,
    resolve_folder,
)
from ludic.distributed.push.manifest import ServerManifest, fingerprint_folder
from ludic.distributed.push.target import make_publish_error
from ludic.errors import ConfigError, ConfigTypeError, PublishError, check_value
from ludic.inference.sglang import SGLangEndpoints
from ludic.inference.vllm.endpoints import VllmEndpoints

logger = logging.getLogger(__name__)

Policy = Literal["all", "any"] | int
EngineAnswer = dict[str, Any]
"""`success`, `version` that it serves (None if it is not known, or none), `seconds`, `fingerprint`
of the weights that a vLLM server has, `error` where it failed, and what the engine said itself."""


class InferenceEngine(Protocol):
    """A server that can load a checkpoint while it runs."""

    async def update_weights_from_checkpoint(self, checkpoint_path: str) -> dict[str, Any]:
        """The engine's answer. `{"success": False, "error": ...}` reports a failure, as an
        exception does. `version` and `fingerprint` are passed on."""
        ...


class _ServerEngine:
    """A server that ludic knows."""

    def __init__(self, base_url: str, timeout: float = 300.0) -> None:
        """`timeout`: seconds that one sync may take on this server."""
        self.base_url, self.timeout = base_url.rstrip("/"), timeout

    async def update_weights_from_checkpoint(self, checkpoint_path: str) -> dict[str, Any]:
        """Load the checkpoint. Raises PublishError with the server's answer."""
        return (await sync_weights_to_engines([self], checkpoint_path, retries=0))[0]


class SGLangEngine(_ServerEngine):
    """Makes an SGLang server load a checkpoint: it is paused meanwhile, and must then answer with
    the version."""


class VLLMEngine(_ServerEngine):
    """Makes a vLLM server load a checkpoint. The checkpoint is checked against the server's model,
    staged, loaded while the server is paused, and compared with the weights that the server then
    has."""

    def __init__(self, base_url: str, timeout: float = 300.0, *, partial: bool = False) -> None:
        """`timeout`: seconds that one sync may take on this server. `partial`: the checkpoint may
        omit frozen weights, whose values the server has."""
        super().__init__(base_url, timeout)
        self.partial = partial


async def update_sglang_weights_from_disk(base_url: str, checkpoint_path: str, *, timeout: float = 300.0) -> dict[str, Any]:
    """Have one SGLang server load a checkpoint."""
    return await SGLangEngine(base_url, timeout).update_weights_from_checkpoint(checkpoint_path)


async def update_vllm_weights_from_disk(base_url: str, checkpoint_path: str, *, timeout: float = 300.0) -> dict[str, Any]:
    """Have one vLLM server load a checkpoint."""
    return await VLLMEngine(base_url, timeout).update_weights_from_checkpoint(checkpoint_path)


async def sync_weights_to_engines(
    engines: Sequence[InferenceEngine], checkpoint_path: str | Path, *, policy: Policy = "all", retries: int = 1
) -> list[EngineAnswer]:
    """Have all engines load a checkpoint concurrently. Returns their answers in the order of the
    engines.

    checkpoint_path: a folder with `model.safetensors` and the model's config, which the servers see
        under the same path. Its name becomes the version.
    policy: how many engines must succeed: `all`, `any` one, or a number. Where fewer do, those that
        loaded the checkpoint go back to the version that was synced last, and PublishError is
        raised with all answers; its message says who serves what. A server whose weights are not
        known is left paused, until a later sync reaches it.
    retries: how often an engine that refuses is asked again. One that hangs is not.

    A cancellation is obeyed after the sync, within the timeouts of the engines.
    """
    if not engines:
        raise ConfigError("there is no engine to sync weights to")
    if not str(checkpoint_path):
        raise ConfigError("checkpoint_path is empty; give the folder of the checkpoint")
    for engine in engines:
        if not hasattr(engine, "update_weights_from_checkpoint"):
            raise ConfigTypeError(f"{engine!r} needs `async def update_weights_from_checkpoint(self, path) -> dict`")
    check_value("retries", retries, least=0)
    if policy not in ("all", "any"):
        check_value("policy", policy, "or give 'all' or 'any'", whole=True, least=1, most=len(engines))
    needed = len(engines) if policy == "all" else 1 if policy == "any" else policy
    folder = resolve_folder(str(checkpoint_path))
    sync = asyncio.ensure_future(_Sync(engines, FolderVersion(folder, Path(folder).name), retries).run(needed))
    try:
        return await asyncio.shield(sync)
    except asyncio.CancelledError:
        await asyncio.wait([sync])
        if not sync.cancelled() and sync.exception() is not None:
            logger.error("the sync that was cancelled failed: %s", sync.exception())
        raise


async def sync_returned_engines(engines: Sequence[InferenceEngine]) -> list[EngineAnswer | None]:
    """Bring engines to the version that was synced last: engines that the sync did not reach, and
    servers that have another version, as after a restart. Call it before such engines generate
    samples. Returns their answers, in the order of the engines; None for an engine that needs
    nothing. One that cannot be reached yet has an answer with its error.
    """
    return list(await asyncio.gather(*(_sync_if_returned(engine) for engine in engines)))


async def _sync_if_returned(engine: InferenceEngine) -> EngineAnswer | None:
    if id(engine) not in _synced:
        return None
    synced, was_reached = _synced[id(engine)]
    try:
        if was_reached and await _has_version(engine, synced.version):
            return None
        return (await sync_weights_to_engines([engine], synced.folder, retries=0))[0]
    except PublishError as error:
        return dict(error.answers[0])


async def _has_version(engine: InferenceEngine, version: str) -> bool:
    """Whether an engine that was reached has this version still. Engines of the user are
    believed."""
    threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ludic-engines")
    try:
        session = _open_session(engine, threads, _FolderFingerprints())
        if not isinstance(session, ServerSession):
            return True
        await session.take(session.read_held)
    finally:
        threads.shutdown(wait=False)  # a server that hangs must not hold the event loop
    return session.error is None and session.held == version


_synced: dict[int, tuple[FolderVersion, bool]] = {}
"""Id of an engine, for as long as it exists -> the version that it was synced to last, and whether
it took part with success."""


def _get_synced(engine: object) -> FolderVersion | None:
    return _synced[id(engine)][0] if id(engine) in _synced else None


def _set_synced(engine: object, version: FolderVersion, *, reached: bool) -> None:
    if id(engine) not in _synced:
        try:
            weakref.finalize(engine, _synced.pop, id(engine), None)
        except TypeError:  # an object that cannot be observed: its id may come back as another's
            return
    _synced[id(engine)] = version, reached


def _open_session(engine: InferenceEngine, threads: Executor, fingerprints: _FolderFingerprints) -> EngineSession:
    before = _get_synced(engine)
    is_server = type(engine).update_weights_from_checkpoint is _ServerEngine.update_weights_from_checkpoint
    if is_server and isinstance(engine, SGLangEngine):
        return SGLangSession(SGLangEndpoints(engine.base_url), engine.timeout, before, threads)
    if is_server and isinstance(engine, VLLMEngine):
        server, read = VllmEndpoints(engine.base_url), fingerprints.read
        return VllmSession(server, engine.timeout, before, threads, partial=engine.partial, read_fingerprints=read)
    return CustomSession(engine, before)


class _Sync:
    """One sync of all engines."""

    def __init__(self, engines: Sequence[InferenceEngine], target: FolderVersion, retries: int) -> None:
        self._engines, self._target, self._retries = engines, target, retries
        self._threads = ThreadPoolExecutor(max_workers=len(engines), thread_name_prefix="ludic-engines")
        fingerprints = _FolderFingerprints()
        self._sessions = [_open_session(engine, self._threads, fingerprints) for engine in engines]

    async def run(self, needed: int) -> list[EngineAnswer]:
        try:
            await asyncio.gather(*(session.stage_with_retries(self._target, self._retries) for session in self._sessions))
            await self._agree(needed)
            await asyncio.gather(*(session.take(session.load) for session in self._healthy()))
            await self._agree(needed)
            await asyncio.gather(*(session.take(session.open) for session in self._healthy()))
            await self._agree(needed)
            failed = [session for session in self._sessions if session.error is not None]
            await asyncio.gather(*(session.go_back("") for session in failed))
        finally:
            self._threads.shutdown(wait=False)
        for engine, session in zip(self._engines, self._sessions, strict=True):
            _set_synced(engine, self._target, reached=session not in failed)
        if failed:
            logger.error("%s", self._describe(f"version {self._target.version} is not on all engines"))
        return [self._answer(session) for session in self._sessions]

    def _healthy(self) -> list[EngineSession]:
        return [session for session in self._sessions if session.error is None]

    async def _agree(self, needed: int) -> None:
        """Take all engines back and raise PublishError if too few have come this far."""
        count, total = len(self._healthy()), len(self._sessions)
        if count >= needed:
            return
        causes = [session.error for session in self._sessions if session.error is not None]
        taken_back = f"{total - count} other engines failed, so version {self._target.version} was withdrawn"
        await asyncio.gather(*(session.go_back(taken_back) for session in self._sessions))
        for engine, session in zip(self._engines, self._sessions, strict=True):
            if (before := _get_synced(engine)) is not None:
                _set_synced(engine, before, reached=session.serves == before.version)
        message = self._describe(f"{total - count} of {total} engines did not load {self._target.folder}")
        raise make_publish_error(message, causes, answers=[self._answer(session) for session in self._sessions])

    def _describe(self, headline: str) -> str:
        """What failed, and which engines serve which version."""
        serving: dict[str | None, list[str]] = {}
        for session in self._sessions:
            serving.setdefault(session.serves, []).append(session.name)
        states = [
            f"{', '.join(names)} "
            + (f"serve version {version}" if version is not None else "serve nothing, or an unknown version")
            for version, names in serving.items()
        ]
        errors = [f"{session.name}: {session.error}" for session in self._sessions if session.error is not None]
        return f"{headline}. Now {'; '.join(states)}. {'; '.join(errors)}"

    def _answer(self, session: EngineSession) -> EngineAnswer:
        known = {"version": session.serves, "seconds": session.used_s, "fingerprint": session.fingerprint}
        if session.error is not None:
            return {**known, "success": False, "error": str(session.error)}
        return {**session.answer, **known, "success": True}


class _FolderFingerprints:
    """Fingerprints of a folder, read once for all servers of one model."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: list[tuple[str, ServerManifest, bool, Fingerprints]] = []

    def read(self, folder: str, manifest: ServerManifest, partial: bool) -> Fingerprints:
        with self._lock:
            for *key, fingerprints in self._known:
                if key == [folder, manifest, partial]:
                    return fingerprints
            read = fingerprint_folder(Path(folder), manifest, partial=partial)
            self._known.append((folder, manifest, partial, read))
            return read
