"""Client tags: several clients of one server each send a tag, and check that responses carry it.

The tag is sent as the JSON field `client_tag` and the header `X-VLLM-Client-Tag`. vLLM drops both.
A server that several clients share through a proxy must be started with
`ludic.inference.vllm.in_server.client_tag_middleware.ClientTagMiddleware` (`ludic serve
--client-tags`), which echoes them. A response without a tag is an error under `require_echo`, and
is accepted under `lenient`.

Client settings for a server that the ranks of a run share, from a launcher's environment
variables.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ludic.errors import ClientTagError, ConfigError, check_value
from ludic.inference.servers.prompt_clipping import prompt_limit
from ludic.inference.vllm.in_server.client_tag_middleware import FIELD, HEADER, OUTER_LISTS

TagPolicy = Literal["require_echo", "lenient"]
METADATA_KEYS = ("metadata", "meta", "context", "extra", "request")
"""Keys of an object that are searched for its tag, after its top level."""
MAX_DEPTH = 5
"""Levels of nesting that are searched for a tag."""
MAX_ELEMENTS = 8
"""Elements of a list that are searched for a tag."""


def resolve_client_tag(client_tag: str | None = None, environment: Mapping[str, str] = os.environ) -> str | None:
    """`client_tag`, else `VLLM_CLIENT_TAG`, else `rank-I-of-N` from a launcher's variables
    (`rank-I` if N is unknown), else None."""
    for tag in (client_tag, environment.get("VLLM_CLIENT_TAG")):
        if tag is not None and tag.strip():
            return tag.strip()
    rank = _first_value(environment, "RANK", "LOCAL_RANK", "SLURM_PROCID")
    if rank is None:
        return None
    size = _first_value(environment, "WORLD_SIZE", "SLURM_NTASKS")
    return f"rank-{rank}" if size is None else f"rank-{rank}-of-{size}"


def find_tag(value: object, depth: int = MAX_DEPTH) -> str | None:
    """The first tag in a response: `client_tag` of an object, else one in its metadata."""
    if depth < 0:
        return None
    if isinstance(value, list):
        return next((tag for tag in (find_tag(element, depth - 1) for element in value[:MAX_ELEMENTS]) if tag), None)
    if not isinstance(value, Mapping):
        return None
    own = value.get(FIELD)
    if isinstance(own, str) and own.strip():
        return own.strip()
    return next((tag for tag in (find_tag(value.get(key), depth - 1) for key in METADATA_KEYS) if tag), None)


@dataclass
class TagCounts:
    """Counts since the client was made."""

    filtered: int = 0
    """Groups and outputs dropped because they have another client's tag."""
    untagged: int = 0
    """Responses without any tag, accepted under `lenient`."""
    errors: int = 0


@dataclass
class ClientTag:
    """A client's tag, and the policy for responses without one."""

    tag: str
    policy: TagPolicy = "lenient"
    counts: TagCounts = field(default_factory=TagCounts)

    def __post_init__(self) -> None:
        check_value("client_tag_policy", self.policy, choices=("require_echo", "lenient"))
        if not self.tag.strip() or not self.tag.isprintable() or not self.tag.isascii():
            raise ConfigError(f"client_tag ({self.tag!r}) must be printable ASCII, because it is sent in a header")

    def headers(self) -> dict[str, str]:
        return {HEADER: self.tag}

    def filter(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Drop the groups and choices of other clients. Raises ClientTagError if nothing is left,
        or if a required tag is missing."""
        filtered = dict(payload)
        lists = [name for name in OUTER_LISTS if isinstance(payload.get(name), list)]
        root = find_tag(payload)
        if root is not None and root != self.tag and not lists:
            raise self._error(f"the response has the client_tag {root!r} and not {self.tag!r}")
        seen = root is not None
        for name in lists:
            groups, tagged = self._own_groups(payload[name], root)
            seen = seen or tagged
            if payload[name] and not groups:
                raise self._error(f"all {len(payload[name])} {name} have another client_tag than {self.tag!r}")
            filtered[name] = groups
        if not seen:
            if self.policy == "require_echo":
                raise self._error(
                    "the response has no client_tag; start the server with `ludic serve --client-tags`, "
                    "or set client_tag_policy='lenient' if no other client uses it"
                )
            self.counts.untagged += 1
        return filtered

    def _own_groups(self, groups: list[Any], root: str | None) -> tuple[list[Any], bool]:
        """(own groups, whether there was any tag). A group without a tag gets the tag of the whole
        response."""
        own, seen = [], False
        for group in groups:
            outputs = group.get("outputs") if isinstance(group, Mapping) else None
            tag = find_tag(group)
            seen = seen or tag is not None
            if (tag or root or self.tag) != self.tag:
                self.counts.filtered += 1
                continue
            if isinstance(outputs, list) and outputs:
                own_outputs, tagged = self._own_groups(outputs, tag)
                seen = seen or tagged
                if not own_outputs:
                    continue
                group = {**group, "outputs": own_outputs}
            own.append(group)
        return own, seen

    def _error(self, message: str) -> ClientTagError:
        self.counts.errors += 1
        return ClientTagError(message)


def _first_value(env: Mapping[str, str], *names: str) -> str | None:
    return next((env[name] for name in names if env.get(name, "").strip()), None)


def shared_server_settings(
    environment: Mapping[str, str] = os.environ, *, client_tag: str | None = None, max_prompt_tokens: int | None = None
) -> dict[str, Any]:
    """Keywords of `VLLMChatClient`, except its address.

    The tag is `client_tag`, else `VLLM_CLIENT_TAG`, else the rank; its echo is required with more
    than one rank. Prompts are cut to `MAX_PROMPT_CHARS` (2048; 0 sets no limit). Also read:
    `VLLM_API_KEY`, `VLLM_EXTRA_HEADERS` (a JSON object), `VLLM_TIMEOUT` (120 s), `VLLM_MAX_RETRIES`
    (3), `VLLM_BACKOFF` (1 s) and `VLLM_BACKOFF_MULTIPLIER` (2).

    Example: `VLLMChatClient(urls=[url], **shared_server_settings())`.
    """
    tag = resolve_client_tag(client_tag, environment)
    ranks = max(_number(environment, name, int, 1) for name in ("WORLD_SIZE", "SLURM_NTASKS"))
    return {
        "client_tag": tag,
        "client_tag_policy": "require_echo" if tag is not None and ranks > 1 else "lenient",
        "max_prompt_chars": prompt_limit(max_prompt_tokens=max_prompt_tokens, environment=environment) or 0,
        "api_key": environment.get("VLLM_API_KEY") or "local",
        "extra_headers": _headers(environment),
        "timeout_s": _number(environment, "VLLM_TIMEOUT", float, 120.0),
        "max_retries": _number(environment, "VLLM_MAX_RETRIES", int, 3),
        "backoff_s": _number(environment, "VLLM_BACKOFF", float, 1.0),
        "backoff_growth": _number(environment, "VLLM_BACKOFF_MULTIPLIER", float, 2.0),
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
        raise ConfigError('VLLM_EXTRA_HEADERS (not shown) must be a JSON object of strings, such as {"X-Team": "rl"}')
    return headers
