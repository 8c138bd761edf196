"""What is asked of a vLLM server, checked here: the server ignores fields that it does not know
and clips lengths without a word."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from ludic.errors import ConfigError, ConfigTypeError
from ludic.inference.extensions import VLLMExtensions
from ludic.inference.request import ChatCompletionRequest
from ludic.inference.sampling import SamplingParams

SAMPLING_FIELDS = frozenset(
    [
        "allowed_token_ids",
        "bad_words",
        "ignore_eos",
        "include_stop_str_in_output",
        "logit_bias",
        "max_tokens",
        "min_p",
        "min_tokens",
        "repetition_penalty",
        "seed",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_token_ids",
        "structured_outputs",
        "temperature",
        "thinking_token_budget",
        "top_k",
        "top_p",
        "frequency_penalty",
        "presence_penalty",
    ]
)
"""Settings of one request's sampling that vLLM 0.32 knows on every endpoint."""
CHAT_FIELDS = SAMPLING_FIELDS | frozenset(
    [
        "add_generation_prompt",
        "add_special_tokens",
        "cache_salt",
        "chat_template",
        "chat_template_kwargs",
        "client_tag",
        "continue_final_message",
        "documents",
        "include_reasoning",
        "length_penalty",
        "logprobs",
        "mm_processor_kwargs",
        "parallel_tool_calls",
        "priority",
        "prompt_logprobs",
        "reasoning_effort",
        "request_id",
        "response_format",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "top_logprobs",
        "truncate_prompt_tokens",
        "use_beam_search",
        "user",
        "vllm_xargs",
    ]
)
"""Those of a chat completion beside."""


def chat_arguments(request: ChatCompletionRequest) -> dict[str, Any]:
    """Keywords of `chat.completions.create`. Raises before anything is sent.

    `logprobs` is the number of alternatives, 1 at least; beyond one, the body says the same as
    OpenAI's interface does, since there `logprobs` is true or false.
    """
    extra = extra_body(request)
    arguments: dict[str, Any] = {"model": request.model, "messages": request.messages, **request.sampling.to_openai_kwargs()}
    if request.seed is not None:
        arguments["seed"] = request.seed
    if request.tools is not None:
        arguments["tools"] = request.tools.tools
        if request.tools.tool_choice is not None:
            arguments["tool_choice"] = request.tools.tool_choice
    if request.return_.return_chosen_logprobs:
        arguments["logprobs"] = int(max(1, request.return_.top_logprobs_k))
        if arguments["logprobs"] > 1:
            extra = {"logprobs": True, "top_logprobs": arguments["logprobs"], **extra}
    if extra:
        arguments["extra_body"] = extra
    return arguments


def extra_body(request: ChatCompletionRequest) -> dict[str, Any]:
    """What the body has beyond OpenAI's interface, the caller's own fields last."""
    body: dict[str, Any] = {"return_token_ids": True} if request.return_.return_token_ids else {}
    return {**body, **extension_fields(request.extensions)}


def extension_fields(extensions: object) -> dict[str, Any]:
    """The fields that `VLLMExtensions` stands for. Raises ConfigTypeError for another kind,
    ConfigError for values without meaning."""
    if extensions is None:
        return {}
    if not isinstance(extensions, VLLMExtensions):
        raise ConfigTypeError(f"unsupported request.extensions: {type(extensions).__name__}; a vLLM server takes VLLMExtensions")
    think, penalty = extensions.max_think, extensions.repetition_penalty
    if think is not None and (not isinstance(think, int) or isinstance(think, bool) or think < 1):
        raise ConfigError(f"max_think must be a positive integer, got {think!r}; None sets no limit")
    if not penalty > 0:
        raise ConfigError(f"repetition_penalty must be > 0, got {penalty}; 1 changes nothing")
    fields: dict[str, Any] = {"repetition_penalty": float(penalty)}
    if think is not None:
        fields["vllm_xargs"] = {"max_think": think}
    return {**fields, **extensions.extra_body_overrides}


def check_fields(fields: Mapping[str, Any], known: frozenset[str] = CHAT_FIELDS) -> None:
    """Refuse a field that the server would ignore."""
    for name in fields:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "set allow_unknown_fields=True if your server knows it"
            raise ConfigError(f"extra_body_overrides has {name!r}, which vLLM would ignore without a word; {hint}")


def check_sampling_params(sampling: SamplingParams) -> None:
    """Refuse settings without meaning, in the words of their names."""
    if not 0 <= sampling.temperature < float("inf"):
        raise ConfigError(f"temperature ({sampling.temperature}) must be >= 0 and finite; 0 takes the most likely token")
    if not 0 < sampling.top_p <= 1:
        raise ConfigError(f"top_p ({sampling.top_p}) must be in (0, 1]; 1 keeps all tokens")
    if sampling.max_tokens < 1:
        raise ConfigError(f"max_tokens ({sampling.max_tokens}) must be >= 1")
    for name in ("frequency_penalty", "presence_penalty"):
        if not -2 <= getattr(sampling, name) <= 2:
            raise ConfigError(f"{name} ({getattr(sampling, name)}) must be in [-2, 2]; 0 changes nothing")


def generate_body(
    prompt_ids: Sequence[int], sampling: SamplingParams, seed: int | None, top_k: int, fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Of `/inference/v1/generate`. `top_k` alternatives a token; 1 is the sampled token alone."""
    params = {**sampling.to_openai_kwargs(), "logprobs": 0 if top_k == 1 else top_k}
    if seed is not None:
        params["seed"] = seed
    own = dict(fields)
    if "vllm_xargs" in own:
        own["extra_args"] = own.pop("vllm_xargs")
    return {"token_ids": list(prompt_ids), "sampling_params": {**params, **own}, "return_token_ids": True}


def completions_body(
    prompt_ids: Sequence[int], sampling: SamplingParams, seed: int | None, top_k: int, fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Of `/v1/completions`, the same request."""
    body = {"prompt": [list(prompt_ids)], **sampling.to_openai_kwargs(), "logprobs": 0 if top_k == 1 else top_k}
    if seed is not None:
        body["seed"] = seed
    return {**body, "return_token_ids": True, **fields}
