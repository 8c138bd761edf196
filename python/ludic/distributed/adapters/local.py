"""Publishes to a model in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ludic.inference.client import ChatClient
from ludic.inference.publishing import Publisher, Version

if TYPE_CHECKING:
    from torch import Tensor


class LocalPublisher(Publisher):
    """Passes weights to a client's `sync_weights`. A client that samples from the trainer's own
    model copies nothing."""

    def __init__(self, client: ChatClient, *, timeout_s: float = 600.0) -> None:
        self.client = client
        self.timeout_s = timeout_s

    def publish(self, state_dict: Mapping[str, Tensor], version: Version = None) -> None:
        self.client.sync_weights(state_dict, timeout_s=self.timeout_s, version=version)
