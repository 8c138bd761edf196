"""Scores from a reward model behind an unmodified vLLM server that was started with `--runner
pooling`.

`POST /classify` with `use_activation: false` returns the model's logit at the last token of a
sequence, which is text or token ids. Surprises of vLLM 0.32.0:

- `/score` compares pairs of texts and does not take single sequences; `/pooling` returns the same
  number as `/classify`.
- Without `use_activation`, `problem_type` in the model's configuration decides whether the logistic
  function is applied. A misspelt field is ignored.
- One sequence that is too long, empty or outside the vocabulary makes the whole request fail (400).
- Text gets special tokens unless `add_special_tokens` is false.
- The prefix cache is on, and new weights do not reset it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from msgspec import Struct, field

from ludic.errors import ConfigError, InferenceError, check_value, shorten_names
from ludic.inference.client import Publisher, Weights
from ludic.inference.prompts.template import encode_text, reads_same_ids
from ludic.inference.reward_types import (
    PoolingType,
    RewardModelTrainingMode,
    ScoringInput,
    ScoringRequest,
    ScoringResponse,
    check_one_label,
    select_trained_weights,
)
from ludic.inference.servers.answers import ModelList, WeightInfo, version_number
from ludic.inference.servers.errors import RetryPolicy
from ludic.inference.servers.http import AsyncClosing, convert_answer, run_blocking
from ludic.inference.servers.pool import ServerPool
from ludic.inference.servers.server import Server
from ludic.inference.vllm.client import make_publisher
from ludic.inference.vllm.servers import server_url

T = TypeVar("T")
ANY_MODEL = "default"
"""Stands for the model that the server serves, whatever its name."""


class _Score(Struct):
    probs: list[float]
    index: int | None = None


class _Usage(Struct):
    prompt_tokens: int = 0
    total_tokens: int = 0


class _Scores(Struct):
    """A response of `/classify`."""

    data: list[_Score]
    usage: _Usage = field(default_factory=_Usage)


class _Version(Struct):
    version: str


class VLLMScoringClient(AsyncClosing):
    """A reward model behind one or more vLLM servers, `http://host:port`.

    A call takes at most `timeout_s`, retries included. Failed connections and transient statuses
    are retried up to `max_retries` times; a dead engine raises EngineDeadError immediately. With
    several servers each call goes to the least busy one; a dead server is drained, and its calls
    move to the others. With `tokenizer`, the server's own, rollouts are scored as the token ids
    that were sampled, and text begins as in training. `pooling_type` must equal the server's,
    which requests cannot change.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        model: str = ANY_MODEL,
        tokenizer: Any = None,
        pooling_type: PoolingType = PoolingType.LAST,
        add_special_tokens: bool = False,
        timeout_s: float = 120.0,
        max_retries: int = 3,
        backoff_s: float = 0.5,
        api_key: str = "local",
        publisher_settings: Mapping[str, Any] | None = None,
    ) -> None:
        """`publisher_settings` are keywords of `ludic.distributed.create_vllm_publisher`, for
        servers that take new weights."""
        urls = [server_url(each) for each in ([url] if isinstance(url, str) else url)]
        self._retries = RetryPolicy(timeout_s, max_retries, backoff_s)
        self._pool = ServerPool([Server(each, api_key, timeout_s) for each in urls], probe=self._probe)
        self.url = urls[0]
        self.model, self.tokenizer, self.pooling_type = model, tokenizer, pooling_type
        self._add_special_tokens = add_special_tokens
        self._publisher_settings = dict(publisher_settings or {})
        self._publishers: dict[bool, Publisher] = {}
        """Whether a push may omit weights -> publisher."""
        self._version = 0

    def reads_ids_of(self, tokenizer: Any) -> bool:
        """Whether token ids of this tokenizer mean the same at the server."""
        return reads_same_ids(self.tokenizer, tokenizer)

    async def score(self, request: ScoringRequest) -> tuple[ScoringResponse, dict[str, Any]]:
        """The scores of a request. The info has the server's answers as `raw_response` and the
        request bodies as `used_args`.

        Raises ConfigError for a request that this server cannot answer, DataError for an input that
        the server refuses, TimeoutError after `timeout_s`, and InferenceError for any other
        failure.
        """
        if request.pooling_type is PoolingType.STEP:
            raise ConfigError("pooling_type=step is reserved: nothing computes a score for each step yet")
        if request.pooling_type is not self.pooling_type:
            raise ConfigError(
                f"pooling_type ({request.pooling_type.value}) must be the server's ({self.pooling_type.value}); start it with "
                f'--pooler-config \'{{"pooling_type": "{request.pooling_type.value.upper()}"}}\''
            )
        logits: dict[int, list[float]] = {}
        answers, bodies, usages = [], [], []
        # A request takes only texts or only token ids: ["a", (1, 2), "b"] makes [[0, 2], [1]].
        for is_text in (True, False):
            positions = [position for position, value in enumerate(request.inputs) if isinstance(value, str) is is_text]
            if not positions:
                continue
            body = self._body(request, [request.inputs[position] for position in positions])
            answer = await self._call("/classify", dict[str, Any], body)
            scored = convert_answer(answer, _Scores, self.url)
            logits.update(zip(positions, _read_logits(scored, len(positions), request.n_labels, self.url), strict=True))
            usages.append(scored.usage)
            answers.append(answer)
            bodies.append(body)
        rows = [logits[position] for position in range(len(request.inputs))]
        scores = [_apply_activation(row) for row in rows] if request.normalize else rows
        response = ScoringResponse(
            scores=[row[0] for row in scores] if request.n_labels == 1 else scores,
            model=str(answers[0].get("model", request.model)) if answers else request.model,
            usage={
                "prompt_tokens": sum(usage.prompt_tokens for usage in usages),
                "total_tokens": sum(usage.total_tokens for usage in usages),
            },
            metadata={"pooling_type": request.pooling_type.value, "normalize": request.normalize},
        )
        return response, {"raw_response": answers, "used_args": bodies}

    async def score_batch(
        self,
        inputs: Sequence[str | Sequence[int]],
        *,
        normalize: bool = True,
        pooling_type: PoolingType | None = None,
        n_labels: int = 1,
    ) -> list[float]:
        """[N] scores, one for each text or list of token ids."""
        check_one_label(n_labels)
        pooling = self.pooling_type if pooling_type is None else pooling_type
        request = ScoringRequest.from_list(self.model, inputs, pooling_type=pooling, normalize=normalize)
        return (await self.score(request))[0].scores

    def score_sync(self, request: ScoringRequest) -> tuple[ScoringResponse, dict[str, Any]]:
        """`score` for synchronous code."""

        async def score_and_close() -> tuple[ScoringResponse, dict[str, Any]]:
            async with self:
                return await self.score(request)

        return run_blocking(score_and_close())

    async def get_reward_model_version(self) -> int:
        """The version of the weights, 0 before the first push. Raises InferenceError if the
        server does not report it."""
        return version_number((await self._call("/weight_info", WeightInfo)).weight_version) or 0

    async def get_server_info(self, server: str = "scoring") -> dict[str, Any]:
        """`url`, `models`, `max_model_len` and vLLM's `version` of the server."""
        check_value("server", server, f"{type(self).__name__} knows no other", choices=("scoring",))
        served, version = (await self._call("/v1/models", ModelList)).data, await self._call("/version", _Version)
        return {
            "url": self.url,
            "models": [model.id for model in served],
            "max_model_len": served[0].max_model_len if served else None,
            "version": version.version,
        }

    @property
    def server_urls(self) -> list[str]:
        """The addresses of all servers."""
        return [server.url for server in self._pool.servers]

    def sync_reward_weights(
        self,
        params: Weights,
        *,
        training_mode: RewardModelTrainingMode | str = RewardModelTrainingMode.FULL,
        timeout_s: float = 600.0,
        version: str | int | None = None,
    ) -> str:
        """Replace the weights that `training_mode` changes, on all servers or on none. Returns the
        version that is served now.

        No other weights are announced or sent. `version` defaults to the last one plus 1. Raises
        ConfigError if there is no such weight, and the errors of the publisher.
        """
        selected = select_trained_weights(params, training_mode)
        partial = RewardModelTrainingMode(training_mode) is not RewardModelTrainingMode.FULL
        if partial not in self._publishers:
            self._publishers[partial] = make_publisher(
                self.server_urls, timeout_s=timeout_s, settings=self._publisher_settings, partial=partial
            )
        new_version = str(self._version + 1 if version is None else version)
        self._publishers[partial].publish(selected, version=new_version)
        self._version = version_number(new_version) or self._version
        return new_version

    def close_communicator(self) -> None:
        """Close the connections for pushing weights; the servers keep their weights."""
        publishers, self._publishers = self._publishers, {}
        for publisher in publishers.values():
            publisher.close()

    async def aclose(self) -> None:
        """Close the connections of this event loop."""
        await self._pool.aclose()

    def _body(self, request: ScoringRequest, inputs: Sequence[ScoringInput]) -> dict[str, Any]:
        """The JSON body. Every field is set, because the server has other defaults."""
        model = request.model if request.model != ANY_MODEL else self.model
        return {
            **({} if model == ANY_MODEL else {"model": model}),
            "input": [self._as_input(each) for each in inputs],
            "use_activation": False,
            "add_special_tokens": self._add_special_tokens,
        }

    def _as_input(self, each: ScoringInput) -> str | list[int]:
        """Text as ids if the tokenizer is known, begun as texts are in training: a server puts
        all special tokens around it or none."""
        if not isinstance(each, str):
            return list(each)
        return each if self.tokenizer is None or self._add_special_tokens else encode_text(self.tokenizer, each)

    async def _call(self, path: str, kind: type[T], body: dict[str, Any] | None = None) -> T:
        """The response of a live server, with retries."""
        refused, missing = "the input was refused", "is it a server of a reward model, started with --runner pooling?"
        return await self._pool.read(path, kind, body, retries=self._retries, refused=refused, missing=missing)

    async def _probe(self, server: Server) -> None:
        """Score one token. Raises an error if that fails."""
        await server.probe("/classify", {"input": [[0]], "use_activation": False})


def _read_logits(answer: _Scores, expected: int, n_labels: int, url: str) -> list[list[float]]:
    """[N][L] logits in the order of the inputs.

    Entries with the indices 1 and 0 are swapped; entries without indices are in order.
    """
    rows: dict[int, list[float]] = {}
    for entry in answer.data:
        if len(entry.probs) != n_labels:
            raise ConfigError(f"the model of {url} has {len(entry.probs)} labels, but the request has n_labels={n_labels}")
        rows[len(rows) if entry.index is None else entry.index] = entry.probs
    if len(answer.data) != expected or sorted(rows) != list(range(expected)):
        found = f"{len(answer.data)} scores for {expected} inputs (indices {shorten_names(sorted(rows))})"
        raise InferenceError(f"{url} returned {found}; there must be one for each")
    return [rows[index] for index in range(expected)]


def _apply_activation(row: Sequence[float]) -> list[float]:
    """The logistic function of one logit, or the softmax of several."""
    if len(row) == 1:
        z = math.exp(-abs(row[0]))
        return [1 / (1 + z) if row[0] >= 0 else z / (1 + z)]
    largest = max(row)
    powers = [math.exp(number - largest) for number in row]
    return [power / math.fsum(powers) for power in powers]
