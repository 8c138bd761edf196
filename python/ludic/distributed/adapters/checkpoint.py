"""Publishes through folders: each version is written completely, then read by the servers, which
must see the same folder.

    client = SGLangClient("http://127.0.0.1:30000", tokenizer=tokenizer)
    publisher = create_checkpoint_publisher(client, "/shared/policy", model="/shared/base-model")

For vLLM use `create_vllm_publisher(client, directory=...)`, with all its checks. Engines that load
a folder which exists already are in `ludic.distributed.engines`.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from ludic.distributed.adapters.vllm import create_vllm_publisher
from ludic.distributed.engines import (
    SGLangEngine as SGLangEngine,
    VLLMEngine as VLLMEngine,
    sync_weights_to_engines as sync_weights_to_engines,
)
from ludic.distributed.publisher import UnchangedWeights
from ludic.distributed.push.manifest import ServerManifest, VersionFolders, cast_to_server, rename_to_checkpoint
from ludic.distributed.push.target import describe_failures, list_urls, make_publish_error, run_on_all
from ludic.errors import ConfigError, PublishError, check_value
from ludic.inference.client import Publisher, Version, Weights
from ludic.inference.sglang import SGLangClient, SGLangEndpoints

logger = logging.getLogger(__name__)


class SGLangPublisher(Publisher):
    """Writes each version into a folder together with the model's config, and has all servers read
    it. If one fails, all return to the previous version."""

    def __init__(
        self,
        client: SGLangClient,
        directory: str | Path,
        *,
        model: str | Path,
        keep: int = 2,
        timeout_s: float = 300.0,
        allow_unchanged: bool = False,
        partial: bool = False,
    ) -> None:
        """`model` is the folder that the servers were started with. Its config, tokenizer, names
        and shapes are used. `partial`: weights that a push leaves out are `model`'s."""
        check_value("keep", keep, "after a failed push, servers return to the previous version", least=2)
        self.client, self.servers = client, client.endpoints()
        self.timeout_s = timeout_s
        self._unchanged = UnchangedWeights("weights", allowed=allow_unchanged)
        self._folders = VersionFolders(directory, keep=keep, model=model)
        self._manifest, self._model, self._partial = _read_manifest(Path(model)), Path(model), partial
        self._served: tuple[Path, str | None] = (Path(model).resolve(), None)

    def expect_change(self, expected: bool) -> None:
        self._unchanged.change_expected = expected

    def publish(self, state_dict: Weights, version: Version = None) -> None:
        from ludic.inference.vllm.in_server.weight_fingerprint import fingerprint
        from ludic.inference.vllm.in_server.weight_receiver import Checkpoint

        if version is None:
            raise ConfigError("a checkpoint needs a version, which names its folder; call publish(weights, version=...)")
        weights = cast_to_server(rename_to_checkpoint(state_dict), self._manifest, partial=self._partial)

        def push() -> None:
            frozen = Checkpoint(self._model).read(sorted(self._manifest.weights.keys() - weights.keys()))
            folder = self._folders.write({**dict(frozen), **weights}, version)
            self._load_on_all(folder, str(version))
            self._served = folder, str(version)
            self._folders.prune(folder)

        self._unchanged.publish(
            fingerprint(weights),
            version,
            dtype=self._manifest.dtype,
            push=push,
            rename=lambda: self._rename(str(version)),
            still_served=self._is_served,
        )
        self.client.weights_changed(version)

    def _is_served(self) -> bool:
        """Whether every server still reports the version that it loaded last, so that none was
        restarted."""
        versions: list[str] = []
        failures = run_on_all(self.servers, lambda server: versions.append(server.weight_version()))
        return not failures and set(versions) == {self._served[1]}

    def _rename(self, version: str) -> None:
        """Change the version of the weights that are served."""
        failures = run_on_all(self.servers, lambda server: server.set_weight_version(version))
        if failures:
            raise make_publish_error(f"version {version} was not published: {describe_failures(failures)}", failures.values())
        self._served = self._served[0], version

    def _load_on_all(self, folder: Path, version: str) -> None:
        """Have all servers load the folder. If one fails, all load the previous version again, and
        PublishError is raised."""
        failures = run_on_all(self.servers, lambda server: self._load(server, folder, version))
        if not failures:
            return
        old_folder, old = self._served
        lost = run_on_all(self.servers, lambda server: self._load(server, old_folder, old))
        self.client.weights_changed(old, lost=[server.url for server in lost])
        state = f"servers are back at {old or 'default'} ({describe_failures(failures)})"
        state += f"; these could not return to version {old or 'default'}, restart them: {list_urls(lost)}" if lost else ""
        raise make_publish_error(f"version {version} was not published, {state}", failures.values())

    def _load(self, server: SGLangEndpoints, folder: Path, version: str | None) -> None:
        server.pause(timeout_s=self.timeout_s)
        try:
            server.update_weights_from_disk(str(folder), version or "default", timeout_s=self.timeout_s)
        finally:
            server.resume(timeout_s=self.timeout_s)
        served = server.weight_version()
        if served != (version or "default"):
            raise PublishError(f"{server.url} reports version {served} after it loaded {folder.name}")


def _read_manifest(model: Path) -> ServerManifest:
    """Names, shapes and dtypes of the weights in a folder."""
    import json

    from ludic.inference.vllm.in_server.weight_receiver import Checkpoint

    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    weights = Checkpoint(model).weights
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    answer = {"dtype": dtype, "tied": config.get("tie_word_embeddings", False), "weights": weights, "config": config}
    return ServerManifest.from_answer(answer, str(model))


def create_checkpoint_publisher(
    client: Any, directory: str | Path, *, model: str | Path | None = None, **options: Any
) -> Publisher:
    """A publisher that passes weights through folders in `directory`, which the servers see under
    the same path.

    client: an `SGLangClient`, or anything that `create_vllm_publisher` takes.
    model: for SGLang, the folder of the model that the servers were started with.
    options: keywords of `SGLangPublisher` or of `create_vllm_publisher`.
    """
    if not isinstance(client, SGLangClient):
        return create_vllm_publisher(client, directory=directory, **options)
    if model is None:
        raise ConfigError("SGLang reads config and tokenizer with the weights; pass model=, the folder of the servers")
    publisher = SGLangPublisher(client, directory, model=model, **options)
    client.connect_publisher(publisher)
    return publisher
