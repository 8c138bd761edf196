"""Log-probabilities of given token ids from unmodified vLLM servers, such as a teacher's.

`POST /v1/completions` with `prompt_logprobs: 0` returns the log-probability of each token of a
prompt but the first. It is of softmax(logits), whatever the temperature of the request; vLLM sends
-9999 for what it rounds to minus infinity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from msgspec import Struct

from ludic.errors import ConfigError, DataError, InferenceError
from ludic.inference.servers.answers import ModelList
from ludic.inference.servers.errors import RetryPolicy
from ludic.inference.servers.pool import ServerPool
from ludic.inference.servers.server import Server
from ludic.inference.vllm.servers import server_url

T = TypeVar("T")
PATH = "/v1/completions"
COMPARED_TOKENS = 512
"""Tokens of the vocabulary that are compared, in addition to the special ones."""


class _Entry(Struct):
    logprob: float


class _Choice(Struct):
    index: int
    prompt_logprobs: list[dict[str, _Entry] | None] | None = None


class _Completions(Struct):
    choices: list[_Choice]


class _Text(Struct):
    prompt: str


class PromptLogprobsClient:
    """One or more vLLM servers of one model, `http://host:port`.

    A call takes at most `timeout_s`, retries included; each goes to the least busy live server.
    Failed connections and transient statuses are retried up to `max_retries` times.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        timeout_s: float = 120.0,
        max_retries: int = 3,
        backoff_s: float = 0.5,
        api_key: str = "local",
    ) -> None:
        urls = [server_url(each) for each in ([url] if isinstance(url, str) else url)]
        self._retries = RetryPolicy(timeout_s, max_retries, backoff_s)
        self._pool = ServerPool([Server(each, api_key, timeout_s) for each in urls], probe=self._probe)
        self.url = urls[0]

    async def score(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """[T - 1] log-probabilities of each row of T ids, without its first token, in one request.

        Raises DataError for ids that the server refuses, TimeoutError after `timeout_s`, and
        InferenceError for any other failure.
        """
        body = {"prompt": [list(row) for row in rows], "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        choices = (await self._call(PATH, _Completions, body)).choices
        found = {choice.index: choice.prompt_logprobs for choice in choices}
        if len(choices) != len(rows) or sorted(found) != list(range(len(rows))):
            raise InferenceError(
                f"{self.url} returned {len(choices)} answers for {len(rows)} prompts; there must be one for each"
            )
        return [self._read(row, found[index]) for index, row in enumerate(rows)]

    def _read(self, row: Sequence[int], entries: list[dict[str, _Entry] | None] | None) -> list[float]:
        given = [None if each is None else each.get(str(token)) for token, each in zip(row, entries or (), strict=False)]
        if len(entries or ()) != len(row) or any(each is None for each in given[1:]):
            raise InferenceError(
                f"{self.url} gave no prompt_logprobs of some of {len(row)} tokens; is it a vLLM server of a policy?"
            )
        return [each.logprob for each in given[1:] if each is not None]

    async def check(self, name: str, tokenizer: Any, max_seq_len: int) -> None:
        """Raise ConfigError, naming the setting `name`, unless a server answers, decodes token ids
        as `tokenizer` does, and takes prompts of `max_seq_len` tokens. The special tokens and a
        sample of the others are compared."""
        size = len(tokenizer)
        ids = sorted({*tokenizer.all_special_ids, *range(0, size, max(1, size // COMPARED_TOKENS)), size - 1})
        try:
            served = (await self._call("/v1/models", ModelList)).data
            theirs = (await self._call("/detokenize", _Text, {"tokens": ids})).prompt
        except DataError:
            theirs = None
        except (InferenceError, TimeoutError) as error:
            raise ConfigError(f"{name} ({self.url}) does not answer: {error}; start a vLLM server there") from error
        if theirs != tokenizer.decode(ids):
            raise ConfigError(f"{name} ({self.url}) must have the policy's vocabulary; serve a model with the policy's tokenizer")
        longest = next((each.max_model_len for each in served if each.max_model_len is not None), None)
        if longest is not None and longest <= max_seq_len:
            raise ConfigError(
                f"{name} ({self.url}) takes {longest} tokens, which must be > max_seq_len ({max_seq_len}); lower that"
            )

    async def aclose(self) -> None:
        """Close the connections of this event loop."""
        await self._pool.aclose()

    async def _call(self, path: str, kind: type[T], body: dict[str, Any] | None = None) -> T:
        refused, missing = "the token ids were refused", "is it a vLLM server of a policy?"
        return await self._pool.read(path, kind, body, retries=self._retries, refused=refused, missing=missing)

    async def _probe(self, server: Server) -> None:
        await server.probe(PATH, {"prompt": [[0]], "max_tokens": 1})
