"""Builds those parts of chat completion requests that all servers with OpenAI's interface share."""

from __future__ import annotations

from typing import Any

from ludic.inference.request import ChatCompletionRequest


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
