"""Calls that pause a vLLM server, give it weights and adapters, and read what it serves.

The server needs VLLM_SERVER_DEV_MODE=1, with which vLLM offers these calls to everybody. Servers
that ludic starts also require their secret, which is sent with each call.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from msgspec import Struct

from ludic.errors import InferenceError, ServerError
from ludic.inference.servers.answers import ModelList, WeightInfo
from ludic.inference.servers.errors import is_missing_endpoint
from ludic.inference.servers.http import ServerCalls
from ludic.inference.vllm.in_server.adapter_uploads import UPLOADS


class _PauseState(Struct):
    is_paused: bool


class _SleepState(Struct):
    is_sleeping: bool


class _WakeState(Struct):
    status: str


class _WorldSize(Struct):
    world_size: int


class _RpcResults(Struct):
    results: list[Any]


class VllmEndpoints(ServerCalls):
    """The control endpoints of one server.

    >>> server = VllmEndpoints("http://127.0.0.1:8000")
    >>> server.weight_version()
    'default'
    """

    hint = "start the server with VLLM_SERVER_DEV_MODE=1, as `ludic serve` does for one that takes weights or adapters"

    def pause(self, mode: str = "keep", *, timeout_s: float | None = None) -> None:
        """Mode `keep` freezes running requests until `resume`; `abort` ends them. New requests
        wait."""
        self.call("post", "/pause", params={"mode": mode}, timeout_s=timeout_s)

    def resume(self, *, timeout_s: float | None = None) -> None:
        self.call("post", "/resume", timeout_s=timeout_s)

    def is_paused(self) -> bool:
        return self.call("get", "/is_paused", answer=_PauseState).is_paused

    def sleep(self, level: int, *, timeout_s: float | None = None) -> None:
        """Abort running requests and free the memory of weights and of keys and values. Level 1
        keeps the weights in host memory, level 2 drops them. New requests wait."""
        self.call("post", "/sleep", params={"level": str(level), "mode": "abort"}, timeout_s=timeout_s)

    def wake_up(self, tag: str, *, timeout_s: float | None = None) -> bool:
        """Take memory for `weights` or for `kv_cache` again. Returns whether the server has both
        and answers requests."""
        return self.call("post", "/wake_up", params={"tags": tag}, timeout_s=timeout_s, answer=_WakeState).status == "awake"

    def is_sleeping(self) -> bool:
        """Whether it lacks some of its memory, or is paused."""
        return self.call("get", "/is_sleeping", answer=_SleepState).is_sleeping

    def world_size(self) -> int:
        """The number of workers that receive weights."""
        return self.call("get", "/get_world_size", answer=_WorldSize).world_size

    def weight_version(self) -> str:
        """The version of the last finished update; `default` before the first."""
        return str(self.call("get", "/weight_info", answer=WeightInfo).weight_version)

    def init_transfer(self, init_info: Mapping[str, Any], *, timeout_s: float) -> None:
        self.call("post", "/init_weight_transfer_engine", json={"init_info": init_info}, timeout_s=timeout_s)

    def start_update(self) -> None:
        self.call("post", "/start_weight_update")

    def update(self, update_info: Mapping[str, Any], *, timeout_s: float) -> None:
        self.call("post", "/update_weights", json={"update_info": update_info}, timeout_s=timeout_s)

    def finish_update(self, version: str | None = None, *, timeout_s: float | None = None) -> None:
        """Load the staged weights as `version`."""
        body = {} if version is None else {"weight_version": version}
        self.call("post", "/finish_weight_update", json=body, timeout_s=timeout_s)

    def reset_prefix_cache(self) -> None:
        """Drop the keys and values of the old weights. For frozen requests they are computed
        again."""
        answer: Any = self.call("post", "/reset_prefix_cache", params={"reset_running_requests": "true"})
        if isinstance(answer, Mapping) and answer.get("success") is False:
            raise InferenceError(f"{self.url} could not reset its prefix cache, which has keys and values of the old weights")

    def reset_encoder_cache(self) -> None:
        """Drop the features that the old weights made of images. Servers of older versions, which
        have no such endpoint, serve no images here."""
        try:
            self.call("post", "/reset_encoder_cache")
        except ServerError as error:
            if not is_missing_endpoint(error):
                raise

    def rpc(self, name: str, *, timeout_s: float | None = None, **kwargs: Any) -> list[Any]:
        """Call a method of every worker. Returns their answers."""
        deadline = self.timeout_s if timeout_s is None else timeout_s
        body = {"method": name, "args": [], "kwargs": kwargs, "timeout": deadline}
        return self.call("post", "/collective_rpc", json=body, timeout_s=deadline, answer=_RpcResults).results

    def models(self) -> list[str]:
        """The names that requests may use as `model`."""
        return [model.id for model in self.call("get", "/v1/models", answer=ModelList).data]

    def model_path(self) -> str | None:
        """The folder, or the name, of the model that the server was started with."""
        return next((model.root for model in self.call("get", "/v1/models", answer=ModelList).data if model.root), None)

    def set_weight_version(self, version: str) -> None:
        """Change the version of the weights that are served."""
        self.call("post", "/update_weight_version", json={"new_version": version})

    def load_adapter(self, name: str, content: bytes, *, timeout_s: float | None = None) -> None:
        """Send the file of an adapter, and load it."""
        try:
            stored = self.call("put", UPLOADS + quote(name), content=content, timeout_s=timeout_s, answer=dict[str, str])
            if stored["digest"] != hashlib.blake2b(content).hexdigest():
                raise InferenceError(f"{self.url} has other bytes of adapter {name} than were sent; publish it again")
            self.call("post", "/v1/load_lora_adapter", json={"lora_name": name, "lora_path": stored["path"]}, timeout_s=timeout_s)
        except ServerError as error:
            raise ServerError(
                f"{error}; start it with `ludic serve --lora-rank N`, for adapters up to rank N", status=error.status
            ) from error

    def unload_adapter(self, name: str) -> None:
        self.call("post", "/v1/unload_lora_adapter", json={"lora_name": name})

    def probe(self, *, timeout_s: float | None = None) -> None:
        """Sample one token: /health answers 200 even if the engine is dead."""
        body = {"model": self.models()[0], "prompt": [1], "max_tokens": 1}
        self.call("post", "/v1/completions", json=body, timeout_s=timeout_s)
