"""Builds and checks requests to vLLM servers, which silently ignore fields that they do not
know.

Checks that a prompt and `max_tokens` fit into the server's context, because the server would
silently clip `max_tokens`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ludic.errors import ConfigError, ConfigTypeError, InferenceError, check_value, did_you_mean
from ludic.inference.extensions import VLLMExtensions
from ludic.inference.request import ChatCompletionRequest, SamplingParams, chat_fields
from ludic.inference.vllm.in_server.think_limits import parse_max_think
from ludic.types import ChatResponse, ImageSpan, stored

SAMPLING_FIELDS = frozenset(
    ["temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "allowed_token_ids", "bad_words"]
    + ["repetition_penalty", "frequency_penalty", "presence_penalty"]
    + ["max_tokens", "min_tokens", "thinking_token_budget", "stop", "stop_token_ids", "ignore_eos"]
    + ["include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens", "structured_outputs"]
)
"""Sampling fields that vLLM 0.32 accepts on every endpoint."""
CHAT_FIELDS = SAMPLING_FIELDS | frozenset(
    ["add_generation_prompt", "add_special_tokens", "chat_template", "chat_template_kwargs", "continue_final_message"]
    + ["documents", "mm_processor_kwargs", "parallel_tool_calls", "truncate_prompt_tokens"]
    + ["use_beam_search", "length_penalty", "reasoning_effort", "include_reasoning", "response_format"]
    + ["logprobs", "top_logprobs", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids"]
    + ["cache_salt", "client_tag", "priority", "request_id", "user", "vllm_xargs"]
)
"""All fields that a chat completion accepts."""
TOKEN_FIELDS = SAMPLING_FIELDS | {"vllm_xargs"}
"""All fields that a continuation of token ids accepts."""


@dataclass(frozen=True)
class TokenRequest:
    """A request to continue token ids. Example: `TokenRequest("tiny", [5, 6],
    SamplingParams(max_tokens=8))`."""

    model: str
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    seed: int | None = None
    top_k: int = 1
    """Alternatives for each token; 1 is the sampled token alone."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end an answer in addition to the model's end token."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """More fields of the body, which override the others."""
    images: Sequence[ImageSpan] = ()
    """Where the images are in `prompt_ids`."""
    short_ids: Sequence[int] = ()
    """The prompt of which the server makes `prompt_ids`, if there are images (`shorten_prompt`)."""
    banned_ids: Sequence[int] = ()
    """Tokens that are not sampled."""

    def generate_body(self) -> dict[str, Any]:
        """The body for `/inference/v1/generate`."""
        fields = self._sampling_fields()
        if "vllm_xargs" in fields:
            fields["extra_args"] = fields.pop("vllm_xargs")
        return {
            "model": self.model,
            "token_ids": list(self.short_ids or self.prompt_ids),
            "sampling_params": fields,
            "return_token_ids": True,
        }

    def completions_body(self) -> dict[str, Any]:
        """The body of the same request for `/v1/completions`."""
        prompt = {"model": self.model, "prompt": [list(self.prompt_ids)]}
        return {**prompt, "return_token_ids": True, **self._sampling_fields()}

    def _sampling_fields(self) -> dict[str, Any]:
        fields = {
            **self.sampling.to_openai_kwargs(),
            **self.sampling.server_fields(),
            "logprobs": 0 if self.top_k == 1 else self.top_k,
        }
        if self.stop_token_ids and not self.fields.get("ignore_eos"):
            fields["stop_token_ids"] = list(self.stop_token_ids)
        fields |= {**({} if self.seed is None else {"seed": self.seed}), **self.fields}
        if self.banned_ids:
            given = {str(token): bias for token, bias in (fields.get("logit_bias") or {}).items()}
            fields["logit_bias"] = {**given, **dict.fromkeys(map(str, self.banned_ids), -100.0)}
        return fields


def chat_arguments(request: ChatCompletionRequest) -> dict[str, Any]:
    """Keywords of `chat.completions.create`. Raises ConfigError and ConfigTypeError for invalid
    extensions.

    `logprobs` is the number of alternatives, at least 1. In OpenAI's interface it is a bool, so for
    more than one the body also has OpenAI's fields.
    """
    extra: dict[str, Any] = {"return_token_ids": True} if request.return_.return_token_ids else {}
    extra |= extension_fields(request.extensions)
    arguments = chat_fields(request)
    extra = {**arguments.pop("extra_body", {}), **extra}
    if request.return_.return_chosen_logprobs:
        arguments["logprobs"] = int(max(1, request.return_.top_logprobs_k))
        if arguments["logprobs"] > 1:
            extra = {"logprobs": True, "top_logprobs": arguments["logprobs"], **extra}
    if extra:
        arguments["extra_body"] = extra
    return arguments


def extension_fields(extensions: object) -> dict[str, Any]:
    """The body fields of `VLLMExtensions`. Raises ConfigTypeError for other extensions and
    ConfigError for invalid values."""
    if extensions is None:
        return {}
    if not isinstance(extensions, VLLMExtensions):
        raise ConfigTypeError(f"unsupported request.extensions: {type(extensions).__name__}; a vLLM server takes VLLMExtensions")
    penalty = extensions.repetition_penalty
    try:
        think = parse_max_think(extensions.max_think)
    except ValueError as error:
        raise ConfigError(f"{error}; None sets no limit") from None
    if not penalty > 0:
        raise ConfigError(f"repetition_penalty must be > 0, got {penalty}; 1 changes nothing")
    fields: dict[str, Any] = {"repetition_penalty": float(penalty)} if penalty != 1 else {}
    if think is not None:
        fields["vllm_xargs"] = {"max_think": think}
    return {**fields, **extensions.extra_body_overrides}


def check_fields(fields: Mapping[str, Any], supported: frozenset[str]) -> None:
    """Raise ConfigError for a field that the server would ignore."""
    for name in fields:
        if name not in supported:
            hint = did_you_mean(name, supported, "set allow_unknown_fields=True if your server knows it")
            raise ConfigError(f"extra_body_overrides has {name!r}, which vLLM would silently ignore{hint}")


class ContextRoom:
    """The context lengths of one client's models.

    >>> ContextRoom({"tiny": 512}).fit("tiny", prompt_ids, SamplingParams(max_tokens=64))
    """

    def __init__(self, lengths: Mapping[str, int], *, on_overflow: Literal["error", "clip"] = "error") -> None:
        """`lengths`: maximum number of prompt plus completion tokens, by model; if empty, there is
        no limit. If a request does not fit, `on_overflow="error"` raises ConfigError, and "clip"
        clips and counts it."""
        check_value("on_overflow", on_overflow, choices=("error", "clip"))
        self.lengths, self._on_overflow = dict(lengths), on_overflow
        self.clipped = 0

    def fit(self, model: str, prompt_ids: Sequence[int], sampling: SamplingParams) -> SamplingParams:
        """The sampling parameters with a `max_tokens` that fits after the prompt. Raises
        InferenceError for a prompt that is empty or leaves no room."""
        length = self._length(model)
        if not prompt_ids:
            raise InferenceError("the prompt has no tokens; a model needs at least one to continue")
        if length is None or len(prompt_ids) + sampling.max_tokens <= length:
            return sampling
        if len(prompt_ids) >= length:
            raise InferenceError(
                f"the prompt ({len(prompt_ids)} tokens) fills the server's context ({length}); shorten it, or raise --max-model-len"
            )
        self._handle_overflow(model, len(prompt_ids), sampling.max_tokens)
        return replace(sampling, max_tokens=length - len(prompt_ids))

    def check_completion(self, model: str, response: ChatResponse, max_tokens: int) -> None:
        """Detect from the response that the server clipped `max_tokens`, for a prompt that the
        server rendered."""
        prompt, completion = stored(response, "prompt_token_ids"), stored(response, "completion_token_ids")
        if prompt is None or completion is None or response.finish_reason != "length" or len(completion) >= max_tokens:
            return
        self._handle_overflow(model, len(prompt), max_tokens)

    def _handle_overflow(self, model: str, prompt: int, max_tokens: int) -> None:
        if self._on_overflow == "error":
            raise ConfigError(
                f"the prompt ({prompt} tokens) and max_tokens ({max_tokens}) must fit into the server's context "
                f"({self._length(model)}); lower max_tokens, raise the server's --max-model-len, or set on_overflow='clip'"
            )
        self.clipped += 1

    def _length(self, model: str) -> int | None:
        return self.lengths.get(model, min(self.lengths.values(), default=None))
