"""Models behind vLLM servers: chat completions, and token ids in, token ids out."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ludic.errors import InferenceError
from ludic.inference.prompts.tokens import PromptTokens
from ludic.inference.publishing import Publisher, PushTarget
from ludic.inference.request import ChatCompletionRequest
from ludic.inference.sampling import SamplingParams
from ludic.inference.servers.answers import without_nulls
from ludic.inference.servers.calls import convert_answer
from ludic.inference.servers.client_tags import ClientTag, TagPolicy
from ludic.inference.servers.errors import AbortedError, may_pass
from ludic.inference.servers.http import Answer, BlockingHttp
from ludic.inference.servers.loop_thread import run_blocking
from ludic.inference.servers.openai_client import open_client
from ludic.inference.servers.pool import Server, ServerPool
from ludic.inference.servers.prompt_clipping import PromptClipper
from ludic.inference.servers.retries import Persistence
from ludic.inference.servers.weight_versions import served_version, version_number
from ludic.inference.vllm.context_room import ContextRoom
from ludic.inference.vllm.rendered_chat import RenderedChat
from ludic.inference.vllm.requests import (
    SAMPLING_FIELDS,
    chat_arguments,
    check_fields,
    check_sampling_params,
    completions_body,
    extension_fields,
    generate_body,
)
from ludic.inference.vllm.responses import (
    ChatCompletion,
    Continuation,
    SampledTokens,
    chat_response,
    check_length,
    check_trace,
    check_vocabulary,
    sampled_tokens,
)
from ludic.inference.vllm.server_queries import (
    first_look,
    read_progress,
    read_version,
    reset_prefix_cache,
    server_url,
)
from ludic.inference.vllm.token_endpoints import CHAT, COMPLETIONS, TokenEndpoints
from ludic.inference.vllm.weight_push import make_publisher
from ludic.types import ChatResponse, TokenTrace

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

VERSION_AGE_S = 1.0
TOKEN_FIELDS = SAMPLING_FIELDS | {"vllm_xargs"}


class VLLMChatClient(PushTarget):
    """Chat completions and token continuations from one or more vLLM servers that serve the same
    model.

    With `tokenizer`, the policy's own, prompts are rendered and encoded here and sent as token ids,
    to `/inference/v1/generate` where the server has it (`--enable-scale-out`), else to
    `/v1/completions`; text is made of the ids that come back and is never tokenised again. Without,
    messages go to `/v1/chat/completions` and the server renders them. What training needs comes
    back exactly: the ids read, the ids sampled, one log-probability for each, and where the server
    says so the version of the weights that sampled them. An answer that lacks any of it, or that is
    for another prompt, is an InferenceError.

    A call takes at most `timeout_s`, all attempts included. Failed connections, 408, 409, 425, 429,
    5xx and aborted requests are tried again up to `max_retries` times: sampling changes nothing on
    the server. An engine that is gone is an EngineDeadError at once.

    Of several servers (`urls`) each request goes to the one with the least to do; a dead one is
    drained and its requests move. So do those of one that hangs: that answers nothing for
    `silence_s` while others answer or are idle, then no probe, and works on nothing.

    Settings without meaning are a ConfigError before anything is sent, as is a prompt and
    `max_tokens` that do not fit into the server's context, which the server would clip silently;
    with `on_overflow="clip"` it is clipped here and counted. Fields of `extra_body_overrides` that
    vLLM 0.32 does not know are refused unless `allow_unknown_fields`.

    With `enable_weight_updates` it takes new weights by `sync_weights`, over the weight transfer
    that the servers were started with; `publisher_settings` are keywords of
    `ludic.distributed.create_vllm_publisher`. `group_port` and `device` are taken and not needed:
    the port is one that is free, and the device that of the weights.

    `max_prompt_chars` cuts what the user says of longer prompts, which is counted; None and 0 leave
    prompts alone. `client_tag` says whose requests these are. `shared_server_settings` reads both
    from the variables of a launcher.

    What a server says is checked before anybody sees it: types, a log-probability of at most 0 for
    each token, no more tokens than `max_tokens`, and ids below `vocab_size` where that is given,
    the policy's.

    The client waits for `/health` of every server, at most `connection_timeout_s`, and reads which
    models they serve. `host` 0.0.0.0 means this machine.
    """

    # what an instance has that was made without the constructor
    _session: BlockingHttp | None = None
    _pool: ServerPool | None = None
    _tokens: PromptTokens | None = None
    _tag: ClientTag | None = None
    _clipper: PromptClipper | None = None
    _vocab_size: int | None = None
    _publisher: Publisher | None = None
    _version = 0
    _version_read_at = float("-inf")
    enable_weight_updates = False
    server_url = ""

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
    ) -> None:
        self._vocab_size = vocab_size
        self._room = ContextRoom({}, on_overflow=on_overflow)
        addresses = [server_url(url) for url in urls] if urls is not None else [server_url(host, port)]
        self._persistence = Persistence(timeout_s, max_retries, backoff_s, backoff_growth)
        servers = [Server(url, api_key, timeout_s, headers=dict(extra_headers or {})) for url in addresses]
        self._pool = ServerPool(servers, probe=self._probe, progress=self._progress, silence_s=silence_s)
        self.server_url = addresses[0]
        self.server_urls = addresses
        self.host, self.port, self.group_port, self.device = host, port, group_port, device
        self.enable_weight_updates = enable_weight_updates
        self._publisher_settings = dict(publisher_settings or {})
        self.served_names: dict[str, str] = {}
        """Model asked for -> name under which its present weights are served, such as that of
        the newest adapter."""
        self._aborted = 0
        self._tokens = None if tokenizer is None else PromptTokens(tokenizer)
        self._tag = None if client_tag is None else ClientTag(client_tag, client_tag_policy)
        self._clipper = None if max_prompt_chars is None else PromptClipper(max_prompt_chars if max_prompt_chars > 0 else None)
        self._allow_unknown_fields = allow_unknown_fields
        self._endpoints = TokenEndpoints()
        self._session = BlockingHttp(servers[0].request_headers)
        looking = first_look(self._session.headers, addresses, connection_timeout_s)
        self._room.lengths, self._version = run_blocking(looking)
        self._version_read_at = time.monotonic()

    # -- completions

    async def complete(self, request: ChatCompletionRequest) -> tuple[ChatResponse, dict[str, Any]]:
        """One completion. The info has `raw_response`, `used_args` and `policy_version`.

        Raises ConfigError and ConfigTypeError for settings that make no sense, before anything is
        sent; TimeoutError after `timeout_s`; InferenceError for an answer that is none, and its
        kinds EngineDeadError, ServerUnreachableError and ClientTagError.
        """
        arguments = chat_arguments(request)
        if self._pool is None:
            answer = await self._async_client.chat.completions.create(**arguments)
            return chat_response(answer), {"raw_response": answer.model_dump(exclude_none=True), "used_args": arguments}
        check_sampling_params(request.sampling)
        if self._tokens is not None:
            return await self._complete_rendered(request, self._tokens)
        if not self._allow_unknown_fields:
            check_fields(extension_fields(request.extensions))
        return await self._complete_chat(request, arguments)

    async def complete_tokens(
        self,
        prompt_token_ids: Sequence[int],
        *,
        sampling: SamplingParams | None = None,
        seed: int | None = None,
        model: str | None = None,
    ) -> TokenTrace:
        """Continue token ids as they are. `model` is the first that the server offers unless it
        is named."""
        sampled, _ = await self._sample(
            model or next(iter(self._room.lengths), ""), prompt_token_ids, sampling or SamplingParams(), seed
        )
        return TokenTrace(list(prompt_token_ids), sampled.token_ids, sampled.logprobs, sampled.finish_reason)

    @cached_property
    def _async_client(self) -> Any:
        """The first server's client of the openai package, for code that knows this class to
        have one. Nothing here asks through it, save `complete` of an instance that was made
        without the constructor."""
        server = self._servers().servers[0]
        return open_client(f"{server.url}/v1", api_key=server.api_key, timeout_s=server.timeout_s, headers=server.request_headers)

    def models(self) -> list[str]:
        """Names of the models that the first server offers."""
        return list(self._room.lengths)

    async def probe(self) -> dict[str, bool]:
        """Ask every server for one token. Address -> whether it lives; the dead are drained,
        those that live again taken back."""
        pool = self._servers()
        return {server.url: await pool.probe(server) for server in pool.servers}

    def metrics(self) -> dict[str, int]:
        """Counts so far: of each server, requests moved, aborted and clipped, and what the tags
        filtered."""
        found = {**self._servers().counts(), "aborted": self._aborted, "clipped_max_tokens": self._room.clipped}
        if self._clipper is not None:
            found["clipped_prompts"] = self._clipper.clipped
        if self._tag is not None:
            found.update({f"client_tag_{name}": count for name, count in vars(self._tag.counts).items()})
        return found

    async def aclose(self) -> None:
        """Close the connections of the event loop that runs."""
        await self._servers().aclose()

    async def __aenter__(self) -> VLLMChatClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # -- weights

    @property
    def prompts_clipped(self) -> int:
        """Prompts of which less was sent than was given."""
        return 0 if self._clipper is None else self._clipper.clipped

    async def get_policy_version(self) -> int:
        """The version that the server says it serves. What this client last committed where it
        does not say, 0 if that is nothing."""
        if self._pool is None:
            return self._version
        server = next(iter(self._pool.live), self._pool.servers[0])
        found = await read_version(server.request_headers, server.url)
        self._version_read_at = time.monotonic()
        if found is not None:
            self._version = found
        return self._version

    def sync_weights(self, params: Mapping[str, Tensor], *, timeout_s: float = 600.0, version: str | int | None = None) -> str:
        """Replace the servers' weights by name, on all or on none; the version now served.

        Without a version it is one more than the last. Raises InferenceError for a client that was
        made for inference only, and what the publisher raises.
        """
        if not self.enable_weight_updates:
            raise InferenceError(
                "this client is for inference only and cannot push weights; make it with enable_weight_updates=True, for servers that "
                "were started to take them (`ludic serve --weights`)"
            )
        if self._publisher is None:
            self._publisher = make_publisher(self, timeout_s=timeout_s, settings=self._publisher_settings)
        committed = str(self._version + 1 if version is None else version)
        self._publisher.publish(params, version=committed)
        self.weights_changed(committed)
        return committed

    def weights_changed(self, version: str | int | None, *, lost: Sequence[str] = ()) -> None:
        """Called after a push: `version` is served now, and the servers at the URLs `lost` get no
        more requests."""
        number = version_number(version)
        if number is not None:
            self._version, self._version_read_at = number, time.monotonic()
        for server in self._servers().servers:
            if server.url in lost:
                self._servers().drain(server, "its last push of weights could not be completed")

    def adapter_changed(self, name: str, served_name: str) -> None:
        self.served_names[name] = served_name

    @property
    def request_headers(self) -> Mapping[str, str]:
        return {} if self._session is None else dict(self._session.headers)

    def close_communicator(self) -> None:
        """Close the connections over which weights are pushed, if there are any."""
        connections, self.connections, self._publisher = self.connections, None, None
        if connections is not None:
            connections.close()

    def reset_prefix_cache(self) -> None:
        """Make every server forget what it computed of earlier prompts. Raises InferenceError
        where that fails."""
        for server in self._servers().servers:
            reset_prefix_cache(BlockingHttp(server.request_headers), server.url)

    def get_num_background_tasks(self) -> int:
        """0: a push is over when it returns."""
        return 0

    # -- the rest is how

    async def _complete_chat(
        self, request: ChatCompletionRequest, arguments: dict[str, Any]
    ) -> tuple[ChatResponse, dict[str, Any]]:
        sent = {**arguments, "model": self.served_names.get(request.model, request.model)}
        if self._clipper is not None:
            sent["messages"] = self._clipper(request.messages)
        if self._tag is not None:
            sent["extra_body"] = {**sent.get("extra_body", {}), "client_tag": self._tag.tag}
            sent["extra_headers"] = self._tag.headers()
        body = {key: value for key, value in sent.items() if key not in ("extra_body", "extra_headers")}
        body |= sent.get("extra_body", {})

        async def at(server: Server) -> Answer:
            return await server.post(CHAT, body, headers=sent.get("extra_headers"))

        def read(answer: Answer) -> tuple[ChatResponse, dict[str, Any]]:
            payload = without_nulls(answer.read(dict[str, Any]))
            if self._tag is not None:
                payload = self._tag.mine(payload)
            read_as = (
                answer.read(ChatCompletion) if self._tag is None else convert_answer(payload, ChatCompletion, self.server_url)
            )
            response, asked = read_as.response(), request.return_
            check_trace(response, ids=asked.return_token_ids, logprobs=asked.return_chosen_logprobs)
            for ids in (response.prompt_token_ids, response.completion_token_ids):
                check_vocabulary(ids or (), self._vocab_size, self.server_url)
            check_length(response.completion_token_ids or (), request.sampling.max_tokens, self.server_url)
            self._room.check_answer(request.model, response, request.sampling.max_tokens)
            return response, payload

        (response, payload), version = await self._ask(at, read, says_version=False)
        return response, {"raw_response": payload, "used_args": sent, "policy_version": version}

    async def _version_before(self) -> int:
        """The version that a request about to be made is sampled from, or an older one:
        endpoints that do not say it are asked for it once a second at most."""
        if time.monotonic() - self._version_read_at > VERSION_AGE_S:
            self._version_read_at = time.monotonic()
            await self.get_policy_version()
        return self._version

    async def _complete_rendered(
        self, request: ChatCompletionRequest, tokens: PromptTokens
    ) -> tuple[ChatResponse, dict[str, Any]]:
        chat = RenderedChat(request, request.messages if self._clipper is None else self._clipper(request.messages), tokens)
        fields = extension_fields(request.extensions)
        if not self._allow_unknown_fields:
            check_fields(fields, TOKEN_FIELDS)
        sampled, info = await self._sample(
            request.model, chat.prompt_ids, request.sampling, request.seed, top_k=request.return_.top_logprobs_k, fields=fields
        )
        response, choice = chat.read(sampled)
        return response, {"raw_response": {"choices": [choice]}, **info}

    async def _sample(
        self,
        model: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        seed: int | None,
        *,
        top_k: int = 1,
        fields: Mapping[str, Any] | None = None,
    ) -> tuple[SampledTokens, dict[str, Any]]:
        """One continuation, and `policy_version`, `weight_versions` and `used_args` without the
        prompt."""
        check_sampling_params(sampling)
        sampling = self._room.fitted(model, prompt_ids, sampling)
        common = {"model": self.served_names.get(model, model), **({} if self._tag is None else {"client_tag": self._tag.tag})}
        used = fields or {}
        arguments = {**common, **generate_body(prompt_ids, sampling, seed, top_k, used)}
        other = {**common, **completions_body(prompt_ids, sampling, seed, top_k, used)}

        async def at(server: Server) -> Answer:
            return await self._endpoints.post(server, arguments, other, None if self._tag is None else self._tag.headers())

        def read(answer: Answer) -> SampledTokens:
            url = self.server_url
            read_as = (
                answer.read(Continuation)
                if self._tag is None
                else convert_answer(self._tag.mine(answer.read(dict[str, Any])), Continuation, url)
            )
            sampled = sampled_tokens(read_as, prompt_ids, name=url)
            check_length(sampled.token_ids, sampling.max_tokens, url)
            check_vocabulary(sampled.token_ids, self._vocab_size, url)
            for span in sampled.weight_versions:
                served_version(span["version"], url)
            return sampled

        sampled, version = await self._ask(at, read, says_version=not self._endpoints.without_generate)
        numbers = [version_number(span["version"]) for span in sampled.weight_versions]
        known = [number for number in numbers if number is not None]
        info: dict[str, Any] = {"policy_version": min(known) if known else version}
        if known:
            info["weight_versions"] = sampled.weight_versions
        info["used_args"] = {key: value for key, value in arguments.items() if key != "token_ids"}
        return sampled, info

    async def _ask(
        self, at: Callable[[Server], Awaitable[Answer]], read: Callable[[Answer], T], *, says_version: bool
    ) -> tuple[T, int]:
        """What `read` makes of what `at` gets from a live server, and the version that was
        served before, within the deadline. Servers whose answers do not say it are asked for it."""
        pool = self._servers()

        async def once(server: Server) -> T:
            answer = await at(server)
            try:
                return read(answer)
            except AbortedError:
                self._aborted += 1
                raise

        async def attempt() -> tuple[T, int]:
            version = self._version if says_version else await self._version_before()
            return await pool.send(once), version

        name = self.server_url if len(pool.servers) == 1 else f"none of {len(pool.servers)} servers"
        return await self._persistence.carry_out(attempt, name=name, again=may_pass)

    def _servers(self) -> ServerPool:
        if self._pool is None:
            raise InferenceError("this client was made without its constructor and knows no server")
        return self._pool

    async def _probe(self, server: Server) -> None:
        """One token, or the error that says why there is none. A server that came back with
        older weights is not taken."""
        await server.probe(COMPLETIONS, {"model": next(iter(self._room.lengths), ""), "prompt": [[0]], "max_tokens": 1})
        found = await read_version(server.request_headers, server.url)
        if self._version and (found is None or found < self._version):
            raise InferenceError(f"it serves version {found} of the weights and not {self._version}; push to it first")

    async def _progress(self, server: Server) -> float | None:
        return await read_progress(server.request_headers, server.url)
