"""Client settings for a server that the ranks of a run share, from a launcher's environment
variables."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from ludic.errors import ConfigError
from ludic.inference.servers.client_tags import resolve_client_tag
from ludic.inference.servers.prompt_clipping import prompt_limit

SIZES = ("WORLD_SIZE", "SLURM_NTASKS")


def shared_server_settings(
    environment: Mapping[str, str] | None = None, *, client_tag: str | None = None, max_prompt_tokens: int | None = None
) -> dict[str, Any]:
    """Keywords of `VLLMChatClient`, except its address.

    The tag is `client_tag`, else `VLLM_CLIENT_TAG`, else the rank; its echo is required with more
    than one rank. Prompts are cut to `MAX_PROMPT_CHARS` (2048; 0 sets no limit). Also read:
    `VLLM_API_KEY`, `VLLM_EXTRA_HEADERS` (a JSON object), `VLLM_TIMEOUT` (120 s), `VLLM_MAX_RETRIES`
    (3), `VLLM_BACKOFF` (1 s) and `VLLM_BACKOFF_MULTIPLIER` (2).

    Example: `VLLMChatClient(urls=[url], **shared_server_settings())`.
    """
    env = os.environ if environment is None else environment
    tag = resolve_client_tag(client_tag, env)
    ranks = max((_number(env, name, int, 1) for name in SIZES), default=1)
    return {
        "client_tag": tag,
        "client_tag_policy": "require_echo" if tag is not None and ranks > 1 else "lenient",
        "max_prompt_chars": prompt_limit(max_prompt_tokens=max_prompt_tokens, environment=env) or 0,
        "api_key": env.get("VLLM_API_KEY") or "local",
        "extra_headers": _headers(env),
        "timeout_s": _number(env, "VLLM_TIMEOUT", float, 120.0),
        "max_retries": _number(env, "VLLM_MAX_RETRIES", int, 3),
        "backoff_s": _number(env, "VLLM_BACKOFF", float, 1.0),
        "backoff_growth": _number(env, "VLLM_BACKOFF_MULTIPLIER", float, 2.0),
    }


def _number(env: Mapping[str, str], name: str, kind: Callable[[str], Any], default: Any) -> Any:
    text = env.get(name, "").strip()
    try:
        return kind(text) if text else default
    except ValueError:
        raise ConfigError(f"{name} ({text!r}) must be a number; unset it for {default}") from None


def _headers(env: Mapping[str, str]) -> dict[str, str]:
    text = env.get("VLLM_EXTRA_HEADERS", "").strip()
    try:
        headers = json.loads(text or "{}")
    except ValueError:
        headers = None
    if not isinstance(headers, dict) or not all(isinstance(value, str) for value in headers.values()):
        raise ConfigError(
            'VLLM_EXTRA_HEADERS must be a JSON object of strings, such as {"X-Team": "rl"}; its value, which may be a key, is not shown'
        )
    return headers
