"""The client of vLLM servers: chat completions, and continuations of token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

from ludic.errors import ConfigError, InferenceError
from ludic.inference.client import CompletesBySampling, Publisher, PushTarget, Sampled, Weights
from ludic.inference.prompts.encoder import PromptEncoder
from ludic.inference.prompts.images import check_spans, find_processor
from ludic.inference.request import ChatCompletionRequest, SamplingParams
from ludic.inference.servers.client_tags import ClientTag, TagPolicy
from ludic.inference.servers.errors import RetryPolicy
from ludic.inference.servers.http import AsyncClosing
from ludic.inference.servers.openai_client import open_client
from ludic.inference.servers.pool import Restarts
from ludic.inference.servers.prompt_clipping import PromptClipper
from ludic.inference.servers.routing import Routing
from ludic.inference.vllm.completions import (
    ChatCompletions,
    Completion,
    CompletionSettings,
    OpenAICompletions,
    RenderedCompletions,
    TokenCompletions,
    make_sampled,
)
from ludic.inference.vllm.endpoints import VllmEndpoints
from ludic.inference.vllm.requests import ContextRoom, TokenRequest, extension_fields
from ludic.inference.vllm.responses import ResponseReader
from ludic.inference.vllm.servers import VLLMServers, server_url
from ludic.types import ImageSpan

RESET_TIMEOUT_S = 60.0


class VLLMChatClient(CompletesBySampling, PushTarget, AsyncClosing):
    """Chat completions and continuations of token ids from one or more vLLM servers of the same
    model.

    With `tokenizer`, the policy's own, prompts are rendered and encoded here and sent as token ids,
    to `/inference/v1/generate` if the server has it (`--enable-scale-out`), else to
    `/v1/completions`; text is decoded from the returned ids and never tokenised again. Without it,
    messages go to `/v1/chat/completions` and the server renders them. Everything that training
    needs is returned exactly: the prompt ids, the sampled ids, a log-probability for each, and the
    weight version that sampled them if the server reports it. A response that lacks any of these,
    or that is for another prompt, raises InferenceError.

    A call takes at most `timeout_s`, including retries. Failed connections, 408, 409, 425, 429, 5xx
    and aborted requests are retried up to `max_retries` times; sampling changes nothing on the
    server. A dead engine raises EngineDeadError immediately.

    With several servers (`urls`) each request goes to the least busy one, or, with the `routing`
    "session" or "prefix", to one that has cached its prompt. Requests wait here while a server
    reports that it uses more than `max_kv_use` of its KV cache. A dead server is drained and its
    requests move to the others. So is one that hangs: it has answered nothing for `silence_s` while
    others answer or are idle, it fails a probe, and it makes no progress.

    Invalid settings raise ConfigError before anything is sent. So do a prompt and `max_tokens` that
    do not fit into the server's context, because the server would silently clip `max_tokens`; with
    `on_overflow="clip"` it is clipped here and counted. Fields of `extra_body_overrides` that vLLM
    0.32 does not know are refused unless `allow_unknown_fields`.

    With `enable_weight_updates`, `sync_weights` pushes new weights through the weight transfer that
    the servers were started with; `publisher_settings` are keywords of
    `ludic.distributed.create_vllm_publisher`. `group_port` and `device` are accepted and unused: a
    free port is chosen, and the weights' own device is used.

    `max_prompt_chars` cuts the user messages of longer prompts, and counts the cuts; None and 0 set
    no limit. `client_tag` marks this client's requests. `shared_server_settings` reads both from a
    launcher's environment variables.

    With the `tokenizer` of a model that sees images (`find_processor(model).tokenizer`) the token
    endpoint gets a prompt with one marker for each image, and the bytes of an image once a server;
    it must read the ids that were encoded here.

    Responses are checked before they are returned: types, a log-probability of at most 0 for each
    token, at most `max_tokens` tokens, and ids below `vocab_size`, the policy's, if given.

    The constructor waits for `/health` of every server, at most `connection_timeout_s`, and reads
    which models they serve. `host` 0.0.0.0 means this machine.
    """

    def __init__(
        self,
        *,
        host: str = "0.0.0.0",
        port: int = 8000,
        group_port: int = 51216,
        connection_timeout_s: float = 60,
        enable_weight_updates: bool = False,
        device: Any = 0,
        urls: Sequence[str] | None = None,
        tokenizer: Any = None,
        timeout_s: float = 600.0,
        silence_s: float | None = 60.0,
        max_retries: int = 3,
        backoff_s: float = 0.5,
        backoff_growth: float = 2.0,
        api_key: str = "local",
        extra_headers: Mapping[str, str] | None = None,
        client_tag: str | None = None,
        client_tag_policy: TagPolicy = "lenient",
        max_prompt_chars: int | None = None,
        on_overflow: Literal["error", "clip"] = "error",
        allow_unknown_fields: bool = False,
        publisher_settings: Mapping[str, Any] | None = None,
        vocab_size: int | None = None,
        routing: Routing = "least_busy",
        max_kv_use: float | None = 0.9,
    ) -> None:
        addresses = [server_url(url) for url in urls] if urls is not None else [server_url(host, port)]
        tag = None if client_tag is None else ClientTag(client_tag, client_tag_policy)
        self._settings = CompletionSettings(
            room=ContextRoom({}, on_overflow=on_overflow),
            reader=ResponseReader(addresses[0] if addresses else "", vocab_size, tag),
            clipper=None if max_prompt_chars is None else PromptClipper(max_prompt_chars if max_prompt_chars > 0 else None),
            allow_unknown_fields=allow_unknown_fields,
        )
        self._retries = RetryPolicy(timeout_s, max_retries, backoff_s, backoff_growth)
        self._servers = VLLMServers(
            addresses,
            retries=self._retries,
            api_key=api_key,
            headers=extra_headers or {},
            silence_s=silence_s,
            connection_timeout_s=connection_timeout_s,
            routing=routing,
            max_kv_use=max_kv_use,
        )
        self._settings.room.lengths.update(self._servers.context_lengths)
        self.tokenizer, self.images = tokenizer, find_processor(tokenizer)
        tokens = None if tokenizer is None else PromptEncoder(tokenizer, self.images)
        self._token_completions = TokenCompletions(self._servers, self._settings, tokens)
        self._completions = (
            ChatCompletions(self._servers, self._settings)
            if tokens is None
            else RenderedCompletions(self._token_completions, self._settings, tokens)
        )
        self.host, self.port, self.group_port, self.device = host, port, group_port, device
        self.server_url, self.server_urls = addresses[0], addresses
        self.enable_weight_updates = enable_weight_updates
        self._publisher_settings = dict(publisher_settings or {})
        self._publisher: Publisher | None = None

    # -- completions

    async def complete(self, request: ChatCompletionRequest) -> Completion:
        """One completion. The info has `raw_response`, `used_args` and `policy_version`.

        Raises ConfigError and ConfigTypeError for invalid settings before anything is sent,
        TimeoutError after `timeout_s`, and InferenceError for an invalid response, with its
        subclasses EngineDeadError, ServerUnreachableError and ClientTagError.
        """
        extension_fields(request.extensions)  # raises for invalid ones before anything else happens
        return await self._completions.complete(request)

    async def sample_tokens(
        self,
        prompt_token_ids: Sequence[int],
        *,
        sampling: SamplingParams | None = None,
        seed: int | None = None,
        model: str | None = None,
        images: Sequence[ImageSpan] = (),
    ) -> Sampled:
        """Continue token ids without changing them, with `images` in the places of their spans.
        `model` defaults to the first model of the server."""
        model = model or next(iter(self._servers.context_lengths), "")
        request = TokenRequest(model, prompt_token_ids, sampling or SamplingParams(), seed, images=tuple(images))
        check_spans(prompt_token_ids, images, self._token_completions.images, model)
        return make_sampled(request, *await self._token_completions.sample(request))

    @cached_property
    def _completions(self) -> ChatCompletions | RenderedCompletions | OpenAICompletions:
        """Set by the constructor. An instance that was made by `object.__new__`, with nothing but
        an `_async_client`, completes through that client; this is documented behaviour."""
        return OpenAICompletions(self._async_client)

    @cached_property
    def _async_client(self) -> Any:
        """A client of the openai package for the first server, for code that expects one here. It
        is not used by instances that the constructor made."""
        server = self._servers.pool.servers[0]
        return open_client(f"{server.url}/v1", api_key=server.api_key, timeout_s=server.timeout_s, headers=server.request_headers)

    @property
    def context_length(self) -> int | None:
        """Tokens of a prompt and its answer on these servers; None if they do not say."""
        known = [length for length in self._servers.context_lengths.values() if length is not None]
        return min(known, default=None)

    def models(self) -> list[str]:
        """Names of the models that the first server offers."""
        return list(self._servers.context_lengths)

    async def probe(self) -> dict[str, bool]:
        """Ask every server for one token. Drains dead servers and undrains those that have
        recovered. Returns whether each URL is alive."""
        pool = self._servers.pool
        return {server.url: await pool.probe(server) for server in pool.servers}

    def metrics(self) -> dict[str, int]:
        """Counts since the client was made: requests and failures of each server; moved, aborted
        and clipped requests; groups that were filtered by tag."""
        counts = {**self._servers.pool.counts(), "aborted": self._servers.aborted}
        counts["clipped_max_tokens"] = self._settings.room.clipped
        if self._settings.clipper is not None:
            counts["clipped_prompts"] = self._settings.clipper.clipped
        tag = self._settings.reader.tag
        if tag is not None:
            counts.update({f"client_tag_{name}": count for name, count in vars(tag.counts).items()})
        return counts

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        await self._servers.pool.aclose()

    # -- weights

    @property
    def served_names(self) -> dict[str, str]:
        """Requested model -> name under which its newest weights are served, such as the name of
        the newest adapter."""
        return self._servers.served_names

    @property
    def prompts_clipped(self) -> int:
        """Prompts that were cut to `max_prompt_chars`."""
        return 0 if self._settings.clipper is None else self._settings.clipper.clipped

    async def get_policy_version(self) -> int:
        """The weight version that the server reports; if it reports none, the version last pushed
        by this client, or 0."""
        return await self._servers.read_version()

    def sync_weights(self, params: Weights, *, timeout_s: float = 600.0, version: str | int | None = None) -> str:
        """Replace weights by name on all servers or on none; returns the version now served.

        `version` defaults to the last one plus 1. Raises InferenceError unless the client was made
        with `enable_weight_updates`, and what the publisher raises.
        """
        self._check_pushes_weights()
        if self._publisher is None:
            self._publisher = make_publisher(self, timeout_s=timeout_s, settings=self._publisher_settings)
        new_version = str(self._servers.version + 1 if version is None else version)
        self._publisher.publish(params, version=new_version)
        self.weights_changed(new_version)
        return new_version

    def _check_pushes_weights(self) -> None:
        if not self.enable_weight_updates:
            raise InferenceError("this client cannot push weights; set enable_weight_updates=True, for `ludic serve --weights`")

    def follow_restarts(self, restarts: Restarts) -> None:
        """Wait for servers that are restarted, and take no answer of weights that were not
        published, or are older than the version that is published or required at the request.
        Raises ConfigError for a client without `tokenizer`, whose answers do not say what sampled
        them."""
        if isinstance(self._completions, ChatCompletions):
            raise ConfigError("servers that are restarted need a client that knows its tokens; pass tokenizer=")
        self._servers.pool.restarts = restarts

    def require_version(self, version: int) -> None:
        """Take answers of this version and later ones from now on (`follow_restarts`)."""
        if version != self._servers.version:
            self._servers.version = version
            self._servers.pool.router.forget()

    async def has_version(self, version: int, adapters: str = "") -> bool:
        """Whether a server has this version or a later one, which may be `<adapters>@<version>`."""
        return await self._servers.has_version(version, adapters)

    def weights_changed(self, version: str | int | None, *, lost: Sequence[str] = ()) -> None:
        """Called after a push: `version` is served now, and the servers at the URLs `lost` get no
        requests any more."""
        self._servers.record_push(version, lost=lost)

    def adapter_changed(self, name: str, served_name: str) -> None:
        """Called after a push of adapters: requests for the model `name` go to `served_name`."""
        self.served_names[name] = served_name

    @property
    def request_headers(self) -> Mapping[str, str]:
        """Headers of every request to the servers, including the API key."""
        return self._servers.request_headers

    def close_communicator(self) -> None:
        """Close the connections for pushing weights, if there are any."""
        connections, self.connections, self._publisher = self.connections, None, None
        if connections is not None:
            connections.close()

    def reset_prefix_cache(self) -> None:
        """Empty every server's prefix cache. Raises InferenceError if that fails."""
        for server in self._servers.pool.servers:
            VllmEndpoints(server.url, headers=server.request_headers).call(
                "post", "/reset_prefix_cache", timeout_s=RESET_TIMEOUT_S
            )

    def get_num_background_tasks(self) -> int:
        """Always 0: a push is over when it returns."""
        return 0


def make_publisher(
    servers: PushTarget | Sequence[str], *, timeout_s: float, settings: Mapping[str, Any], **more: Any
) -> Publisher:
    """A publisher with which a client pushes weights to its own servers.

    `settings` are the user's keywords, which override the defaults. Weights that did not change are
    pushed as well, because the caller of `sync_weights` decides when to push. This is the only
    import from `ludic.inference` up to `ludic.distributed`: `sync_weights` is a documented method.
    """
    from ludic.distributed.adapters.vllm import create_vllm_publisher

    return create_vllm_publisher(servers, **more, **{"timeout_s": timeout_s, "allow_unchanged": True, **settings})
