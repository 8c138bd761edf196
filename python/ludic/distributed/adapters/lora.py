"""Publishes LoRA adapters without the model, so that a push takes megabytes. Each version has its
own name, such as `policy@17`.

A running request keeps the adapter that it began with. No name is used twice, so prefix caches hold
nothing stale.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ludic.distributed.publisher import UnchangedWeights
from ludic.distributed.push.manifest import VersionFolders
from ludic.distributed.push.target import as_push_target, describe_failures, make_publish_error, run_on_all
from ludic.errors import ConfigError
from ludic.inference.client import Publisher, Version, Weights
from ludic.inference.vllm.endpoints import VllmEndpoints

if TYPE_CHECKING:
    from torch import nn

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
        """`keep` versions stay loaded, so that requests that began with an older one can finish.
        `name` is the value of `model` in requests."""
        from ludic.models.sharding import is_sharded

        if is_sharded(model):
            raise ConfigError("rank 0 lacks adapters of a sharded model; publish merged weights (create_vllm_publisher)")
        self.target = as_push_target(client)
        self.servers = [VllmEndpoints(url, headers=self.target.request_headers) for url in self.target.all_urls()]
        self.model, self.name, self.timeout_s = model, name, timeout_s
        self._unchanged = UnchangedWeights("adapters", allowed=allow_unchanged)
        self._folders = VersionFolders(directory, keep=keep)
        self._folder: Path | None = None
        """The folder of the newest version."""
        self._keep = keep
        self._loaded: list[str] = []
        self._in_sync = False
        """Whether the servers have exactly the versions in `_loaded`. False before the first push
        and after a failure."""

    def expect_change(self, expected: bool) -> None:
        self._unchanged.change_expected = expected

    @property
    def served_name(self) -> str | None:
        """The name of the newest version at the servers. None before the first push."""
        return self._loaded[-1] if self._loaded else None

    def publish(self, state_dict: Weights, version: Version = None) -> None:
        """Load the model's adapters as `<name>@<version>` on all servers or on none. They are read
        from the model, because `state_dict` has them merged. Adapters that did not change keep
        their name."""
        from ludic.inference.vllm.in_server.weight_fingerprint import fingerprint
        from ludic.models.lora import collect_adapter_weights

        if version is None:
            raise ConfigError("an adapter needs a version, which is part of its name; call publish(weights, version=...)")
        self._unchanged.publish(
            fingerprint(collect_adapter_weights(self.model)),
            version,
            push=lambda: self._push(version),
            rename=lambda: None,  # the adapter keeps its name
            still_served=self._is_served,
        )
        run_on_all(self.servers, lambda server: server.set_weight_version(str(version)))
        self.target.adapter_changed(self.name, self._loaded[-1])
        self.target.weights_changed(version)
        while len(self._loaded) > self._keep:
            self._unload(self._loaded[0])
        if self._folder is not None:
            self._folders.prune(self._folder)

    def _is_served(self) -> bool:
        """Whether all servers have the newest version. One that was restarted has lost it."""
        lists: list[list[str]] = []
        failures = run_on_all(self.servers, lambda server: lists.append(server.models()))
        return not failures and all(self.served_name in names for names in lists)

    def _push(self, version: str | int) -> None:
        """Write this version and load it on all servers."""
        from ludic.models.lora import save_adapter

        folder = self._folders.fill(version, lambda new_folder: save_adapter(self.model, new_folder))
        name = f"{self.name}@{version}"
        if name in self._loaded:  # the same version again, after a resume
            self._unload(name)
        check_first, self._in_sync = not self._in_sync, False

        def load(server: VllmEndpoints) -> None:
            if check_first and name in server.models():  # loaded before a resume, or by a call that timed out
                server.unload_adapter(name)
            server.load_adapter(name, str(folder), timeout_s=self.timeout_s)

        failures = run_on_all(self.servers, load)
        self._in_sync = not failures
        if failures:
            run_on_all([server for server in self.servers if server not in failures], lambda server: server.unload_adapter(name))
            kept = f"servers keep {self.served_name or 'the model'}: {describe_failures(failures)}"
            raise make_publish_error(f"adapter {name} was not published, {kept}", failures.values())
        self._loaded.append(name)
        self._folder = folder

    def _unload(self, name: str) -> None:
        self._loaded.remove(name)
        failures = run_on_all(self.servers, lambda server: server.unload_adapter(name))
        if failures:  # such as a server that was restarted, which has no adapter
            self._in_sync = False
            logger.warning("adapter %s was not unloaded on all servers: %s", name, describe_failures(failures))


def create_lora_publisher(
    client: Any, model: nn.Module, *, directory: str | Path, name: str = "policy", keep: int = 2, **options: Any
) -> LoraPublisher:
    """A publisher of the adapters of `model` to the servers of a client.

    directory: where adapters are written, in PEFT's layout. The servers must see it under the same
        path.
    name: the value of `model` in requests. A client with `served_names` directs them to the newest
        version.
    options: keywords of `LoraPublisher`.
    """
    return LoraPublisher(client, model, directory=directory, name=name, keep=keep, **options)
