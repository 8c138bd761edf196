"""Publishes LoRA adapters without the model, so that a push takes megabytes. Each version has its
own name, such as `policy@17`.

A running request keeps the adapter that it began with, and its name says which version that is.
Several runs have adapters at one server, under names of their own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ludic.distributed.adapters.supervised import ServedVersion, ServerLife, SupervisedServers
from ludic.distributed.publisher import UnchangedWeights
from ludic.distributed.push.target import as_push_target, describe_failures, make_publish_error, run_on_all
from ludic.errors import ConfigError, ServerError, check_value
from ludic.inference.client import Publisher, Version, Weights, WeightSource
from ludic.inference.vllm.endpoints import VllmEndpoints
from ludic.inference.vllm.in_server.adapter_uploads import CONFIG

if TYPE_CHECKING:
    from torch import nn


class AdapterVersion(NamedTuple):
    """The adapters of a model at one step."""

    name: str  # such as `policy@17`
    content: bytes  # adapter_model.safetensors, with adapter_config.json in its metadata
    fingerprints: Mapping[str, str]


def pack_adapter(model: nn.Module, weights: Weights, name: str) -> AdapterVersion:
    """The adapters of `model`, which are `weights`, unless these are merged ones; then they are
    read from the model, which must not be sharded."""
    from safetensors.torch import save

    from ludic.inference.vllm.in_server.weight_fingerprint import fingerprint
    from ludic.models.lora import collect_adapter_weights
    from ludic.models.sharding import is_sharded
    from ludic.models.wrappers import unwrap_model

    if not any(".lora_" in name for name in weights):
        if is_sharded(model):
            raise ConfigError("the adapters of a sharded model are gathered by the trainer; pass it as Trainer(publisher=...)")
        weights = collect_adapter_weights(model)
    inner: Any = unwrap_model(model)
    config = json.dumps({**inner.peft_config[inner.active_adapter].to_dict(), "inference_mode": True}, default=sorted)
    on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    return AdapterVersion(name, save(on_host, metadata={"format": "pt", CONFIG: config}), fingerprint(on_host))


class AdapterServer(ServerLife):
    """The adapters of one run at one server."""

    def __init__(self, endpoints: VllmEndpoints, run: str, *, timeout_s: float, keep: int = 2) -> None:
        """`run` is what the names of its adapters begin with. The newest `keep` stay loaded."""
        super().__init__(endpoints.url, endpoints)
        self.endpoints, self._run, self._timeout_s, self._keep = endpoints, run, timeout_s, keep

    def list_loaded(self) -> list[str]:
        """The names of the run's adapters at the server, oldest first."""
        return [name for name in self.endpoints.models() if name.rpartition("@")[0] == self._run]

    def load(self, version: Any) -> None:
        """Load an `AdapterVersion`, in place of one of the same name of an earlier trainer, and
        unload the oldest, with which running requests finish."""
        if version.name in self.list_loaded():
            self.endpoints.unload_adapter(version.name)
        self.endpoints.load_adapter(version.name, version.content, timeout_s=self._timeout_s)
        self.retire(self._keep)

    def retire(self, keep: int) -> None:
        """Unload all but the newest versions."""
        loaded = self.list_loaded()
        for name in loaded[: max(0, len(loaded) - keep)]:
            self.endpoints.unload_adapter(name)

    def has(self, version: ServedVersion) -> bool:
        return self.version is version and version.name in self.list_loaded()

    def close(self) -> None:
        """There is no connection."""


class LoraPublisher(Publisher):
    """Publishes the adapters of a model to vLLM servers, to all or to none."""

    takes_adapters = True

    def __init__(
        self,
        client: Any,
        model: nn.Module,
        *,
        name: str = "policy",
        served_as: str | None = None,
        keep: int = 2,
        timeout_s: float = 60.0,
        allow_unchanged: bool = False,
    ) -> None:
        """`client` as for `create_vllm_publisher`.

        name: the value of `model` in requests, which the client sends to the newest version.
        served_as: what the names at the servers begin with, by default `name`.
        keep: this many versions stay loaded, for requests that name an older one.
        """
        check_value("keep", keep, "after a failed push, the previous version is served", least=2)
        self.target, self.model, self.name, self.run = as_push_target(client), model, name, served_as or name
        links = [VllmEndpoints(url, headers=self.target.request_headers) for url in self.target.all_urls()]
        self.servers = [AdapterServer(link, self.run, timeout_s=timeout_s, keep=keep) for link in links]
        self.served_name: str | None = None
        """The name of the newest version at the servers. None before the first push."""
        self._unchanged = UnchangedWeights("adapters", allowed=allow_unchanged, resent=True)

    def expect_change(self, expected: bool) -> None:
        self._unchanged.change_expected = expected

    def publish(self, state_dict: Weights, version: Version = None) -> None:
        """Load the adapters as `<name>@<version>` on all servers or on none. They are
        `state_dict`'s, as the trainer gives them, or else the model's."""
        if version is None:
            raise ConfigError("an adapter needs a version, which is part of its name; call publish(weights, version=...)")
        new = pack_adapter(self.model, state_dict, f"{self.run}@{version}")

        def push() -> None:
            if failures := self._load_on_all(new):
                kept = f"servers keep {self.served_name or 'the model'}: {describe_failures(failures)}"
                raise make_publish_error(f"adapter {new.name} was not published, {kept}", failures.values())

        self._unchanged.publish(new.fingerprints, version, push=push, rename=push, still_served=lambda: True)
        self.served_name = new.name
        self.target.adapter_changed(self.name, new.name)
        self.target.weights_changed(version)

    def _load_on_all(self, version: AdapterVersion, *, is_trial: bool = False) -> dict[AdapterServer, Exception]:
        failures = run_on_all(self.servers, lambda server: server.load(version))
        if failures or is_trial:
            loaded = [server for server in self.servers if server not in failures]
            run_on_all(loaded, lambda server: server.endpoints.unload_adapter(version.name))
        return failures

    def find_refusal(self) -> str | None:
        """Why a server does not take these adapters; None if none has refused them in a trial."""
        failures = self._load_on_all(pack_adapter(self.model, {}, f"{self.run}@trial"), is_trial=True)
        return describe_failures({server: error for server, error in failures.items() if isinstance(error, ServerError)}) or None

    def close(self) -> None:
        """Take all adapters of the run off the servers, which other runs may use longer."""
        run_on_all(self.servers, lambda server: server.retire(0))


class SupervisedAdapters(SupervisedServers):
    """`SupervisedServers` with adapters. One that was restarted refuses requests for them."""

    takes_adapters = True

    def __init__(self, client: Any, directory: Path, *, model: nn.Module, run: str, **options: Any) -> None:
        """`run` is what the names of the adapters begin with; the rest as for the base class."""
        self._model, self._run = model, run
        super().__init__(client, directory, **options)

    def _make_life(self, url: str) -> ServerLife:
        return AdapterServer(VllmEndpoints(url, headers=self._headers), self._run, timeout_s=self._answer_s)

    def _publish(self, weights: Weights | WeightSource, version: Version) -> None:
        new = pack_adapter(self._model, dict(weights), f"{self._run}@{version}")
        with self._lock:
            self._serve(new, version, new.fingerprints)

    def _tell_client(self, version: Version, lost: list[str]) -> None:
        self._client.adapter_changed(self._client.models()[0], f"{self._run}@{version}")
        super()._tell_client(version, lost)


create_lora_publisher = LoraPublisher
