"""How a client makes the publisher for its own servers: the one import that goes up from
`ludic.inference` to `ludic.distributed`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ludic.inference.publishing import Publisher, PushTarget


def make_publisher(
    servers: PushTarget | Sequence[str], *, timeout_s: float, settings: Mapping[str, Any], **more: Any
) -> Publisher:
    """A publisher to these servers, made by `ludic.distributed.create_vllm_publisher`.

    `settings` are the user's keywords and win over the defaults. The caller of `sync_weights`
    decides when to push, so weights that did not change are pushed too.
    """
    from ludic.distributed.adapters.vllm import create_vllm_publisher

    return create_vllm_publisher(servers, **more, **{"timeout_s": timeout_s, "allow_unchanged": True, **settings})
