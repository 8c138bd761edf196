"""A model in this process behind the chat interface, so that agents and engines can use it like a
server."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ludic.errors import ConfigError, DataError, InferenceError, check_value
from ludic.event_loop import run_in_thread
from ludic.inference.client import CompletesBySampling, Episode, Sampled, WeightSource, current_episode
from ludic.inference.local.decode import Bounds, Completion, DecodeRequest, decode
from ludic.inference.local.prefixes import PrefixCache
from ludic.inference.prompts.encoder import PromptEncoder
from ludic.inference.prompts.images import check_spans
from ludic.inference.prompts.template import Dialogue, find_turn_end
from ludic.inference.prompts.transcript import Prompt
from ludic.inference.request import ChatCompletionRequest, SamplingParams, refuse_extensions
from ludic.models.images.processor import find_processor
from ludic.models.packed_attention import pin_rope
from ludic.models.published import copy_for_sampling, copy_streamed_weights, copy_weights
from ludic.models.routing import Routers
from ludic.models.sharding import is_sharded
from ludic.models.wrappers import find_text_config, unwrap_transformer
from ludic.types import ChatResponse, ImageSpan, Routes, TokenTrace

LogprobsMode = Literal["raw", "processed"]


_Result = tuple[Prompt | list[int], Sampled]
"""What was read and what was sampled."""


@dataclass
class _Job:
    prompt: Dialogue | list[int]
    """Messages, or token ids."""
    sampling: SamplingParams
    seed: int | None
    result: asyncio.Future[_Result]
    episode: Episode | None = None
    images: tuple[ImageSpan, ...] = ()
    """Of token ids."""


@dataclass
class _Queue:
    jobs: list[_Job] = field(default_factory=list)
    worker: asyncio.Task[None] | None = None


class LocalChatClient(CompletesBySampling):
    """Chat completions from a causal model of transformers in this process.

    Concurrent requests are decoded as one batch of at most `max_batch_size` in a worker thread, so
    the event loop stays free. The tokens of a request depend on its seed, not on the other requests
    of the batch. A cancelled request is dropped from the rest of its batch; an invalid request
    fails alone; a failure of the model fails the whole batch.

    The prompt is rendered by the tokenizer's chat template if it has one; otherwise it is the
    contents of the messages, after the token with which the tokenizer begins texts. Tools need a
    chat template that renders them; calls are read in the format in which the template writes them.
    The returned token ids are those that the model read and sampled; text is never tokenised again.
    A model with a processor (`find_processor`) reads the images of messages, and draws none of the
    tokens that stand for them; "raw" log-probabilities are still among all tokens.

    `logprobs_mode="raw"` returns log-probabilities of the unmodified model, as the trainer computes
    them; `"processed"` log-probabilities of the distribution sampled from, after penalties,
    temperature and top-p. At temperature 1 and top-p 1 both are equal. `keep_candidates=True`, with
    "processed", also returns which tokens top-p, top-k and min-p left (`TokenTrace.candidates`): a
    trainer then computes the same distribution, and trains it. `keep_routes=True` returns which
    experts of a mixture computed each token, for `TrainerConfig.replay_routing`: a byte for each
    token, layer and chosen expert, or two if there are more than 256.

    Each distinct prompt of a batch is read once. Its keys and values are then read by all of its
    rows, without a copy for each, if the model is in float32 and its attention is `sdpa` through
    transformers' interface, with nothing but a scale and a mask; the first pass shows whether it
    is. Rows leave the batch soon after they have ended.

    In episodes of a `RolloutEngine`, each turn reuses the keys and values of the previous turns
    while the weights are unchanged; the cache takes at most `prefix_cache_bytes`.

    With `copy_model` the client has its own copy of the weights, optionally on another `device` and
    in another `dtype`, which only `sync_weights` changes. Without it, the client samples from
    `model` itself and sees every optimizer step immediately.
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
        keep_candidates: bool = False,
        keep_routes: bool = False,
        prefix_cache_bytes: int = 256 * 2**20,
    ) -> None:
        check_value("max_batch_size", max_batch_size, least=1)
        check_value("prefix_cache_bytes", prefix_cache_bytes, "0 disables the cache between turns", least=0)
        check_value("logprobs_mode", logprobs_mode, choices=("raw", "processed"))
        if keep_candidates and logprobs_mode == "raw":
            raise ConfigError("keep_candidates keeps what log-probabilities were computed among; set logprobs_mode='processed'")
        if is_sharded(model):
            raise ConfigError(f"{type(model).__name__} is sharded; give the client a whole model, or sample on servers")
        if not copy_model and (device is not None or dtype is not None):
            raise ConfigError("device and dtype are of a copy of the model; set copy_model=True, or leave them out")
        pin_rope(model)
        self.model = copy_for_sampling(model, device, dtype) if copy_model else model
        self.routers = Routers(self.model) if keep_routes else None
        self.tokenizer, self.images = tokenizer, find_processor(model)
        self.logprobs_mode, self.keep_candidates = logprobs_mode, keep_candidates
        self._prompts = PromptEncoder(tokenizer, self.images, model_name=type(unwrap_transformer(model)).__name__)
        self._max_batch_size = max_batch_size
        self._eos_ids = end_token_ids(model, tokenizer)
        self._pad_id = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
        self._version = 0
        self._busy = threading.Lock()
        """Held while a batch is decoded and while weights are copied."""
        self._queues: dict[asyncio.AbstractEventLoop, _Queue] = {}
        self._prefixes = PrefixCache(prefix_cache_bytes) if prefix_cache_bytes else None

    async def complete(self, request: ChatCompletionRequest) -> tuple[ChatResponse, dict[str, Any]]:
        """One completion. The info has `policy_version`, the version of the weights that sampled
        it.

        With tools the info also has `raw_response` in OpenAI's format, with the parsed tool calls
        in its message. The response's text is everything that was sampled, including tool calls.

        Raises ConfigError for invalid settings, InferenceError if the model cannot read the prompt
        or fails.
        """
        refuse_extensions(request, self)
        dialogue, episode = Dialogue.of(request), current_episode()
        prompt, sampled = await self._enqueue(dialogue, request.sampling, request.seed)
        assert isinstance(prompt, Prompt)
        answer = self._prompts.read_answer(prompt, sampled, stops=request.sampling.stop_texts, episode=episode)
        info: dict[str, Any] = {"policy_version": sampled.policy_version}
        if dialogue.tools:
            choice = {"index": 0, "message": answer.message, "finish_reason": answer.trace.finish_reason}
            info["raw_response"] = {"choices": [choice]}
        return request.return_.make_response(answer.text, answer.trace), info

    async def sample_tokens(
        self,
        prompt_token_ids: Sequence[int],
        *,
        sampling: SamplingParams | None = None,
        seed: int | None = None,
        images: Sequence[ImageSpan] = (),
    ) -> Sampled:
        """Continue token ids without changing them, with `images` in the places of their spans.
        Text is decoded only to find stop strings."""
        return (await self._enqueue(list(prompt_token_ids), sampling or SamplingParams(), seed, tuple(images)))[1]

    @property
    def context_length(self) -> int | None:
        """Tokens of a prompt and its answer; None if the model does not say."""
        length: int | None = getattr(find_text_config(self.model), "max_position_embeddings", None)
        return length

    async def get_policy_version(self) -> int:
        return self._version

    def sync_weights(self, params: Mapping[str, Tensor], *, timeout_s: float = 600.0, version: str | int | None = None) -> str:
        """Copy weights by name, never in the middle of a batch; returns the version now sampled
        from.

        Names are the parameter names of the model without adapters. A client that shares the
        trainer's model, with or without adapters, is already up to date; in a copy of a model,
        adapters are merged. Everything is checked before the first weight is copied. Raises
        ConfigError for an unknown name, a wrong shape or a version that is not a number, and
        TimeoutError if a batch takes longer than `timeout_s`.
        """
        return self._sync(lambda: copy_weights(self.model, params), timeout_s, version)

    def sync_weights_from(self, weights: WeightSource, *, timeout_s: float = 600.0, version: str | int | None = None) -> str:
        """`sync_weights` from weights that are gathered meanwhile, one tensor at a time. Names and
        shapes are checked before the first is copied."""
        return self._sync(lambda: copy_streamed_weights(self.model, weights.describe(), weights), timeout_s, version)

    def _sync(self, copy: Callable[[], None], timeout_s: float, version: str | int | None) -> str:
        try:
            number = None if version is None else int(version)
        except ValueError:
            raise ConfigError(f"version ({version!r}) must be a number, because the age of samples is computed from it") from None
        if not self._busy.acquire(timeout=timeout_s):
            raise TimeoutError(f"a batch was still being decoded after {timeout_s} s; the weights were not changed")
        try:
            copy()
            if self._prefixes is not None:
                self._prefixes.clear()
            self._version = self._version + 1 if number is None else number
            return str(self._version)
        finally:
            self._busy.release()

    def _sampled(self, request: DecodeRequest, completion: Completion, version: int) -> Sampled:
        logprobs = completion.logprobs if self.logprobs_mode == "raw" else completion.drawn_logprobs
        trace = TokenTrace.from_arrays(
            request.prompt_ids, completion.token_ids, logprobs, completion.finish_reason, request.images
        )
        trace = replace(trace, candidates=completion.candidates) if any(completion.candidates) else trace
        if (routes := completion.routes) is not None:
            known = routes[: len(request.prompt_ids) + len(completion.token_ids) - 1]
            trace = replace(trace, routes=Routes(known.tobytes(), known.shape[1], known.shape[2], known.itemsize))
        return Sampled(trace, not self._eos_ids.isdisjoint(completion.token_ids[-1:]), version)

    async def _enqueue(
        self, prompt: Dialogue | list[int], sampling: SamplingParams, seed: int | None, images: tuple[ImageSpan, ...] = ()
    ) -> _Result:
        loop = asyncio.get_running_loop()
        if loop not in self._queues:
            for closed in [other for other in self._queues if other.is_closed()]:
                del self._queues[closed]
            self._queues[loop] = _Queue()
        queue = self._queues[loop]
        job = _Job(prompt, sampling, seed, loop.create_future(), current_episode(), images)
        queue.jobs.append(job)
        if queue.worker is None:
            queue.worker = loop.create_task(self._serve(queue))
        return await job.result

    async def _serve(self, queue: _Queue) -> None:
        batch: list[_Job] = []
        try:
            while await _wait_for_arrivals(queue):
                batch, queue.jobs = queue.jobs[: self._max_batch_size], queue.jobs[self._max_batch_size :]
                batch = [job for job in batch if not job.result.done()]
                if batch:
                    _deliver(batch, await run_in_thread(self._decode, batch))
        finally:
            queue.worker = None
            unfinished, queue.jobs = [*batch, *queue.jobs], []
            _deliver(unfinished, [InferenceError("the task that serves this client was cancelled") for _ in unfinished])

    def _decode(self, batch: Sequence[_Job]) -> list[_Result | Exception]:
        """A result or an error for each job. Never raises."""
        try:
            with self._busy:
                return self._decode_batch(batch)
        except Exception as error:
            return [_as_inference_error(error) for _ in batch]

    def _decode_batch(self, batch: Sequence[_Job]) -> list[_Result | Exception]:
        version, bounds = self._version, Bounds.of(self.model)
        requests: dict[int, DecodeRequest] = {}
        results: dict[int, _Result | Exception] = {}
        chats = [(job.prompt, job.episode) for job in batch if isinstance(job.prompt, Dialogue)]
        encoded = iter(self._prompts.encode_batch(chats))
        prompts: dict[int, Prompt | list[int]] = {}
        for i, job in enumerate(batch):
            try:
                made = next(encoded) if isinstance(job.prompt, Dialogue) else job.prompt
                if isinstance(made, Exception):
                    raise made
                prompts[i] = made
                if isinstance(made, Prompt):
                    prompt, images = made.ids, made.images
                else:
                    prompt, images = made, job.images
                    check_spans(prompt, images, self.images, type(unwrap_transformer(self.model)).__name__)
                stops = job.sampling.stop_texts
                room = bounds.room(prompt, images)
                requests[i] = DecodeRequest(
                    prompt_ids=prompt,
                    sampling=job.sampling,
                    limit=job.sampling.max_tokens if room is None else min(room, job.sampling.max_tokens),
                    seed=job.seed,
                    contains_stop=_make_stop_test(self.tokenizer, stops) if stops else None,
                    is_abandoned=job.result.done,
                    episode=job.episode,
                    keep_candidates=self.keep_candidates,
                    images=images,
                )
            except Exception as error:
                results[i] = _as_inference_error(error)
        if requests:
            kept: dict[str, Any] = {"prefixes": self._prefixes, "routers": self.routers}
            completions = decode(self.model, list(requests.values()), eos_ids=self._eos_ids, pad_id=self._pad_id, **kept)
            for i, completion in zip(requests, completions, strict=True):
                if all(map(math.isfinite, completion.logprobs)):
                    results[i] = prompts[i], self._sampled(requests[i], completion, version)
                else:
                    results[i] = InferenceError(
                        "the model's log-probabilities are not finite; check its weights and its number format"
                    )
        return [results[i] for i in range(len(batch))]


async def _wait_for_arrivals(queue: _Queue) -> int:
    """Let every coroutine that is ready to run add its job. Returns the number of jobs in the
    queue."""
    before = -1
    while len(queue.jobs) != before:
        before = len(queue.jobs)
        for _ in range(3):  # a request inside wait_for needs a few iterations of the loop
            await asyncio.sleep(0)
    return before


def _deliver(batch: Sequence[_Job], results: Sequence[_Result | Exception]) -> None:
    for job, result in zip(batch, results, strict=True):
        if job.result.done():
            continue
        if isinstance(result, Exception):
            job.result.set_exception(result)
        else:
            job.result.set_result(result)


def _make_stop_test(tokenizer: Any, stops: Sequence[str]) -> Callable[[list[int]], bool]:
    """A test whether the last tokens, as text, contain a stop string. A token is at least one byte,
    which limits how many can belong to a stop string."""
    window = 16 + 2 * max(len(stop.encode()) for stop in stops)
    special = frozenset(tokenizer.all_special_ids)

    def contains_stop(ids: list[int]) -> bool:
        tail: list[int] = []
        for token in reversed(ids):
            if token not in special:
                tail.append(token)
            if len(tail) == window:
                break
        text = tokenizer.decode(tail[::-1], clean_up_tokenization_spaces=False)
        return any(stop in text for stop in stops)

    return contains_stop


def end_token_ids(model: nn.Module, tokenizer: Any) -> frozenset[int]:
    """The end tokens of the model's generation config, of the tokenizer, and of the turns of its
    chat template."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = configured if isinstance(configured, (list, tuple)) else [configured]
    return find_turn_end(tokenizer).ids.union(i for i in ids if i is not None)


def _as_inference_error(error: Exception) -> Exception:
    if isinstance(error, (InferenceError, ConfigError, DataError)):
        return type(error)(*error.args)  # a copy for each caller: raising adds to an error's traceback
    wrapped = InferenceError(f"the request could not be served: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
