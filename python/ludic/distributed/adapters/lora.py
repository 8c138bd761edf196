"""Publishes adapters as adapters: megabytes instead of the whole model, each version under a name
of its own, such as `policy@17`.

A request that is running goes on with the adapter that it began with. Names that are never used
twice leave nothing stale in a prefix cache.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ludic.distributed.push.fan_out import failed_servers, on_each
from ludic.distributed.push.folder import CheckpointFolder
from ludic.distributed.push.target import push_target
from ludic.distributed.unchanged import UnchangedWeights
from ludic.errors import ConfigError, PublishError
from ludic.inference.publishing import Publisher, Version
from ludic.inference.vllm.endpoints import VllmEndpoints

if TYPE_CHECKING:
    from torch import Tensor, nn

logger = logging.getLogger(__name__)


class LoraPublisher(Publisher):
    """Publishes the adapters of a model to vLLM servers that see the same folder."""

    def __init__(
        self,
        client: Any,
        model: nn.Module,
        *,
        directory: str | Path,
        name: str = "policy",
        keep: int = 2,
        timeout_s: float = 60.0,
        allow_unchanged: bool = False,
    ) -> None:
        """`keep` versions stay loaded, so that requests which began with an older one can end.
        `name` is what requests ask for."""
        if keep < 1:
            raise ConfigError(f"keep ({keep}) must be >= 1; the version that is served stays")
        self.target = push_target(client)
        self.servers = [VllmEndpoints(url, headers=self.target.request_headers) for url in self.target.server_urls]
        self.model, self.name, self.timeout_s = model, name, timeout_s
        self._unchanged = UnchangedWeights("adapters", allowed=allow_unchanged)
        self._folders = CheckpointFolder(directory, keep=keep)
        self._folder: Path | None = None
        """Of the newest version."""
        self._keep = keep
        self._loaded: list[str] = []
        self._knows_servers = False
        """The servers have of this name what is in `_loaded`: not before the first push, and not
        after a fault."""

    def expect_change(self, expected: bool) -> None:
        self._unchanged.change_expected = expected

    @property
    def served_name(self) -> str | None:
        """The `model` of requests for the newest version; None before the first."""
        return self._loaded[-1] if self._loaded else None

    def publish(self, state_dict: Mapping[str, Tensor], version: Version = None) -> None:
        """Load the model's adapters as `<name>@<version>` on all servers, or on none. They are
        taken from the model: in `state_dict` they are merged. Adapters that did not change are
        served on under the name that they have."""
        from ludic.inference.vllm.in_server.weight_fingerprint import fingerprint
        from ludic.models.lora import adapter_weights

        if version is None:
            raise ConfigError("an adapter needs a version to be named by; publish(weights, version=...)")
        self._unchanged.publish(
            fingerprint(adapter_weights(self.model)),
            version,
            push=lambda: self._replace(version),
            rename=lambda: None,  # the adapter keeps its name
            still_served=self._is_served,
        )
        on_each(self.servers, lambda server: server.set_weight_version(str(version)))
        self.target.adapter_changed(self.name, self._loaded[-1])
        self.target.weights_changed(version)
        self._unload_old()
        if self._folder is not None:
            self._folders.prune(self._folder)

    def _is_served(self) -> bool:
        """Whether no server has lost the newest version, as one that was restarted has."""
        lists: list[list[str]] = []
        failures = on_each(self.servers, lambda server: lists.append(server.models()))
        return not failures and all(self.served_name in names for names in lists)

    def _replace(self, version: str | int) -> None:
        """Write this version, and load it everywhere."""
        from ludic.models.lora import save_adapter

        folder = self._folders.fill(version, lambda aside: save_adapter(self.model, aside))
        self._load(f"{self.name}@{version}", str(folder))
        self._folder = folder

    def _load(self, name: str, folder: str) -> None:
        if name in self._loaded:  # the same version again, after a resume
            self._unload(name)
        known, self._knows_servers = self._knows_servers, False
        failures = on_each(self.servers, lambda server: self._load_at(server, name, folder, known=known))
        self._knows_servers = not failures
        if failures:
            on_each([server for server in self.servers if server not in failures], lambda server: server.unload_adapter(name))
            raise PublishError(
                f"adapter {name} was not published, and every server goes on with {self.served_name or 'the model'}: "
                f"{failed_servers(failures)}"
            ) from next(iter(failures.values()))
        self._loaded.append(name)

    def _load_at(self, server: VllmEndpoints, name: str, folder: str, *, known: bool) -> None:
        if not known and name in server.models():  # of the run that is resumed, or of a load whose answer was lost
            server.unload_adapter(name)
        server.load_adapter(name, folder, timeout_s=self.timeout_s)

    def _unload_old(self) -> None:
        while len(self._loaded) > self._keep:
            self._unload(self._loaded[0])

    def _unload(self, name: str) -> None:
        self._loaded.remove(name)
        failures = on_each(self.servers, lambda server: server.unload_adapter(name))
        if failures:  # a server that was restarted has none
            self._knows_servers = False
            logger.warning("adapter %s was not unloaded everywhere: %s", name, failed_servers(failures))


def create_lora_publisher(
    client: Any, model: nn.Module, *, directory: str | Path, name: str = "policy", keep: int = 2, **options: Any
) -> LoraPublisher:
    """A publisher of the adapters of `model` to the servers of a client.

    directory: where adapters are written, in PEFT's layout; the servers must see it under the same
    path. name: what requests give as `model`; a client with `served_names` sends them to the newest
    version.
    """
    return LoraPublisher(client, model, directory=directory, name=name, keep=keep, **options)
