"""A model in this process behind the chat interface: the same agents and engines run with it as
with a server."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ludic.errors import ConfigError, InferenceError
from ludic.inference.current_episode import Episode, current_episode
from ludic.inference.local.decode import Bounds, Completion, DecodeRequest, decode
from ludic.inference.local.prefixes import PrefixCache
from ludic.inference.local.sampler import check_sampling
from ludic.inference.local.threads import in_own_thread
from ludic.inference.local.weights import copy_weights, own_copy
from ludic.inference.prompts.template import ChatTemplate, offered_tools
from ludic.inference.prompts.tool_calls import assistant_message, calls_made
from ludic.inference.request import ChatCompletionRequest
from ludic.inference.sampling import SamplingParams
from ludic.types import ChatResponse, Message, TokenTrace

LogprobsMode = Literal["raw", "processed"]
PROMPT_CACHE = 4096
"""Rendered prompts whose ids are kept: the members of a group share theirs."""


@dataclass(frozen=True)
class _Tokens:
    """A prompt that is token ids already."""

    ids: list[int]


@dataclass(frozen=True)
class _Chat:
    """A prompt that is messages, with the tools that the model may call."""

    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]] = ()

    @cached_property
    def key(self) -> str:
        return json.dumps([self.messages, self.tools])


@dataclass
class _Answer:
    prompt_ids: list[int]
    completion: Completion
    text: str
    version: int


@dataclass
class _Job:
    """What somebody waits for: the continuation of messages, or of token ids."""

    prompt: _Chat | _Tokens
    sampling: SamplingParams
    seed: int | None
    answer: asyncio.Future[_Answer]
    episode: Episode | None = None

    @property
    def stops(self) -> list[str]:
        stop = self.sampling.stop
        return [stop] if isinstance(stop, str) and stop else [s for s in stop or [] if s]


@dataclass
class _Line:
    """Those who wait on one event loop, and the task that serves them."""

    jobs: list[_Job] = field(default_factory=list)
    worker: asyncio.Task[None] | None = None


class LocalChatClient:
    """Chat completions from a causal model of transformers in this process.

    Requests that wait at the same time are decoded as one batch of at most `max_batch_size`, in a
    worker thread, so that the event loop goes on. Each gets exactly the tokens that its seed gives
    it alone. One that is cancelled is left out of the rest of its batch; one that cannot be served
    fails alone; a failure of the model reaches everybody in the batch.

    The prompt is the tokenizer's chat template where it has one, else the contents of the messages
    one behind another, without special tokens. Tools are shown by a chat template that renders
    them; calls are read as Hermes and Qwen models write them. Token ids returned are those that the
    model read and sampled; text is never tokenised again.

    `logprobs_mode="raw"` returns log-probabilities of the model as it is, which are the trainer's;
    `"processed"` those of the distribution drawn from, after penalties, temperature and top-p. At
    temperature 1 and top-p 1 they are the same.

    The turns of an episode that a `RolloutEngine` plays go on from the keys and values of the turns
    before, as long as the weights stay as they are; at most `prefix_cache_bytes` are kept for that.

    With `copy_model` the client holds weights of its own, on `device` and of type `dtype` where
    given, which change with `sync_weights` alone; without, it samples from `model` itself and sees
    every optimizer step at once.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        max_batch_size: int = 256,
        copy_model: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        logprobs_mode: LogprobsMode = "raw",
        prefix_cache_bytes: int = 256 * 2**20,
    ) -> None:
        if max_batch_size < 1:
            raise ConfigError(f"max_batch_size ({max_batch_size}) must be >= 1")
        if prefix_cache_bytes < 0:
            raise ConfigError(
                f"prefix_cache_bytes ({prefix_cache_bytes}) must be >= 0; 0 keeps nothing between the turns of an episode"
            )
        if logprobs_mode not in ("raw", "processed"):
            raise ConfigError(f"logprobs_mode ({logprobs_mode!r}) must be 'raw' or 'processed'")
        if not copy_model and (device is not None or dtype is not None):
            raise ConfigError(
                "device and dtype are those of the client's own copy of the model; set copy_model=True, or leave them out"
            )
        self.model = own_copy(model, device, dtype) if copy_model else model
        self.tokenizer = tokenizer
        self.logprobs_mode = logprobs_mode
        self._template = ChatTemplate(tokenizer)
        self._max_batch_size = max_batch_size
        self._eos_ids = end_token_ids(model, tokenizer)
        self._pad_id = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
        self._version = 0
        self._busy = threading.Lock()
        """Held while a batch is decoded and while weights are copied."""
        self._lines: dict[asyncio.AbstractEventLoop, _Line] = {}
        self._prompts: OrderedDict[str, list[int]] = OrderedDict()
        self._prefixes = PrefixCache(prefix_cache_bytes) if prefix_cache_bytes else None

    async def complete(self, request: ChatCompletionRequest) -> tuple[ChatResponse, dict[str, Any]]:
        """One completion. The info carries `policy_version`, the weights it was sampled from.

        Where tools are offered, it also carries `raw_response` in OpenAI's shape, whose message has
        the calls that the text makes. The response's text is all that was sampled, calls included.

        Raises ConfigError for settings without meaning, InferenceError for a prompt that the model
        cannot read or where it fails.
        """
        if request.extensions is not None:
            raise ConfigError(f"unsupported request.extensions: {type(request.extensions).__name__}; LocalChatClient has none")
        tools = offered_tools(request.tools)
        answer = await self._ask(_Chat(request.messages, tools), request.sampling, request.seed)
        message = assistant_message(answer.text, first_id=calls_made(request.messages)) if tools else None
        asked = request.return_
        response = ChatResponse(
            text=answer.text,
            completion_token_ids=answer.completion.token_ids if asked.return_token_ids else None,
            completion_logprobs=self._logprobs(answer) if asked.return_chosen_logprobs else None,
            finish_reason=_finish_reason(answer.completion, message),
            prompt_token_ids=answer.prompt_ids if asked.return_token_ids else None,
        )
        info: dict[str, Any] = {"policy_version": answer.version}
        if message is not None:
            choice = {"index": 0, "message": message, "finish_reason": response.finish_reason}
            info["raw_response"] = {"choices": [choice]}
        return response, info

    async def complete_tokens(
        self, prompt_token_ids: Sequence[int], *, sampling: SamplingParams | None = None, seed: int | None = None
    ) -> TokenTrace:
        """Continue token ids as they are. Text is only made to find stop strings."""
        answer = await self._ask(_Tokens(list(prompt_token_ids)), sampling or SamplingParams(), seed)
        return TokenTrace(
            prompt_token_ids=answer.prompt_ids,
            completion_token_ids=answer.completion.token_ids,
            completion_logprobs=self._logprobs(answer),
            finish_reason=answer.completion.finish_reason,
        )

    async def get_policy_version(self) -> int:
        return self._version

    def sync_weights(self, params: Mapping[str, Tensor], *, timeout_s: float = 600.0, version: str | int | None = None) -> str:
        """Copy weights by name, between two batches and never within one; returns the version now
        sampled from.

        The names are those of the model without adapters. The trainer's own model, adapters or
        none, is up to date as it is; a copy of one with adapters has them merged. Everything is
        checked before the first weight is copied. Raises ConfigError for a name that the model does
        not have, a shape that differs or a version that is no number, TimeoutError if a batch takes
        longer than `timeout_s`.
        """
        number = _version_number(version)
        if not self._busy.acquire(timeout=timeout_s):
            raise TimeoutError(f"a batch was still being decoded after {timeout_s} s; the weights were not changed")
        try:
            copy_weights(self.model, params)
            if self._prefixes is not None:
                self._prefixes.clear()
            self._version = self._version + 1 if number is None else number
            return str(self._version)
        finally:
            self._busy.release()

    def _logprobs(self, answer: _Answer) -> list[float]:
        return answer.completion.logprobs if self.logprobs_mode == "raw" else answer.completion.drawn_logprobs

    async def _ask(self, prompt: _Chat | _Tokens, sampling: SamplingParams, seed: int | None) -> _Answer:
        """Queue up on this event loop and wait."""
        check_sampling(sampling)
        loop = asyncio.get_running_loop()
        line = self._lines.get(loop) or self._new_line(loop)
        job = _Job(prompt, sampling, seed, loop.create_future(), current_episode())
        line.jobs.append(job)
        if line.worker is None:
            line.worker = loop.create_task(self._work(line))
        return await job.answer

    def _new_line(self, loop: asyncio.AbstractEventLoop) -> _Line:
        for other in [other for other in self._lines if other.is_closed()]:
            del self._lines[other]
        line = self._lines[loop] = _Line()
        return line

    async def _work(self, line: _Line) -> None:
        """Decode batches until nobody waits."""
        batch: list[_Job] = []
        try:
            while await _settled(line):
                batch, line.jobs = line.jobs[: self._max_batch_size], line.jobs[self._max_batch_size :]
                batch = [job for job in batch if not job.answer.done()]
                if batch:
                    _deliver(batch, await in_own_thread(self._decode, batch))
        finally:
            line.worker = None
            left, line.jobs = [*batch, *line.jobs], []
            _deliver(left, [InferenceError("the task that serves this client was cancelled") for _ in left])

    def _decode(self, batch: Sequence[_Job]) -> list[_Answer | Exception]:
        """An answer or an error for each job; it never raises."""
        try:
            with self._busy:
                return self._answers(batch)
        except Exception as error:
            return [_as_inference_error(error) for _ in batch]

    def _answers(self, batch: Sequence[_Job]) -> list[_Answer | Exception]:
        version, bounds = self._version, Bounds.of(self.model)
        requests: dict[int, DecodeRequest] = {}
        answers: dict[int, _Answer | Exception] = {}
        for i, prompt in enumerate(self._prompt_ids(batch)):
            try:
                if isinstance(prompt, Exception):
                    raise prompt
                requests[i] = self._request(batch[i], prompt, bounds)
            except Exception as error:
                answers[i] = _as_inference_error(error)
        if requests:
            asked = list(requests.values())
            completions = decode(self.model, asked, eos_ids=self._eos_ids, pad_id=self._pad_id, prefixes=self._prefixes)
            texts = self._texts(completions)
            for i, completion, text in zip(requests, completions, texts, strict=True):
                text = _before_stop(text, batch[i].stops)
                answers[i] = _checked(_Answer(requests[i].prompt_ids, completion, text, version))
        return [answers[i] for i in range(len(batch))]

    def _request(self, job: _Job, prompt_ids: list[int], bounds: Bounds) -> DecodeRequest:
        room = bounds.room(prompt_ids)
        limit = job.sampling.max_tokens if room is None else min(room, job.sampling.max_tokens)
        return DecodeRequest(
            prompt_ids=prompt_ids,
            sampling=job.sampling,
            limit=limit,
            seed=job.seed,
            stopped=_stop_test(self.tokenizer, job.stops) if job.stops else None,
            abandoned=job.answer.done,
            episode=job.episode,
        )

    def _texts(self, completions: Sequence[Completion]) -> list[str]:
        """Each completion as text, without its end token."""
        bodies = [c.token_ids[:-1] if c.token_ids[-1:] and c.token_ids[-1] in self._eos_ids else c.token_ids for c in completions]
        return list(self.tokenizer.batch_decode(bodies, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _prompt_ids(self, batch: Sequence[_Job]) -> list[list[int] | Exception]:
        """Token ids of each job's prompt, or why it has none; messages seen before are not
        rendered again."""
        found: list[list[int] | str | Exception] = [self._seen(job.prompt) for job in batch]
        fresh = list(dict.fromkeys(text for text in found if isinstance(text, str)))
        encoded = self.tokenizer(fresh, add_special_tokens=False)["input_ids"] if fresh else []
        ids_of = dict(zip(fresh, encoded, strict=True))
        for job, text in zip(batch, found, strict=True):
            if isinstance(text, str) and not isinstance(job.prompt, _Tokens):
                self._prompts[job.prompt.key] = ids_of[text]
        while len(self._prompts) > PROMPT_CACHE:
            self._prompts.popitem(last=False)
        return [list(ids_of[prompt]) if isinstance(prompt, str) else prompt for prompt in found]

    def _seen(self, prompt: _Chat | _Tokens) -> list[int] | str | Exception:
        """The prompt's ids if they are known, else its text, else why there is none."""
        if isinstance(prompt, _Tokens):
            return prompt.ids
        try:
            known = self._prompts.get(prompt.key)
            return self._template.render(prompt.messages, prompt.tools) if known is None else list(known)
        except Exception as error:
            return error


async def _settled(line: _Line) -> int:
    """Let every coroutine that is ready to ask do so; the number of jobs then waiting."""
    before = -1
    while len(line.jobs) != before:
        before = len(line.jobs)
        for _ in range(3):  # a request behind wait_for is a few turns of the loop away
            await asyncio.sleep(0)
    return before


def _deliver(batch: Sequence[_Job], answers: Sequence[_Answer | Exception]) -> None:
    for job, answer in zip(batch, answers, strict=True):
        if job.answer.done():
            continue
        if isinstance(answer, Exception):
            job.answer.set_exception(answer)
        else:
            job.answer.set_result(answer)


def _finish_reason(completion: Completion, message: Message | None) -> str:
    """OpenAI's word for an answer that calls tools and was not cut off."""
    called = message is not None and "tool_calls" in message
    return "tool_calls" if called and completion.finish_reason == "stop" else completion.finish_reason


def _checked(answer: _Answer) -> _Answer | Exception:
    """The answer, or the error that a model which gives NaN deserves."""
    if all(map(math.isfinite, answer.completion.logprobs)):
        return answer
    return InferenceError("the model's log-probabilities are not finite; check its weights and its number format")


def _stop_test(tokenizer: Any, stops: Sequence[str]) -> Callable[[list[int]], bool]:
    """Whether the last tokens, as text, contain a stop string. A token is at least a byte, so
    that only so many can belong to one."""
    window = 16 + 2 * max(len(stop.encode()) for stop in stops)
    special = frozenset(tokenizer.all_special_ids)

    def stopped(ids: list[int]) -> bool:
        tail: list[int] = []
        for token in reversed(ids):
            if token not in special:
                tail.append(token)
            if len(tail) == window:
                break
        text = tokenizer.decode(tail[::-1], clean_up_tokenization_spaces=False)
        return any(stop in text for stop in stops)

    return stopped


def _before_stop(text: str, stops: Sequence[str]) -> str:
    """The text up to the first stop string."""
    found = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    return text[: min(found)] if found else text


def end_token_ids(model: nn.Module, tokenizer: Any) -> frozenset[int]:
    """The end tokens that the model's generation settings and the tokenizer name."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = configured if isinstance(configured, (list, tuple)) else [configured]
    return frozenset(i for i in [*ids, tokenizer.eos_token_id] if i is not None)


def _version_number(version: str | int | None) -> int | None:
    try:
        return None if version is None else int(version)
    except ValueError:
        raise ConfigError(
            f"version ({version!r}) must be a number; agents compare versions to tell how old a sample is"
        ) from None


def _as_inference_error(error: Exception) -> Exception:
    if isinstance(error, (InferenceError, ConfigError)):
        return type(error)(*error.args)  # one for each who waits: raising adds to an error's traceback
    wrapped = InferenceError(f"the request could not be served: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
