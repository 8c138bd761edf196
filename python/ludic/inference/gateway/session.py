"""One episode of an agent: its key, its limits, and the calls that it made, each with the exact
tokens that the model read and sampled."""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any
from uuid import uuid4

from ludic.columns import find_token_fault
from ludic.errors import ConfigError, DataError, DataTypeError
from ludic.inference.client import Episode, Sampled, SamplesTokens, as_episode
from ludic.inference.gateway.dialects.base import Answered, Ask, CallError
from ludic.inference.prompts.encoder import Answer, PromptEncoder
from ludic.inference.prompts.images import check_spans, intern_given
from ludic.inference.prompts.template import Dialogue, encode_text
from ludic.inference.prompts.transcript import Prompt
from ludic.inference.request import ChatCompletionRequest, SamplingParams, ToolRequest, derive_seed
from ludic.types import Message, TokenTrace, read_list

KEY = "sk-ludic-"
"""How the keys of sessions begin."""
IN_FLIGHT = 64
"""Calls of one session at a time."""
REPLIES = 64
"""Replies that are kept for clients that ask again."""
IN_LOOP = 2**17
"""Bytes of a request up to which its prompt is made on the event loop."""
SAMPLE_S = 600.0
"""Deadline of one sample."""


@dataclass(frozen=True)
class Limits:
    """Limits of one episode."""

    max_calls: int = 50
    max_tokens: int | None = None
    """Sampled tokens of all calls together."""
    context: int | None = None
    """Tokens of a prompt and its answer; None leaves it to the engine."""


@dataclass
class Call:
    """One call of an agent that was answered: what the model read and sampled."""

    number: int
    """By the time of its answer, from 0."""
    parent: int | None
    """The number of the call that it continues."""
    shared: int
    """Leading tokens of its prompt that the parent has."""
    reason: str
    """Why it continues a call, or none (`Prompt.reason`)."""
    trace: TokenTrace
    policy_version: int
    dialect: str
    model: str
    """The name that the agent asked for."""
    messages: Sequence[Message]
    """The messages after the parent's."""
    answer: Message
    text: str
    """All that was sampled, as text."""
    seconds: float
    """From the request to the answer."""
    weight_versions: Sequence[Mapping[str, Any]] = ()
    delivered: bool = False
    """Whether the agent has got the answer. One that it has not is no part of the episode."""


@dataclass
class Session:
    """What an agent is given: an address and a key, and the problem to solve.

    `calls` are its answered calls so far. `client()` is a client of the `openai` package that is
    already set up; any other library works with `base_url` and `api_key`.
    """

    base_url: str
    """OpenAI's, ends with `/v1`."""
    api_key: str = field(repr=False)
    prompt: str
    """The problem as text: the last message of the user."""
    messages: Sequence[Message] = ()
    """The problem as messages."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The columns of its row, for a task with data, the right answer among them: what the agent
    shows the model of it is up to the agent."""
    model: str = "policy"
    seed: int | None = None
    workspace: Any = None
    """The `Workspace` of a command, or the sandbox of a terminal task."""
    calls: list[Call] = field(default_factory=list)
    _clients: list[Any] = field(default_factory=list, repr=False)

    @property
    def anthropic_base_url(self) -> str:
        return self.base_url.removesuffix("/v1")

    def client(self) -> Any:
        """An `openai.AsyncOpenAI` for this session, which is closed when the agent has ended."""
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        # Loading certificates takes longer than a short episode, and the gateway has none.
        http = DefaultAsyncHttpxClient(trust_env=False, verify=not self.base_url.startswith("http://"))
        self._clients.append(AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, http_client=http))
        return self._clients[-1]

    async def close_clients(self) -> None:
        """Close what `client` made; one of a loop that has ended is closed already."""
        while self._clients:
            with suppress(Exception):
                await self._clients.pop().close()

    def environment(self, base_url: str | None = None) -> dict[str, str]:
        """The variables by which OpenAI's and Anthropic's libraries find the model, at `base_url`
        if an agent reaches it under another address."""
        url = base_url or self.base_url
        return {
            "OPENAI_BASE_URL": url,
            "OPENAI_API_BASE": url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": self.api_key,
            "LUDIC_MODEL": self.model,
        }


def path_of(call: Call, calls: Sequence[Call]) -> list[int]:
    """The numbers of a call and of the calls before it on its path, the call first."""
    numbers, at = [call.number], call.parent
    while at is not None:
        numbers.append(at)
        at = calls[at].parent
    return numbers


class Answering:
    """Answers the calls of one session by sampling. Belongs to the gateway's event loop."""

    def __init__(
        self,
        session: Session,
        client: SamplesTokens,
        encoder: PromptEncoder,
        episode: Episode | None,
        sampling: SamplingParams,
        limits: Limits,
        *,
        harness_sampling: bool = False,
    ) -> None:
        self.session, self.limits, self.sampling = session, limits, sampling
        self.is_over = False
        self.error: Exception | None = None
        """The first failure of the engine, which is not the agent's fault."""
        self.counts: Counter[str] = Counter()
        """`refused` and `undelivered` calls."""
        self.ignored: dict[str, Any] = {}
        """Settings of sampling that the agent asked for, with their first values."""
        self.jobs: set[Any] = set()
        """Its calls that are being answered, or were not received yet."""
        self.replies: dict[str, list[Any]] = {}
        """Hash of a request -> its jobs, for a client that asks again."""
        self.responses: dict[str, tuple[Call, int]] = {}
        """The id of an answer that a later request may name -> its call, and how many of the first
        messages were instructions."""
        self._client, self._encoder = client, encoder
        self._episode, self._is_own = episode or Episode(), episode is None
        self._harness_sampling = harness_sampling
        self._open = self._num_sampled = self._num_reserved = 0
        """Samples that are in flight or not received yet; tokens sampled; tokens of those in
        flight, at most."""
        self._drawn: dict[bytes, set[int]] = {}
        """Hash of a prompt -> the numbers of its samples that were delivered or are in flight."""
        self._numbers: dict[int, int] = {}
        """Number of a turn -> that of its call."""

    def end(self) -> None:
        """Forget the turns of a session that belongs to no episode; else the episode's end does."""
        if self._is_own:
            self._episode.end()

    async def answer(self, ask: Ask, dialect: str) -> list[tuple[Answered, Call, Callable[[bool], None]]]:
        """`ask.n` samples: each as text, as a call, and a function to call with whether the agent
        has got it. Raises CallError for a call that is refused."""
        started = monotonic()
        self._check_limits(ask)
        if ask.previous is not None:
            if ask.previous not in self.responses:
                raise CallError(f"previous_response_id {ask.previous!r} is not of an answer in this episode")
            named, skipped = self.responses[ask.previous]
            path = [self.session.calls[number] for number in reversed(path_of(named, self.session.calls))]
            known = [message for call in path for message in (*call.messages, call.answer)]
            ask.messages[ask.num_instructions : ask.num_instructions] = known[skipped:]
        ask.stop = [*self.sampling.stop_texts, *ask.stop]
        self._open += ask.n
        reserved = 0
        key, drawn, numbers = b"", set[int](), list[int]()
        try:
            prompt = await self.prepare(ask)
            room = self._room(ask, len(prompt.ids))
            reserved = room * ask.n
            self._num_reserved += reserved
            shared = b"" if prompt.parent is None else prompt.parent.ids[: prompt.shared].tobytes()
            images = "".join(span.digest for span in prompt.images).encode()
            key = hashlib.blake2b(shared + array("i", prompt.ids[prompt.shared :]).tobytes() + images, digest_size=8).digest()
            drawn = self._drawn.setdefault(key, set())
            numbers = [number for number in range(len(drawn) + ask.n) if number not in drawn][: ask.n]
            drawn.update(numbers)
            async with asyncio.TaskGroup() as tasks:
                sampling = [tasks.create_task(self._sample(prompt, ask, room, key, number)) for number in numbers]
            answers: list[tuple[Answered, Call, Callable[[bool], None]]] = []
            for task, number in zip(sampling, numbers, strict=True):
                answered, call, answer = self._read(prompt, ask, task.result(), dialect, monotonic() - started)
                answers.append((answered, call, partial(self._settle, call, prompt, answer, drawn, number)))
        except BaseException as error:
            self._open -= ask.n
            drawn.difference_update(numbers)
            self.counts["undelivered"] += ask.n if isinstance(error, asyncio.CancelledError) else 0
            if isinstance(error, ExceptionGroup):  # of the samples, of which the first tells
                raise error.exceptions[0] from None
            raise
        finally:
            self._num_reserved -= reserved
        self.error = None  # the engine answers again
        return answers

    def _settle(self, call: Call, prompt: Prompt, answer: Answer, drawn: set[int], number: int, delivered: bool) -> None:
        self._open -= 1
        call.delivered = delivered
        if not delivered:
            drawn.discard(number)
            self.counts["undelivered"] += 1
            return
        self.session.calls.append(call)
        call.number = len(self.session.calls) - 1
        turn = self._encoder.remember(prompt, answer, self._episode)
        if turn is not None:  # else a plain completion
            call.trace = turn.hold(call.trace)
            self._numbers[turn.number] = call.number

    def _check_limits(self, ask: Ask) -> None:
        limit = self.limits.max_calls
        if self.is_over:
            raise CallError("the episode is over; no call is answered any more", 403)
        if not 1 <= ask.n <= IN_FLIGHT:
            raise CallError(f"n ({ask.n}) must be from 1 to {IN_FLIGHT}")
        if ask.max_tokens is not None and ask.max_tokens < 1:
            raise CallError(f"max_tokens ({ask.max_tokens}) must be at least 1")
        if len(self.session.calls) + self._open + ask.n > limit or self.counts["undelivered"] > 2 * limit:
            self.counts["refused"] += 1
            raise CallError(f"the episode may make {limit} calls, and has made them", 403)
        if self._open + ask.n > IN_FLIGHT:
            raise CallError(f"a session may have {IN_FLIGHT} calls at a time", 429)
        for name, value in ask.sampling.items():
            if not self._harness_sampling:
                self.ignored.setdefault(name, value)

    def _room(self, ask: Ask, length: int) -> int:
        """How many tokens the answer may have."""
        limits, room = self.limits, self.sampling.max_tokens
        if limits.context is not None:
            if length >= limits.context:
                why = f"prompt is too long: {length} tokens > {limits.context - 1} maximum"
                raise CallError(why, 400, "context_length_exceeded")
            room = min(room, limits.context - length)
        if limits.max_tokens is not None:
            left = (limits.max_tokens - self._num_sampled - self._num_reserved) // ask.n
            if left < 1:
                self.counts["refused"] += 1
                raise CallError(f"the episode may sample {limits.max_tokens} tokens, and has sampled them", 403)
            room = min(room, left)
        return min(room, ask.max_tokens) if ask.max_tokens else room

    async def prepare(self, ask: Ask) -> Prompt:
        """The prompt of a call. A long one, or one with images, is made in a thread, so that others
        are answered meanwhile."""
        is_long = ask.size > IN_LOOP or any(isinstance(message.get("content"), list) for message in ask.messages)
        return await asyncio.to_thread(self._make_prompt, ask) if is_long else self._make_prompt(ask)

    def _make_prompt(self, ask: Ask) -> Prompt:
        if ask.prompt is not None:
            ids = encode_text(self._encoder.tokenizer, ask.prompt) if isinstance(ask.prompt, str) else list(ask.prompt)
            try:
                fault = find_token_fault(ids, vocab_size=len(self._encoder.tokenizer))
            except (DataError, DataTypeError) as error:
                fault = str(error)
            if fault:
                raise CallError(f"prompt has {fault}")
            try:
                check_spans(ids, (), self._encoder.images, "the model")
            except ConfigError as error:
                raise CallError(str(error)) from None
            return Prompt(Dialogue([]), (), "root", ids=ids)
        tools = ToolRequest(ask.tools, ask.tool_choice) if ask.tools else None
        try:
            ask.messages = list(intern_given(ask.messages, self._encoder.images, "the model"))
        except (ConfigError, DataError) as error:
            raise CallError(str(error)) from error
        try:
            dialogue = Dialogue.of(ChatCompletionRequest(self.session.model, ask.messages, self.sampling, tools=tools))
            if dialogue.tools:
                self._encoder.tool_format(dialogue.tools)
            return self._encoder.encode(dialogue, self._episode, begun=ask.begun)
        except Exception as error:  # of the template, which may raise anything
            raise CallError(f"the chat template cannot render this conversation: {error}") from error

    async def _sample(self, prompt: Prompt, ask: Ask, room: int, key: bytes, number: int) -> Sampled:
        given = {name: value for name, value in ask.sampling.items() if self._harness_sampling and name != "seed"}
        try:
            sampling = SamplingParams(**{**vars(self.sampling), **given, "max_tokens": room, "stop": ask.stop})
        except ConfigError as error:
            raise CallError(str(error)) from None
        base = self.session.seed
        seed = None if base is None else derive_seed(base ^ int.from_bytes(key[:4], "little"), number + 1)
        try:
            with as_episode(self._episode):
                async with asyncio.timeout(SAMPLE_S):
                    images = {"images": prompt.images} if prompt.images else {}
                    return await self._client.sample_tokens(prompt.ids, sampling=sampling, seed=seed, **images)
        except Exception as error:  # of the engine, which may be the user's
            self.error = self.error or error
            raise CallError(f"the model could not answer: {error}", 503) from error

    def _read(self, prompt: Prompt, ask: Ask, sampled: Sampled, dialect: str, seconds: float) -> tuple[Answered, Call, Answer]:
        is_chat = ask.prompt is None
        answer = self._encoder.read_answer(prompt, sampled, stops=ask.stop, splits_reasoning=is_chat, remembers=False)
        ids = read_list(sampled.trace, "completion_token_ids")
        self._num_sampled += len(ids)
        parent = prompt.parent
        seen = 0 if parent is None else parent.num_messages + 1  # and its answer
        call = Call(
            number=-1,
            shared=prompt.shared,
            parent=None if parent is None else self._numbers.get(parent.number),
            reason=prompt.reason,
            trace=answer.trace,
            policy_version=sampled.policy_version,
            dialect=dialect,
            model=ask.model,
            messages=list(ask.messages[seen:]) if is_chat else [{"role": "user", "content": str(ask.prompt)}],
            answer=answer.message,
            text=answer.whole,
            seconds=seconds,
            weight_versions=sampled.weight_versions,
        )
        return _shown(answer, ask, prompt, ids, self._encoder), call, answer


def _shown(answer: Answer, ask: Ask, prompt: Prompt, ids: Sequence[int], encoder: PromptEncoder) -> Answered:
    """The answer as dialects write it. Ids of calls are new, as on servers."""
    message = answer.message
    for call in message.get("tool_calls") or ():
        call["id"] = f"call_{uuid4().hex[:24]}"
    logps = read_list(answer.trace, "completion_logprobs") or [] if ask.logprobs else []
    return Answered(
        text=str(message.get("content") or "").removeprefix(str((ask.begun or {}).get("content") or "")),
        reasoning=message.get("reasoning_content"),
        tool_calls=message.get("tool_calls") or (),
        finish_reason=str(answer.trace.finish_reason),
        num_prompt=len(prompt.ids),
        num_completion=len(ids),
        num_cached=prompt.shared,
        logprobs=[(encoder.decode([token], special=True), logp) for token, logp in zip(ids, logps, strict=False)],
        stop_text=answer.stop,
    )
