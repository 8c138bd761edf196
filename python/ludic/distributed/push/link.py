"""One trainer's connection to one server: the server's manifest, the group over which tensors
travel, and the steps of a push."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import msgspec

from ludic.distributed.push.fan_out import in_thread
from ludic.distributed.push.manifest import ServerManifest
from ludic.errors import InferenceError, PublishError, PublishTimeoutError, ServerError
from ludic.inference.vllm.endpoints import VllmEndpoints

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)
T = TypeVar("T")

BROADCASTING = ("gloo", "ludic_nccl")
"""Backends over which tensors are broadcast. All can read a folder."""
ANSWER_MARGIN_S = 15.0
"""What a call may take beyond the transfer that it waits for: a server gives up on a transfer
before we give up on the server."""
POLL_S = 0.0005
"""How often a broadcast looks whether the server still takes it."""
NEEDS_EXTENSION = "start it as `ludic serve` does, with --worker-extension-cls ludic.inference.vllm.in_server.worker.WeightWorker"


class WorkerState(TypedDict):
    """What a worker answers to `ludic_state`."""

    boot: str
    """Which life of the server this is."""
    backend: str
    group_id: str | None
    open: bool
    """A push was begun, and neither loaded nor dropped."""
    broken: str | None
    """Why it can take no more."""


class WeightShape(TypedDict):
    shape: list[int]
    dtype: str


class WorkerManifest(TypedDict):
    """To `ludic_manifest`."""

    dtype: str
    tied: bool
    weights: dict[str, WeightShape] | None


class WorkerMarks(TypedDict):
    """To `ludic_fingerprint`."""

    loaded: dict[str, str]
    served: dict[str, str]


class ServerLink:
    """The steps of a push to one server. Each waits at most `timeout_s`; each raises
    InferenceError or PublishError."""

    def __init__(
        self, endpoints: VllmEndpoints, *, master_address: str = "127.0.0.1", timeout_s: float = 60.0, by_folder: bool = False
    ) -> None:
        """`master_address` is where the server's workers reach the trainer. `by_folder`: weights
        are read from a folder, whatever else the server's backend can do."""
        self.endpoints = endpoints
        self.by_folder = by_folder
        self.master_address = master_address
        self.timeout_s = timeout_s
        self.backend = ""
        self.manifest: ServerManifest | None = None
        self.drained = False
        """Taken out of service after a push that could not be completed."""
        self._boot: str | None = None
        self._group: Any = None
        self._group_id: str | None = None
        self._update: Future[None] | None = None
        self._cache_is_fresh = False
        """Nothing in the prefix cache is from before the last pause."""

    @property
    def url(self) -> str:
        return self.endpoints.url

    @property
    def connected(self) -> bool:
        return self._group is not None

    @property
    def _deadline_s(self) -> float:
        return self.timeout_s + ANSWER_MARGIN_S

    def prepare(self) -> ServerManifest:
        """Find the server in a state to take a push: known, connected, and with nothing left of
        an earlier one."""
        states = self._ask("ludic_state", WorkerState)
        if states[0]["boot"] != self._boot:
            if self._boot is not None:
                logger.warning("%s was restarted; connecting again", self.url)
            self._drop_group()
            self.backend, self.drained = states[0]["backend"], False
            if not self.by_folder and self.backend not in BROADCASTING:
                raise PublishError(
                    f"the backend of {self.url} is {self.backend}; pass directory=, a folder that the server sees too"
                )
            self.manifest = ServerManifest.from_answer(self._ask("ludic_manifest", WorkerManifest)[0], self.url)
            self._boot = states[0]["boot"]
        broken = next((state["broken"] for state in states if state["broken"]), None)
        if broken is not None or self.drained:
            raise PublishError(
                f"{self.url} was taken out of service ({broken or 'its last push could not be completed'}); restart it"
            )
        if any(state["open"] for state in states):
            logger.warning("%s holds an unfinished push of a trainer that is gone; dropping it", self.url)
            self.discard()
        if not self.by_folder and (self._group is None or any(state["group_id"] != self._group_id for state in states)):
            self._connect()
        assert self.manifest is not None
        return self.manifest

    def _ask(self, method: str, kind: type[T]) -> list[T]:
        """What every worker says, one of them at least."""
        try:
            answers = self.endpoints.rpc(method, timeout_s=self._deadline_s)
        except ServerError as error:
            if self._boot is None and error.status == 500:
                raise PublishError(f"{error}; {NEEDS_EXTENSION}") from error
            raise
        try:
            said = msgspec.convert(answers, list[kind])  # type: ignore[valid-type]
        except msgspec.ValidationError as error:
            raise PublishError(f"{self.url} has no answer to {method} ({error}); {NEEDS_EXTENSION}") from error
        if not said:
            raise PublishError(f"{self.url} has no worker that answers {method}; {NEEDS_EXTENSION}")
        return said

    def _connect(self) -> None:
        """Open a group with the server's workers, of which the trainer is rank 0."""
        from ludic.inference.vllm.in_server.weight_receiver import LOOPBACK, listening_store, process_group

        self._drop_group()
        size = 1 + self.endpoints.world_size()
        timeout = timedelta(seconds=self.timeout_s)
        store, port = listening_store(self.master_address, size, timeout)
        info = {
            "master_address": self.master_address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": size,
            "timeout_s": self.timeout_s,
            "group_id": uuid.uuid4().hex,
        }
        joining = in_thread(lambda: self.endpoints.init_transfer(info, timeout_s=self._deadline_s))
        kind = "nccl" if self.backend == "ludic_nccl" else "gloo"
        try:
            group = process_group(store, 0, size, timeout=timeout, kind=kind, loopback=self.master_address in LOOPBACK)
            joining.result(self._deadline_s)
        except Exception as error:
            refused = joining.exception() if joining.done() else None
            raise PublishError(
                f"{self.url} did not connect to {self.master_address}:{port} within {self.timeout_s:g} s ({refused or error}); its "
                "workers must reach that address: pass master_address="
            ) from (refused or error)
        self._group, self._group_id = group, str(info["group_id"])

    def begin(self, update_info: Mapping[str, Any]) -> None:
        """Ask the server to take a push aside; returns at once."""
        self.endpoints.start_update()
        self._update = in_thread(lambda: self.endpoints.update(update_info, timeout_s=self._deadline_s))

    def send(self, tensor: Tensor) -> None:
        """Broadcast the next tensor."""
        from ludic.inference.vllm.in_server.weight_receiver import broadcast

        if self._group is None:
            raise PublishError(f"there is no connection to {self.url}; VllmControlPlane.prepare() opens one")
        try:
            broadcast(self._group, tensor.cuda() if self.backend == "ludic_nccl" else tensor.cpu(), refused=self._is_refused)
        except RuntimeError as error:
            self._drop_group()
            cause = self._refusal() or error
            kind = PublishTimeoutError if isinstance(cause, TimeoutError) or "timed out" in str(cause).lower() else PublishError
            raise kind(f"{self.url} broke off the transfer: {cause}") from cause

    def _is_refused(self) -> bool:
        """Whether the server has given up on the push. Waits a moment for it to."""
        update = self._update
        return update is not None and bool(wait([update], POLL_S).done) and update.exception() is not None

    def _refusal(self) -> BaseException | None:
        """What the server said of the push that it broke off."""
        try:
            return None if self._update is None else self._update.exception(ANSWER_MARGIN_S)
        except TimeoutError:
            return None

    def wait_staged(self) -> None:
        """Until the server has all of the push."""
        if self._update is not None:
            self._update.result(self._deadline_s)

    def abandon(self) -> None:
        """Drop a push that is not to be loaded; the server goes on with what it has."""
        update, self._update = self._update, None
        self._drop_group()  # a server that still waits for tensors gives up at once
        if update is not None:
            wait([update], self._deadline_s)
        if any(state["open"] for state in self._ask("ludic_state", WorkerState)):
            self.discard()

    def discard(self) -> None:
        """Drop what the server took aside, and end its session. Its version stays."""
        self.endpoints.rpc("ludic_discard", timeout_s=self._deadline_s)
        self.endpoints.finish_update()

    def pause(self) -> None:
        """Freeze requests. What they computed is kept."""
        self._cache_is_fresh = False
        self.endpoints.pause("keep")

    def resume(self) -> None:
        """Let requests go on. Whatever happened since the pause, nothing in the prefix cache is
        of other weights; where it cannot be forgotten, the server stays paused."""
        if not self._cache_is_fresh:
            self._forget_cache()
        self.endpoints.resume()

    def _forget_cache(self) -> None:
        self.endpoints.reset_prefix_cache()
        self._cache_is_fresh = True

    def commit(self, version: str, sent: Mapping[str, str], served: Mapping[str, str]) -> None:
        """Load what was staged, called `version`; the server is paused. Raises where something
        else came than was `sent`, or where the server then holds anything else than `served`."""
        self._update = None
        self.endpoints.finish_update(version, timeout_s=self._deadline_s)
        self._forget_cache()
        self.check_held(version, sent, served)

    def check_held(self, version: str, sent: Mapping[str, str], served: Mapping[str, str]) -> None:
        """Raise where what came last is anything else than was `sent`, or what is held anything
        else than `served`."""
        for rank, answer in enumerate(self._ask("ludic_fingerprint", WorkerMarks)):
            wrong = [name for name, mark in sent.items() if answer["loaded"].get(name) != mark]
            stale = [name for name, mark in answer["served"].items() if name in served and served[name] != mark]
            if wrong or stale:
                raise PublishError(
                    f"after the push of version {version}, worker {rank} of {self.url} holds other values than the trainer: "
                    f"{len(wrong)} tensors came otherwise than they were sent, {len(stale)} are not what is served, first "
                    f"{(wrong + stale)[0]!r}"
                )

    def drain(self) -> None:
        """Take the server out of service: what it holds is not known."""
        self.drained = True
        self._drop_group()
        try:
            self.endpoints.pause("abort")
        except InferenceError as error:
            logger.warning("%s could not be paused: %s", self.url, error)

    def close(self) -> None:
        """Leave the group; the server keeps its weights."""
        self._drop_group()

    def _drop_group(self) -> None:
        if self._group is not None:
            from ludic.inference.vllm.in_server.weight_receiver import leave

            left, self._group = [self._group], None
            leave(left)
