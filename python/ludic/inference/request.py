"""Requests to a model: messages, sampling parameters, what to return, tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ludic.errors import ConfigError
from ludic.inference.extensions.vllm import BackendExtensions
from ludic.inference.sampling import SamplingParams
from ludic.list_fields import stored
from ludic.types import ChatResponse, Message, TokenTrace


@dataclass(frozen=True)
class ReturnSpec:
    """What a completion returns in addition to the text."""

    return_token_ids: bool = False
    return_chosen_logprobs: bool = False
    """The log-probability of every sampled token."""
    top_logprobs_k: int = 1
    """Alternatives for each token, if the server offers them."""

    def __post_init__(self) -> None:
        if self.top_logprobs_k <= 0:
            raise ConfigError(f"top_logprobs_k ({self.top_logprobs_k}) must be >= 1")

    @classmethod
    def for_eval(cls, *, return_token_ids: bool = True) -> ReturnSpec:
        """No log-probabilities."""
        return cls(return_token_ids=return_token_ids, return_chosen_logprobs=False)

    @classmethod
    def for_rl(cls, *, top_logprobs_k: int = 1) -> ReturnSpec:
        """Token ids and their log-probabilities, as training needs them."""
        return cls(return_token_ids=True, return_chosen_logprobs=True, top_logprobs_k=top_logprobs_k)

    def make_response(self, text: str, trace: TokenTrace) -> ChatResponse:
        """The response with this text and the requested parts of the trace."""
        return ChatResponse(
            text=text,
            completion_token_ids=stored(trace, "completion_token_ids") if self.return_token_ids else None,
            completion_logprobs=stored(trace, "completion_logprobs") if self.return_chosen_logprobs else None,
            finish_reason=trace.finish_reason,
            prompt_token_ids=stored(trace, "prompt_token_ids") if self.return_token_ids else None,
        )


@dataclass(frozen=True)
class ToolRequest:
    """Tools that the model may call, as OpenAI function schemas."""

    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any] | None = "auto"


@dataclass(frozen=True)
class InferenceSpec:
    """How the model is called for a rollout."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    return_: ReturnSpec = field(default_factory=ReturnSpec)
    extensions: BackendExtensions | None = None


@dataclass(frozen=True)
class ChatCompletionRequest:
    """One model call."""

    model: str
    messages: list[Message]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    return_: ReturnSpec = field(default_factory=ReturnSpec)
    seed: int | None = None
    tools: ToolRequest | None = None
    extensions: BackendExtensions | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, such as `enable_thinking`."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def chat_fields(request: ChatCompletionRequest) -> dict[str, Any]:
    """Model, messages, sampling, seed and tools. The fields that request log-probabilities and
    token ids differ by kind of server and are not included."""
    fields: dict[str, Any] = {"model": request.model, "messages": request.messages, **request.sampling.to_openai_kwargs()}
    if request.seed is not None:
        fields["seed"] = request.seed
    if request.tools is not None:
        fields["tools"] = request.tools.tools
        if request.tools.tool_choice is not None:
            fields["tool_choice"] = request.tools.tool_choice
    extra = request.sampling.server_fields()
    if request.chat_template_kwargs:
        extra = {**extra, "chat_template_kwargs": dict(request.chat_template_kwargs)}
    if extra:
        fields["extra_body"] = extra
    return fields


def request_body(arguments: dict[str, Any]) -> dict[str, Any]:
    """The JSON body for keywords of `chat.completions.create`; `extra_body` overrides the rest."""
    body = {name: value for name, value in arguments.items() if name not in ("extra_body", "extra_headers")}
    return {**body, **arguments.get("extra_body", {})}
