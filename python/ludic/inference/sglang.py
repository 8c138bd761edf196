"""A client of SGLang servers: token ids in, token ids out, and weights from a folder.

Tested with a stub of SGLang 0.5.23; docs/servers.md says what was run against a real server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct

from ludic.errors import ConfigError, ConfigTypeError, InferenceError, PublishError, ServerError
from ludic.inference.client import CompletesBySampling, PolicyPublisher, PushTarget, Sampled, Weights, current_episode
from ludic.inference.prompts.encoder import PromptEncoder
from ludic.inference.prompts.images import check_spans, find_processor, shorten_prompt
from ludic.inference.prompts.template import Dialogue
from ludic.inference.request import ChatCompletionRequest, SamplingParams
from ludic.inference.servers.answers import WeightInfo, version_number
from ludic.inference.servers.errors import AbortedError, RetryPolicy
from ludic.inference.servers.http import HttpResponse, ServerCalls
from ludic.inference.servers.pool import ServerPool
from ludic.inference.servers.routing import Routing, block_keys
from ludic.inference.servers.server import Server
from ludic.inference.vllm.responses import TokenId, WeightSpan, check_tokens, check_versions
from ludic.types import ChatResponse, ImageSpan, TokenTrace


class _VersionAnswer(Struct):
    meta_info: WeightInfo


class SGLangModelInfo(Struct):
    """Response of `GET /model_info`."""

    model_path: str
    """The folder, or the name, of the weights that were loaded last."""
    weight_version: str | None = None


class SGLangEndpoints(ServerCalls):
    """Calls to one server that replace its weights."""

    def update_weights_from_disk(
        self, folder: str, version: str | None = None, *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Have the server load the weights in a folder that it sees under this path, and reset its
        cache. Returns the server's answer.

        Raises PublishError if the answer reports a failure.
        """
        body: dict[str, Any] = {"model_path": folder, "flush_cache": True}
        if version is not None:
            body["weight_version"] = version
        answer = self.call("post", "/update_weights_from_disk", json=body, timeout_s=timeout_s, answer=dict[str, Any])
        if answer.get("success") is not True:
            reason = answer.get("message")
            raise PublishError(f"{self.url} did not load {folder}: {reason}; it must see that folder under the same path")
        return answer

    def pause(self, *, timeout_s: float | None = None) -> None:
        """Freeze running requests until `resume`."""
        self.call("post", "/pause_generation", json={"mode": "retract"}, timeout_s=timeout_s)

    def resume(self, *, timeout_s: float | None = None) -> None:
        self.call("post", "/continue_generation", timeout_s=timeout_s)

    def weight_version(self) -> str:
        """The version of the weights, from the answer to a request for one token."""
        body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
        return str(self.call("post", "/generate", json=body, answer=_VersionAnswer).meta_info.weight_version)

    def model_info(self) -> SGLangModelInfo | None:
        """What the server loaded last; also while it is paused. None for a server that does not
        tell."""
        for path in ("/model_info", "/get_model_info"):  # its name, and its name in older versions
            try:
                return self.call("get", path, answer=SGLangModelInfo)
            except ServerError as error:
                if error.status not in (404, 405):
                    raise
        return None

    def set_weight_version(self, version: str) -> None:
        """Change the version of the weights that are served. Requests go on."""
        self.call("post", "/update_weight_version", json={"new_version": version, "abort_all_requests": False})


class SGLangClient(CompletesBySampling, PushTarget):
    """Completions from SGLang servers that serve the same model.

    With `tokenizer`, the policy's own, chats are rendered and encoded here and sent as token ids;
    text is decoded from the returned ids. A completion has exactly what training needs: the prompt
    ids, the sampled ids, a log-probability for each, and the version of the weights.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        tokenizer: Any = None,
        timeout_s: float = 600.0,
        max_retries: int = 3,
        backoff_s: float = 0.5,
        api_key: str = "local",
        vocab_size: int | None = None,
        routing: Routing = "least_busy",
        max_kv_use: float | None = 0.9,
    ) -> None:
        """`vocab_size` is the policy's. A response with an id outside of it raises InferenceError.
        With the `tokenizer` of a model that sees images (`find_processor(model).tokenizer`) servers
        need the environment variable SGLANG_MM_AVOID_RETOKENIZE=1. `routing` and `max_kv_use` are
        as for `VLLMChatClient`; for the second the servers need `--enable-metrics`."""
        self._vocab_size = vocab_size
        self.server_urls = [url.rstrip("/") for url in ([urls] if isinstance(urls, str) else urls)]
        self.server_url = self.server_urls[0] if self.server_urls else ""
        self._pool = ServerPool(
            [Server(url, api_key, timeout_s) for url in self.server_urls], routing=routing, max_kv_use=max_kv_use
        )
        self._retries = RetryPolicy(timeout_s, max_retries, backoff_s)
        self.tokenizer, self.images = tokenizer, find_processor(tokenizer)
        self._tokens = None if tokenizer is None else PromptEncoder(tokenizer, self.images)
        self._publisher: PolicyPublisher | None = None
        self._version = 0

    async def complete(self, request: ChatCompletionRequest) -> tuple[ChatResponse, dict[str, Any]]:
        """One completion. The info has `raw_response` and `policy_version`. Raises ConfigTypeError
        for extensions, which are for vLLM."""
        if self._tokens is None:
            raise ConfigError("SGLangClient needs a tokenizer to render chats; pass tokenizer=, or use complete_tokens")
        if request.extensions is not None:
            raise ConfigTypeError("SGLangClient takes no extensions; use VLLMChatClient for them")
        episode = current_episode()
        prompt = self._tokens.encode(Dialogue.of(request), episode)
        sampled, info = await self._sample(prompt.ids, request.sampling, request.seed, prompt.images)
        answer = self._tokens.read_answer(prompt, sampled, stops=request.sampling.stop_texts, episode=episode)
        choice = {"index": 0, "message": answer.message, "finish_reason": answer.trace.finish_reason}
        info["raw_response"] = {**info["raw_response"], "choices": [choice]}
        return request.return_.make_response(answer.text, answer.trace), info

    async def sample_tokens(
        self,
        prompt_token_ids: Sequence[int],
        *,
        sampling: SamplingParams | None = None,
        seed: int | None = None,
        images: Sequence[ImageSpan] = (),
    ) -> Sampled:
        """Continue a prompt of token ids, with `images` in the places of their spans."""
        check_spans(prompt_token_ids, images, self.images, self.server_url)
        return (await self._sample(prompt_token_ids, sampling or SamplingParams(), seed, images))[0]

    async def _sample(
        self, prompt: Sequence[int], sampling: SamplingParams, seed: int | None, spans: Sequence[ImageSpan]
    ) -> tuple[Sampled, dict[str, Any]]:
        params = {**sampling.to_openai_kwargs(), **sampling.server_fields()}
        params["max_new_tokens"] = params.pop("max_tokens")
        if self._tokens is not None and self._tokens.extra_end_ids:
            params["stop_token_ids"] = self._tokens.extra_end_ids
        if seed is not None:
            params["sampling_seed"] = seed
        body = {"input_ids": list(prompt), "sampling_params": params, "return_logprob": True, "logprob_start_len": -1}
        banned: Sequence[int] = ()
        if (images := self.images) is not None:
            banned = images.banned_ids
            params["logit_bias"] = dict.fromkeys(map(str, banned), -100.0)
            if spans:
                body["input_ids"] = shorten_prompt(prompt, spans, images)
                body["image_data"] = [images.store.data_url(span.digest) for span in spans]

        async def once(server: Server) -> tuple[TokenTrace, dict[str, Any]]:
            answer = await server.post("/generate", body)
            return _read_trace(answer, prompt, spans, sampling, self._vocab_size, banned)

        trace, info = await self._retries.run(
            lambda: self._pool.send(once, lambda: block_keys(prompt)), name=", ".join(self.server_urls)
        )
        weight_versions, ended = info["weight_versions"], info.pop("ended_by_token")
        numbers = [version_number(span["version"]) for span in weight_versions]
        served = min((number for number in numbers if number is not None), default=self._version)
        return Sampled(trace, ended, served, weight_versions), {**info, "policy_version": served}

    async def get_policy_version(self) -> int:
        """The version that was pushed last through this client."""
        return self._version

    def weights_changed(self, version: str | int | None, *, lost: Sequence[str] = ()) -> None:
        """Called after a push: `version` is served now, and the servers at the URLs `lost` get
        no more requests."""
        self._version = version_number(version) or self._version
        self._pool.router.forget()
        self._pool.drain_lost(lost)

    def sync_weights(self, params: Weights, *, timeout_s: float = 600.0, version: str | int | None = None) -> str:
        """Push with the publisher that `ludic.distributed.create_checkpoint_publisher` made for
        this client."""
        if self._publisher is None:
            raise InferenceError("this client cannot push weights; pass it to ludic.distributed.create_checkpoint_publisher")
        self._publisher.publish(params, version=version)
        return str(version)

    def connect_publisher(self, publisher: PolicyPublisher) -> None:
        """Use this publisher for `sync_weights`."""
        self._publisher = publisher

    def endpoints(self) -> list[SGLangEndpoints]:
        """The endpoints of each server for replacing weights."""
        return [SGLangEndpoints(url) for url in self.server_urls]

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        await self._pool.aclose()


class _Finish(Struct):
    type: Literal["stop", "length", "abort"]
    matched: int | str | list[int] | None = None


class _Meta(Struct):
    output_token_logprobs: list[tuple[float, TokenId, str | None]] = []
    finish_reason: _Finish | Literal["stop", "length", "abort"] | None = None
    prompt_tokens: int | None = None
    weight_version: str | int | None = None
    """Of the last token."""
    weight_versions: list[WeightSpan] = []
    """Of each span of tokens; servers older than 0.5.23 may not report it."""


class _Generated(Struct):
    meta_info: _Meta
    output_ids: list[TokenId] = []


def _read_trace(
    answer: HttpResponse,
    prompt: Sequence[int],
    spans: Sequence[ImageSpan],
    sampling: SamplingParams,
    vocab_size: int | None,
    banned_ids: Sequence[int],
) -> tuple[TokenTrace, dict[str, Any]]:
    """The sampled tokens. Raises InferenceError for a response whose ids or log-probabilities are
    missing or invalid."""
    url, generated = answer.url, answer.read(_Generated)
    meta, reason = generated.meta_info, generated.meta_info.finish_reason
    kind = reason.type if isinstance(reason, _Finish) else reason
    if kind == "abort":
        raise AbortedError(f"{url} aborted the request; its partial output is discarded")
    matched = reason.matched if isinstance(reason, _Finish) else None
    if isinstance(matched, str) and matched not in sampling.stop_texts:
        raise InferenceError(f"{url} ended an answer by {matched[:80]!r}, which is no stop string; are its weights NaN?")
    ids, logprobs = generated.output_ids, [entry[0] for entry in meta.output_token_logprobs]
    if [entry[1] for entry in meta.output_token_logprobs] != ids:
        raise InferenceError(f"{url} returned {len(ids)} token ids with log-probabilities of {len(logprobs)} others")
    check_tokens(ids, logprobs, url, max_tokens=sampling.max_tokens, vocab_size=vocab_size, banned_ids=banned_ids)
    versions = meta.weight_versions or [WeightSpan(version=meta.weight_version, start=0, end=len(ids))]
    check_versions(versions, len(ids), url)
    if meta.prompt_tokens not in (None, len(prompt)):
        raise InferenceError(
            f"{url} reports {meta.prompt_tokens} prompt tokens, but {len(prompt)} were sent; of a prompt with images it makes the same "
            "with the model's own processor and SGLANG_MM_AVOID_RETOKENIZE=1"
        )
    info = {
        "raw_response": answer.json(),
        "weight_versions": versions,
        "ended_by_token": kind == "stop" and isinstance(matched, int),
    }
    return TokenTrace.from_arrays(prompt, ids, logprobs, kind, spans), info
