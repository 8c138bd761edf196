"""Makes the publisher with which a client pushes weights to its own servers.

`sync_weights` is a documented method of clients, but publishers are built on clients' endpoints:
this is the only import from `ludic.inference` up to `ludic.distributed`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ludic.inference.publishing import Publisher, PushTarget


def make_publisher(
    servers: PushTarget | Sequence[str], *, timeout_s: float, settings: Mapping[str, Any], **more: Any
) -> Publisher:
    """A publisher to these servers, made by `ludic.distributed.create_vllm_publisher`.

    `settings` are the user's keywords, which override the defaults. Weights that did not change are
    pushed as well, because the caller of `sync_weights` decides when to push.
    """
    from ludic.distributed.adapters.vllm import create_vllm_publisher

    return create_vllm_publisher(servers, **more, **{"timeout_s": timeout_s, "allow_unchanged": True, **settings})
