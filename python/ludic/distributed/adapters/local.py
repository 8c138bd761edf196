"""Publishes to a model in this process."""

from __future__ import annotations

from ludic.inference.client import ChatClient, Publisher, Version, Weights, WeightSource


class LocalPublisher(Publisher):
    """Passes weights to a client's `sync_weights`. A client that samples from the trainer's own
    model copies nothing."""

    def __init__(self, client: ChatClient, *, timeout_s: float = 600.0, shares_model: bool = False) -> None:
        """`shares_model`: the client samples from the trainer's own model, and is only told the
        version; no adapters are merged for it."""
        self.client, self.needs_weights = client, not shares_model
        self.timeout_s = timeout_s

    def publish(self, state_dict: Weights, version: Version = None) -> None:
        self.client.sync_weights(state_dict, timeout_s=self.timeout_s, version=version)

    def publish_stream(self, weights: WeightSource, version: Version = None) -> None:
        """Copy each tensor when it arrives, if the client is a `LocalChatClient`; other clients get
        all of them together."""
        from ludic.inference.local.client import LocalChatClient

        if isinstance(self.client, LocalChatClient):
            self.client.sync_weights_from(weights, timeout_s=self.timeout_s, version=version)
        else:
            self.publish(dict(weights), version)
