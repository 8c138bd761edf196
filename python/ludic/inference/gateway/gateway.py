"""The gateway: an HTTP server in this process that samples from the run's engine, so that an agent
needs nothing but an address and a key. It has no endpoint that opens or closes a session, and none
for rewards: what an agent sends is not trusted."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from ludic.errors import ConfigError
from ludic.inference.client import SamplesTokens, current_episode
from ludic.inference.gateway.dialects import chat, completions, messages, responses
from ludic.inference.gateway.dialects.base import Ask, CallError, encode
from ludic.inference.gateway.http import Exchange, HttpServer, Reply, Request
from ludic.inference.gateway.session import KEY, REPLIES, Answering, Limits, Session
from ludic.inference.prompts.encoder import PromptEncoder
from ludic.inference.request import SamplingParams
from ludic.types import Message

logger = logging.getLogger(__name__)

T = TypeVar("T")
DIALECTS: Mapping[str, Any] = {each.PATH: each for each in (chat, responses, messages, completions)}
RETRY_GRACE_S = 2.0
"""How long the sample of a client that has gone is kept for its second attempt."""
START_S = 30.0
HOST = "127.0.0.1"


class Gateway:
    """Serves the policy to agents. One for each process; it has a thread and an event loop of its
    own, because the trainer blocks its loop while it computes.

    >>> with Gateway(client, tokenizer) as gateway:
    ...     session = gateway.open(prompt="2+2=", sampling=SamplingParams(1.0), seed=0)
    ...     # an agent calls session.base_url with session.api_key
    ...     calls = await gateway.close_session(session)

    `client` samples; its `sample_tokens` is called on the gateway's loop. `history`: `template`
    follows what the chat template shows of earlier turns, `sampled` keeps every answer as it was
    sampled. `sampling`: `run` takes the settings of the run, `harness` those of each request.
    `unsupported`: `error` refuses formats that need constrained decoding, `ignore` answers without.
    """

    def __init__(
        self,
        client: SamplesTokens,
        tokenizer: Any,
        *,
        history: str = "template",
        sampling: str = "run",
        unsupported: str = "error",
        port: int = 0,
    ) -> None:
        if not isinstance(client, SamplesTokens):
            raise ConfigError(f"{type(client).__name__} has no sample_tokens; agents need the in-process engine, vLLM or SGLang")
        self._client, self._port, self._bound = client, port, port
        images = getattr(client, "images", None)
        self._encoder = PromptEncoder(tokenizer, images, keeps_sampled=history == "sampled")
        self._harness_sampling, self._ignores = sampling == "harness", unsupported == "ignore"
        self._sessions: dict[str, Answering] = {}
        self._server = HttpServer(self._handle)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Gateway:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """The address that agents on this machine use, without a path."""
        return f"http://{HOST}:{self._bound}"

    def start(self) -> None:
        """Begin to serve. A second call does nothing."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="gateway", daemon=True)
            self._thread.start()
            try:
                self._bound = self._run(self._server.listen(HOST, self._port)).result(START_S)
            except OSError as error:
                self.stop()
                raise ConfigError(f"the gateway cannot use port {self._port}: {error.strerror}; choose another, or 0") from error

    def stop(self) -> None:
        """End all sessions, connections and the thread."""
        if self._loop is not None and self._thread is not None:
            self._run(self._end()).result(START_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(START_S)
            self._loop.close()
            self._loop = self._thread = None

    def open(
        self,
        *,
        sampling: SamplingParams,
        seed: int | None = None,
        limits: Limits | None = None,
        prompt: str = "",
        messages: Sequence[Message] = (),
        row: Mapping[str, Any] | None = None,
        workspace: Any = None,
        socket: Path | None = None,
    ) -> Session:
        """A session for one episode. `socket`: a file at which this session alone is served, for an
        agent without a network."""
        self.start()
        key = f"{KEY}{secrets.token_urlsafe(18)}"
        session = Session(f"{self.url}/v1", key, prompt, messages, row or {}, seed=seed, workspace=workspace)
        limits = limits or Limits()
        own = [length for length in (limits.context, getattr(self._client, "context_length", None)) if length is not None]
        answering = Answering(
            session,
            self._client,
            self._encoder,
            current_episode(),
            sampling,
            replace(limits, context=min(own, default=None)),
            harness_sampling=self._harness_sampling,
        )
        if socket is not None:
            self._run(self._server.listen_at(socket, session.api_key)).result(START_S)
        self._sessions[session.api_key] = answering
        return session

    async def close_session(self, session: Session) -> Answering:
        """End a session: calls in flight are cancelled, later ones are refused. Returns what it
        counted; `session.calls` has its calls."""
        return await asyncio.wrap_future(self._run(self._close(session)))

    async def _close(self, session: Session) -> Answering:
        answering = self._sessions.pop(session.api_key)
        answering.is_over = True
        self._server.stop_listening(session.api_key)
        for job in list(answering.jobs):
            await job.end()
        answering.end()
        return answering

    async def _end(self) -> None:
        for answering in list(self._sessions.values()):
            await self._close(answering.session)
        await self._server.close()
        if (close := getattr(self._client, "aclose", None)) is not None:
            await close()  # the connections of this loop alone

    def _run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._loop is None:
            work.close()
            raise RuntimeError("the gateway is not serving; call start()")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _handle(self, request: Request) -> Exchange:
        """The exchange of a request. Never raises."""
        key, path = _find_key(request)
        dialect = DIALECTS.get(path)
        try:
            if path in ("/", "/health"):
                return reply_at_once({})
            answering = self._sessions.get(key)
            if answering is None:
                raise CallError("the key is not of a running episode", 401)
            if path == "/v1/models" or path.startswith("/v1/models/"):
                return reply_at_once(_models(path, answering.session.model))
            if request.method != "POST" or (dialect is None and path != messages.COUNT_PATH):
                raise CallError(f"{request.method} {path} is no endpoint of the gateway", 404)
            if path == messages.COUNT_PATH:
                prompt = await answering.prepare(self._read(messages, request))
                return reply_at_once({"input_tokens": len(prompt.ids)})
            return self._call(answering, dialect, request)
        except Exception as error:
            return reply_at_once(_refuse(error, dialect or chat))

    def _read(self, dialect: Any, request: Request) -> Ask:
        ask: Ask = dialect.read(request.body, ignore_format=self._ignores)
        ask.size = len(request.body)
        return ask

    def _call(self, answering: Answering, dialect: Any, request: Request) -> Exchange:
        ask = self._read(dialect, request)
        ident = request.headers.get("idempotency-key") or hashlib.blake2b(request.body, digest_size=16).hexdigest()
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0" or "idempotency-key" in request.headers
        same = answering.replies.setdefault(ident, []) if is_retry else answering.replies.get(ident, [])
        known = [job for job in same if not job.has_failed] if is_retry else []
        # The call whose client has gone; else one that was answered, whose answer may be lost.
        job = next((job for job in known if job.is_abandoned), known[-1] if known else None)
        if job is None:
            job = _Job(answering, dialect, ask)
            answering.replies.pop(ident, None)
            answering.replies[ident] = [*same, job][-REPLIES:]
            while len(answering.replies) > REPLIES:
                del answering.replies[next(iter(answering.replies))]
        return job.exchange(dialect.PING if ask.stream else None)


class _Job:
    """One call, from its request to the receipt of its answer. Several requests wait for it if a
    client asks again."""

    def __init__(self, answering: Answering, dialect: Any, ask: Ask) -> None:
        self._answering, self._dialect = answering, dialect
        self._waiting, self._is_received = 0, False
        self._settles: list[Callable[[bool], None]] = []
        answering.jobs.add(self)
        self._task = asyncio.ensure_future(self._sample(ask))
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())  # somebody has seen it

    @property
    def has_failed(self) -> bool:
        """Whether it has ended without an answer, so that a second attempt samples."""
        return self._task.done() and (self._task.cancelled() or self._task.exception() is not None)

    @property
    def is_abandoned(self) -> bool:
        """Whether every client that waited for it has gone, and nobody has its answer."""
        return not self._waiting and not self._is_received

    def exchange(self, ping: bytes | None) -> Exchange:
        """One more request that waits for the answer."""
        self._waiting += 1
        return Exchange(asyncio.ensure_future(self._reply()), ping, self._receive, self._lose)

    async def end(self) -> None:
        """Cancel it; an answer that nobody has got is lost."""
        self._task.cancel()
        await asyncio.wait([self._task])
        self._settle(delivered=False)

    async def _sample(self, ask: Ask) -> Reply:
        dialect = self._dialect
        answers = await self._answering.answer(ask, dialect.__name__.rpartition(".")[2])
        self._settles = [settle for _, _, settle in answers]
        shown, ident = [answered for answered, _, _ in answers], f"{dialect.ID}{uuid4().hex[:24]}"
        if dialect is responses:
            self._answering.responses[ident] = answers[0][1], ask.num_instructions
        if ask.stream:
            return Reply(200, b"".join(dialect.stream(ask, shown, ident)), "text/event-stream")
        return Reply(200, encode(dialect.write(ask, shown, ident)))

    async def _reply(self) -> Reply:
        """The answer, or the error as the dialect tells it."""
        try:
            return await asyncio.shield(self._task)
        except asyncio.CancelledError:
            if not self._task.cancelled():
                raise
            return _refuse(CallError("the episode is over; no call is answered any more", 403), self._dialect)
        except Exception as error:
            return _refuse(error, self._dialect)

    def _receive(self) -> None:
        self._is_received = True
        self._settle(delivered=True)

    def _lose(self) -> None:
        self._waiting -= 1
        asyncio.get_running_loop().call_later(RETRY_GRACE_S, self._give_up)

    def _give_up(self) -> None:
        if self.is_abandoned:
            self._task.cancel()
            self._settle(delivered=False)

    def _settle(self, *, delivered: bool) -> None:
        settles, self._settles = self._settles, []
        for settle in settles:
            settle(delivered)
        if settles or self.has_failed or not delivered:
            self._answering.jobs.discard(self)


def _refuse(error: Exception, dialect: Any) -> Reply:
    if not isinstance(error, CallError):
        logger.error("the gateway failed on a call", exc_info=error)
        error = CallError(f"{type(error).__name__}: {error}", 500)
    return Reply(error.status, encode(dialect.error_body(str(error), error.status, error.code)))


def reply_at_once(reply: Reply | Mapping[str, Any]) -> Exchange:
    """An exchange that is answered already."""
    done: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
    done.set_result(reply if isinstance(reply, Reply) else Reply(200, encode(reply)))
    return Exchange(done)


def _find_key(request: Request) -> tuple[str, str]:
    """(the key, the path without it). Programs that cannot set a header have it in the path:
    `/e/KEY/v1/...`. On the socket of a session no key is needed."""
    path = request.path
    if path.startswith("/e/") and path.count("/") >= 3:
        _, _, key, rest = path.split("/", 3)
        return key, _normal(f"/{rest}")
    headers = request.headers
    bearer = headers.get("authorization", "")
    sent = [headers.get("x-api-key", ""), bearer[7:] if bearer[:7].lower() == "bearer " else "", headers.get("api-key", "")]
    keys = [each for each in sent if each.startswith(KEY)]
    return (request.key_hint or next(iter(keys), "")), _normal(path)


def _normal(path: str) -> str:
    """The path with one `/v1`: clients add it to an address that has it, or leave it out."""
    while path.startswith("/v1/v1/"):
        path = path[3:]
    return path if path.startswith("/v1/") or path in ("/", "/health") else f"/v1{path}"


def _models(path: str, name: str) -> dict[str, Any]:
    """The list of models, or the one that was asked for: every name is the policy."""
    asked = path.removeprefix("/v1/models").strip("/")
    model = {"id": asked or name, "object": "model", "created": 0, "owned_by": "ludic"}
    return model if asked else {"object": "list", "data": [model]}
