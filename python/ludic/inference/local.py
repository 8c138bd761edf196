"""A model in this process behind the chat interface: the same agents and engines run with it as with a server."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ludic.errors import ConfigError, InferenceError
from ludic.inference.local_decode import Completion, DecodeRequest, decode
from ludic.inference.local_sampler import check_sampling
from ludic.inference.request import ChatCompletionRequest
from ludic.types import ChatResponse

LogprobsMode = Literal["raw", "processed"]
PROMPT_CACHE = 4096
"""Rendered prompts whose ids are kept: the members of a group share theirs."""


@dataclass
class _Waiting:
    request: ChatCompletionRequest
    answer: asyncio.Future[tuple[ChatResponse, dict[str, Any]]]


class LocalChatClient:
    """Chat completions from a causal model of transformers in this process.

    Requests that wait at the same time are decoded as one batch of at most `max_batch_size`, in a worker thread, so that the event
    loop goes on. Each gets exactly the tokens that its seed gives it alone.

    The prompt is the tokenizer's chat template where it has one, else the contents of the messages one behind another, without
    special tokens. Token ids returned are those that the model read and sampled; text is never tokenised again.

    `logprobs_mode="raw"` returns log-probabilities of the model as it is, which are the trainer's; `"processed"` those of the
    distribution drawn from, after penalties, temperature and top-p. At temperature 1 and top-p 1 they are the same.

    With `copy_model` the client holds weights of its own, which change with `sync_weights` alone; without, it samples from `model`
    itself and sees every optimizer step at once.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        max_batch_size: int = 256,
        copy_model: bool = False,
        logprobs_mode: LogprobsMode = "raw",
    ) -> None:
        if max_batch_size < 1:
            raise ConfigError(f"max_batch_size ({max_batch_size}) must be >= 1")
        if logprobs_mode not in ("raw", "processed"):
            raise ConfigError(f"logprobs_mode ({logprobs_mode!r}) must be 'raw' or 'processed'")
        self.model = copy.deepcopy(model).requires_grad_(False) if copy_model else model
        self.tokenizer = tokenizer
        self.logprobs_mode = logprobs_mode
        self._max_batch_size = max_batch_size
        self._eos_ids = _eos_ids(model, tokenizer)
        self._pad_id = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
        self._version = 0
        self._weights = threading.Lock()
        self._waiting: list[_Waiting] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._worker: asyncio.Task[None] | None = None
        self._prompts: OrderedDict[str, list[int]] = OrderedDict()

    async def complete(self, request: ChatCompletionRequest) -> tuple[ChatResponse, dict[str, Any]]:
        """One completion. The info carries `policy_version`, the weights it was sampled from.

        Raises ConfigError for settings without meaning, InferenceError where the model fails.
        """
        check_sampling(request.sampling)
        if request.tools is not None:
            raise ConfigError("LocalChatClient does not call tools; use a server, or an agent without tools")
        if request.extensions is not None:
            raise ConfigError(f"unsupported request.extensions: {type(request.extensions).__name__}; LocalChatClient has none")
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # requests of a loop that was closed can be answered no more
            self._loop, self._waiting, self._worker = loop, [], None
        waiting = _Waiting(request, loop.create_future())
        self._waiting.append(waiting)
        if self._worker is None or self._worker.done():
            self._worker = loop.create_task(self._work())
        return await waiting.answer

    async def get_policy_version(self) -> int:
        return self._version

    def sync_weights(self, params: Mapping[str, Tensor], *, timeout_s: float = 600.0, version: str | int | None = None) -> str:
        """Copy weights by name, between two batches and never within one; returns the version now sampled from.

        Names and shapes are checked before the first is copied. Raises ConfigError for a name that the model does not have or a
        shape that differs, TimeoutError if a batch takes longer than `timeout_s`.
        """
        own = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        for name, tensor in params.items():
            if name not in own:
                raise ConfigError(f"the model has no weight {name!r}; publish names as model.named_parameters() gives them")
            if own[name].shape != tensor.shape:
                raise ConfigError(f"weight {name!r} has shape {tuple(tensor.shape)}, the model's is {tuple(own[name].shape)}")
        if not self._weights.acquire(timeout=timeout_s):
            raise TimeoutError(f"a batch was still being decoded after {timeout_s} s; the weights were not changed")
        try:
            with torch.no_grad():
                for name, tensor in params.items():
                    if own[name].data_ptr() != tensor.data_ptr():
                        own[name].copy_(tensor)
            self._version = self._version + 1 if version is None else int(version)
        finally:
            self._weights.release()
        return str(self._version)

    async def _work(self) -> None:
        """Decode batches until nobody waits."""
        while await self._settled():
            batch, self._waiting = self._waiting[: self._max_batch_size], self._waiting[self._max_batch_size :]
            batch = [waiting for waiting in batch if not waiting.answer.done()]
            if batch:
                await self._answer(batch)

    async def _settled(self) -> int:
        """Let every coroutine that is ready to ask do so; the number of requests then waiting."""
        before = -1
        while len(self._waiting) != before:
            before = len(self._waiting)
            for _ in range(3):  # a request behind wait_for is a few turns of the loop away
                await asyncio.sleep(0)
        return before

    async def _answer(self, batch: list[_Waiting]) -> None:
        """Decode a batch; whatever happens, everybody in it gets an answer or an error."""
        try:
            answers = await asyncio.to_thread(self._decode, [waiting.request for waiting in batch])
        except asyncio.CancelledError:
            for waiting in batch:
                waiting.answer.cancel()
            raise
        except Exception as error:
            for waiting in batch:
                if not waiting.answer.done():
                    waiting.answer.set_exception(_as_inference_error(error))
            return
        for waiting, answer in zip(batch, answers, strict=True):
            if not waiting.answer.done():
                waiting.answer.set_result(answer)

    def _decode(self, requests: Sequence[ChatCompletionRequest]) -> list[tuple[ChatResponse, dict[str, Any]]]:
        prompts = self._prompt_ids(requests)
        jobs = [
            DecodeRequest(prompt_ids=ids, sampling=r.sampling, seed=r.seed, stopped=self._stop_test(r))
            for ids, r in zip(prompts, requests, strict=True)
        ]
        with self._weights:
            version = self._version
            completions = decode(self.model, jobs, eos_ids=self._eos_ids, pad_id=self._pad_id)
        texts = self.tokenizer.batch_decode([c.token_ids for c in completions], skip_special_tokens=True)
        info = {"policy_version": version}
        return [(self._response(*parts), dict(info)) for parts in zip(requests, prompts, completions, texts, strict=True)]

    def _response(self, request: ChatCompletionRequest, prompt_ids: list[int], completion: Completion, text: str) -> ChatResponse:
        asked = request.return_
        logprobs = completion.logprobs if self.logprobs_mode == "raw" else completion.drawn_logprobs
        return ChatResponse(
            text=_before_stop(text, _stops(request)),
            completion_token_ids=completion.token_ids if asked.return_token_ids else None,
            completion_logprobs=logprobs if asked.return_chosen_logprobs else None,
            finish_reason=completion.finish_reason,
            prompt_token_ids=list(prompt_ids) if asked.return_token_ids else None,
        )

    def _stop_test(self, request: ChatCompletionRequest) -> Any:
        stops = _stops(request)
        if not stops:
            return None

        def stopped(ids: list[int]) -> bool:
            text = self.tokenizer.decode(ids, skip_special_tokens=True)
            return any(stop in text for stop in stops)

        return stopped

    def _prompt_ids(self, requests: Sequence[ChatCompletionRequest]) -> list[list[int]]:
        """Token ids of each request's prompt; a prompt seen before is not rendered again."""
        texts = [self._render(request) for request in requests]
        fresh = list(dict.fromkeys(text for text in texts if text not in self._prompts))
        if fresh:
            encoded = self.tokenizer(fresh, add_special_tokens=False)["input_ids"]
            known = {
                **{text: self._prompts[text] for text in texts if text in self._prompts},
                **dict(zip(fresh, encoded, strict=True)),
            }
        else:
            known = self._prompts
        result = [list(known[text]) for text in texts]
        for text in fresh:
            self._prompts[text] = known[text]
        while len(self._prompts) > PROMPT_CACHE:
            self._prompts.popitem(last=False)
        return result

    def _render(self, request: ChatCompletionRequest) -> str:
        if getattr(self.tokenizer, "chat_template", None):
            text: str = self.tokenizer.apply_chat_template(request.messages, add_generation_prompt=True, tokenize=False)
            return text
        return "".join(str(message.get("content") or "") for message in request.messages)


def _stops(request: ChatCompletionRequest) -> list[str]:
    stop = request.sampling.stop
    return [stop] if isinstance(stop, str) and stop else [s for s in stop or [] if s]


def _before_stop(text: str, stops: list[str]) -> str:
    """The text up to the first stop string."""
    found = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    return text[: min(found)] if found else text


def _eos_ids(model: nn.Module, tokenizer: Any) -> frozenset[int]:
    """The end tokens that the model's generation settings and the tokenizer name."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = configured if isinstance(configured, (list, tuple)) else [configured]
    return frozenset(i for i in [*ids, tokenizer.eos_token_id] if i is not None)


def _as_inference_error(error: Exception) -> Exception:
    if isinstance(error, (InferenceError, ConfigError)):
        return error
    wrapped = InferenceError(f"the model failed while decoding: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
