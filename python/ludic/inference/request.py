"""Requests to a model: messages, sampling parameters, returned values, tools, and the seeds of
model calls.

Seeds are derived from the seed of an episode: for each step, each agent, and each model call within
a step. They are outputs of SplitMix64 (Steele et al. 2014), reduced to the 31 bits that every
server accepts. From None, all derived seeds are None.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ludic.errors import ConfigError, check_value
from ludic.inference.extensions.vllm import BackendExtensions
from ludic.types import ChatResponse, Message, TokenTrace, stored


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings in OpenAI's terms. Raises ConfigError for a value outside its range."""

    temperature: float = 0.7
    """0 takes the most likely token."""
    max_tokens: int = 256
    """Maximum number of sampled tokens, including the end token."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probability reaches this; 1 keeps all."""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    stop: str | list[str] | None = None
    """Text that ends the completion; several texts in a list. An empty text or list ends none."""
    top_k: int = 0
    """Sample from this number of the most likely tokens; 0 keeps all."""
    min_p: float = 0.0
    """Sample from the tokens that are at least this many times as likely as the likeliest."""
    repetition_penalty: float = 1.0
    """Positive logits of tokens of the prompt and the answer are divided by it, negative ones
    multiplied (Keskar et al. 2019)."""

    def __post_init__(self) -> None:
        check_value("temperature", self.temperature, "0 takes the most likely token", least=0, below=math.inf)
        check_value("top_p", self.top_p, "1 keeps all tokens", above=0, most=1)
        check_value("max_tokens", self.max_tokens, least=1)
        check_value("top_k", self.top_k, "0 keeps all tokens", least=0)
        check_value("min_p", self.min_p, "0 keeps all tokens", least=0, most=1)
        check_value("repetition_penalty", self.repetition_penalty, "1 changes nothing", above=0, below=math.inf)
        for name in ("frequency_penalty", "presence_penalty"):
            check_value(name, getattr(self, name), "0 changes nothing", least=-2, most=2)
        texts = self.stop_texts
        if not isinstance(texts, Sequence) or not all(isinstance(text, str) and text for text in texts):
            raise ConfigError(f"stop ({self.stop!r}) must be a text, or a list of texts, none empty, or null for the end token")

    @property
    def stop_texts(self) -> list[str]:
        """`stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) and self.stop else self.stop or []

    @property
    def is_cut(self) -> bool:
        """Whether tokens come from another distribution than softmax(logits / temperature)."""
        return self.top_p < 1 or bool(self.server_fields())

    def server_fields(self) -> dict[str, Any]:
        """Fields of vLLM and SGLang that OpenAI has not, without those that change nothing."""
        fields = {"top_k": (self.top_k, 0), "min_p": (self.min_p, 0.0), "repetition_penalty": (self.repetition_penalty, 1.0)}
        return {name: value for name, (value, off) in fields.items() if value != off}

    def to_openai_kwargs(self) -> dict[str, Any]:
        """Keywords of an OpenAI chat completion."""
        kwargs: dict[str, Any] = {
            "temperature": float(self.temperature),
            "max_tokens": int(self.max_tokens),
            "top_p": float(self.top_p),
            "frequency_penalty": float(self.frequency_penalty),
            "presence_penalty": float(self.presence_penalty),
        }
        if self.stop:
            kwargs["stop"] = self.stop
        return kwargs


SamplingConfig = SamplingParams


def make_sampling(section: object, **changes: Any) -> SamplingParams:
    """The sampling of a section of settings, whose fields have the same names, with `changes`."""
    given = {item.name: getattr(section, item.name) for item in fields(SamplingParams) if hasattr(section, item.name)}
    return SamplingParams(**{**given, **changes})


GAMMA = 0x9E3779B97F4A7C15
"""The increment of SplitMix64."""


def derive_seed(seed: int | None, index: int) -> int | None:
    """The seed of a step, or of another part with this index: `seed` itself for index 0, a derived
    one for any other."""
    if seed is None or index == 0:
        return seed
    return _mix(seed + index * GAMMA)


def call_seed(seed: int | None, call: int) -> int | None:
    """The seed of a model call within a step: the step's own seed for call 0, a derived one for any
    other. Indices of calls are negative, so that the calls of step 0 do not get the seeds of later
    steps."""
    return derive_seed(seed, -call)


def agent_seed(seed: int | None, agent_id: str, step: int) -> int | None:
    """The seed of one agent's step. It depends on the agent's id, not on the other agents."""
    if seed is None:
        return None
    name = int.from_bytes(hashlib.blake2b(agent_id.encode(), digest_size=8).digest(), "little")
    return _mix(seed + name + step * GAMMA)


def _mix(number: int) -> int:
    """The output function of SplitMix64, modulo 2**31."""
    mixed = number % 2**64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
    return (mixed ^ (mixed >> 31)) % 2**31


@dataclass(frozen=True)
class ReturnSpec:
    """What a completion returns in addition to the text."""

    return_token_ids: bool = False
    return_chosen_logprobs: bool = False
    """The log-probability of every sampled token."""
    top_logprobs_k: int = 1
    """Alternatives for each token, if the server offers them."""

    def __post_init__(self) -> None:
        check_value("top_logprobs_k", self.top_logprobs_k, least=1)

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
            candidates=trace.candidates if self.return_chosen_logprobs else None,
            images=trace.images if self.return_token_ids else (),
            routes=trace.routes if self.return_chosen_logprobs else None,
        )


@dataclass(frozen=True)
class ToolRequest:
    """Tools that the model may call, as OpenAI function schemas."""

    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any] | None = "auto"
    keep_malformed: bool = False
    """A text between the tags of a call that is no call becomes a call with an `error`, where the
    client reads calls itself. Servers that read them make it the content of the message."""


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


def refuse_extensions(request: ChatCompletionRequest, client: object) -> None:
    """Raise ConfigError for a request with extensions, for a client that has none."""
    if request.extensions is not None:
        raise ConfigError(
            f"unsupported request.extensions: {type(request.extensions).__name__}; {type(client).__name__} has none"
        )


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
