"""The trainer's link to one server: the server's manifest, the process group that carries the
tensors, and the steps of a push."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, NotRequired, TypedDict, TypeVar

import msgspec

from ludic.distributed.push.manifest import ServerManifest
from ludic.errors import InferenceError, PublishError, PublishTimeoutError, ServerError
from ludic.event_loop import start_in_thread
from ludic.inference.vllm.endpoints import VllmEndpoints

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)
T = TypeVar("T")

BROADCAST_BACKENDS = ("gloo", "ludic_nccl")
"""The backends over which tensors can be broadcast. All backends can read a folder."""
ANSWER_MARGIN_S = 15.0
"""How much longer a call may take than the transfer that it waits for, so that the server gives up
the transfer before the trainer gives up the server."""
POLL_S = 0.0005
"""How long a broadcast waits between two checks that the server has not refused it."""
GIB = 2**30
NEEDS_EXTENSION = "start it as `ludic serve` does, with --worker-extension-cls ludic.inference.vllm.in_server.worker.WeightWorker"


class WorkerState(TypedDict):
    """A worker's answer to `ludic_state`."""

    boot: str
    """Id of this run of the server; a restart changes it."""
    backend: str
    group_id: str | None
    open: bool
    """Whether a push has started and was neither loaded nor dropped."""
    broken: str | None
    """Why the worker cannot take pushes any more; None if it can."""
    base: NotRequired[str | None]
    """The id of the push that the worker keeps, of which it takes a delta."""
    sleeps: NotRequired[bool]
    """Whether the server can sleep."""


class WeightShape(TypedDict):
    shape: list[int]
    dtype: str


class WorkerManifest(TypedDict):
    """A worker's answer to `ludic_manifest`."""

    dtype: str
    tied: bool
    weights: dict[str, WeightShape] | None
    config: NotRequired[dict[str, Any] | None]


class WorkerFingerprints(TypedDict):
    """A worker's answer to `ludic_fingerprint`."""

    loaded: dict[str, str]
    served: dict[str, str]
    lost: NotRequired[list[str]]
    """Weights that a sleep has dropped and no push has loaded."""


class WorkerMemory(TypedDict):
    """A worker's answer to `ludic_memory` and `ludic_before_sleep`."""

    used: int | None
    """Bytes in use on its device; None on a CPU, and before the sleep of a server that sleeps."""
    weights: int
    """Bytes of its weights."""


class WokenWorker(TypedDict):
    """A worker's answer to `ludic_after_wake`."""

    changed: list[str]


class ServerLink:
    """The steps of a push to one server. Each waits at most `timeout_s`; each raises
    InferenceError or PublishError."""

    def __init__(
        self,
        endpoints: VllmEndpoints,
        *,
        master_address: str = "127.0.0.1",
        timeout_s: float = 60.0,
        by_folder: bool = False,
        sleep_level: int | None = None,
    ) -> None:
        """`master_address` is the address at which the server's workers reach the trainer.
        `by_folder`: pass weights through a folder, even if the server's backend can broadcast.
        `sleep_level`: how the server sleeps between pushes; None if it does not."""
        self.endpoints = endpoints
        self.sleep_level = sleep_level
        self.by_folder = by_folder
        self.master_address = master_address
        self.timeout_s = timeout_s
        self.backend = ""
        self.manifest: ServerManifest | None = None
        self.drained = False
        """Whether the server was taken out of service after a push that could not be completed."""
        self.base: str | None = None
        """The id of the push that all workers kept when they were asked last, if it is one."""
        self._boot: str | None = None
        self._group: Any = None
        self._group_id: str | None = None
        self._update: Future[None] | None = None
        self._cache_is_fresh = False
        """Whether the prefix cache was reset since the last pause."""
        self._is_asleep = self._may_wake = False
        """A server that sleeps may not wake up for requests before it has loaded a push."""

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
        """Make the server ready for a push and return its manifest: read the manifest of a server
        that is new or was restarted, drop an unfinished push, and connect."""
        states = self._call_workers("ludic_state", WorkerState)
        if states[0]["boot"] != self._boot:
            if self._boot is not None:
                logger.warning("%s was restarted; connecting again", self.url)
            self.close()
            self.backend, self.drained = states[0]["backend"], False
            if not self.by_folder and self.backend not in BROADCAST_BACKENDS:
                raise PublishError(f"the backend of {self.url} is {self.backend}; pass directory=, a shared folder")
            self.manifest = ServerManifest.from_answer(self._call_workers("ludic_manifest", WorkerManifest)[0], self.url)
            self._boot = states[0]["boot"]
        broken = next((state["broken"] for state in states if state["broken"]), None)
        if broken is not None or self.drained:
            raise PublishError(f"{self.url} is out of service ({broken or 'its last push could not be completed'}); restart it")
        if self.sleep_level is not None:
            if not states[0].get("sleeps"):
                raise PublishError(f"{self.url} cannot sleep; start it with --enable-sleep-mode")
            self._is_asleep, self._may_wake = self.endpoints.is_sleeping(), False  # also since a trainer that was killed
        if any(state["open"] for state in states):
            logger.warning("%s has an unfinished push of another trainer, which is dropped", self.url)
            self.discard()
        if not self.by_folder and (self._group is None or any(state["group_id"] != self._group_id for state in states)):
            self._connect()
        bases = {state.get("base") for state in states}
        self.base = bases.pop() if len(bases) == 1 else None
        assert self.manifest is not None
        return self.manifest

    def _call_workers(self, method: str, kind: type[T], **arguments: Any) -> list[T]:
        try:
            results = self.endpoints.rpc(method, timeout_s=self._deadline_s, **arguments)
        except ServerError as error:
            if self._boot is None and error.status == 500:
                raise PublishError(f"{error}; {NEEDS_EXTENSION}") from error
            raise
        try:
            return msgspec.convert(results, Annotated[list[kind], msgspec.Meta(min_length=1)])  # type: ignore[valid-type]
        except msgspec.ValidationError as error:
            raise PublishError(f"{self.url} gave no valid answer to {method} ({error}); {NEEDS_EXTENSION}") from error

    def _connect(self) -> None:
        """Open a process group with the server's workers. The trainer is rank 0."""
        from ludic.inference.vllm.in_server.weight_receiver import LOOPBACK, open_process_group, open_store

        self.close()
        size = 1 + self.endpoints.world_size()
        timeout = timedelta(seconds=self.timeout_s)
        store, port = open_store(self.master_address, size, timeout)
        info = {
            "master_address": self.master_address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": size,
            "timeout_s": self.timeout_s,
            "group_id": uuid.uuid4().hex,
        }
        joining = start_in_thread(lambda: self.endpoints.init_transfer(info, timeout_s=self._deadline_s), name="ludic-servers")
        kind = "nccl" if self.backend == "ludic_nccl" else "gloo"
        try:
            group = open_process_group(store, 0, size, timeout=timeout, kind=kind, loopback=self.master_address in LOOPBACK)
            joining.result(self._deadline_s)
        except Exception as error:
            refusal = joining.exception() if joining.done() else None
            raise PublishError(
                f"{self.url} did not reach {self.master_address}:{port} in {self.timeout_s:g} s ({refusal or error}); pass master_address="
            ) from refusal or error
        self._group, self._group_id = group, str(info["group_id"])

    def begin(self, update_info: Mapping[str, Any]) -> None:
        """Ask the server to stage a push. Returns without waiting."""
        self.endpoints.start_update()
        self._update = start_in_thread(
            lambda: self.endpoints.update(update_info, timeout_s=self._deadline_s), name="ludic-servers", daemon=True
        )

    def send(self, tensor: Tensor) -> None:
        """Broadcast the next tensor."""
        from ludic.inference.vllm.in_server.weight_receiver import broadcast

        if self._group is None:
            raise PublishError(f"there is no connection to {self.url}; VllmControlPlane.prepare() opens one")
        try:
            broadcast(self._group, tensor.cuda() if self.backend == "ludic_nccl" else tensor.cpu(), refused=self._is_refused)
        except RuntimeError as error:
            self.close()
            cause = self._refusal() or error
            kind = PublishTimeoutError if isinstance(cause, TimeoutError) or "timed out" in str(cause).lower() else PublishError
            raise kind(f"{self.url} aborted the transfer: {cause}") from cause

    def _is_refused(self) -> bool:
        """Whether the server has refused the push. Waits `POLL_S` for its answer."""
        update = self._update
        return update is not None and bool(wait([update], POLL_S).done) and update.exception() is not None

    def _refusal(self) -> BaseException | None:
        """The error with which the server refused the push, if it answered."""
        try:
            return None if self._update is None else self._update.exception(ANSWER_MARGIN_S)
        except TimeoutError:
            return None

    def wait_staged(self) -> None:
        """Wait until the server has staged the whole push."""
        if self._update is not None:
            self._update.result(self._deadline_s)

    def abandon(self) -> None:
        """Drop a push that must not be loaded. The server keeps its weights."""
        update, self._update = self._update, None
        self.close()  # a server that still waits for tensors then gives up
        if update is not None:
            wait([update], self._deadline_s)
        if any(state["open"] for state in self._call_workers("ludic_state", WorkerState)):
            self.discard()

    def discard(self) -> None:
        """Drop what the server has staged, and end its update. Its version does not change."""
        self.endpoints.rpc("ludic_discard", timeout_s=self._deadline_s)
        self.endpoints.finish_update()

    def sleep(self) -> None:
        """Have the server free its memory, except what the next push replaces at the latest. Raises
        PublishError if the memory of the device was not freed."""
        level = self.sleep_level
        assert level is not None
        before = self._call_workers("ludic_before_sleep", WorkerMemory, level=level)
        self._is_asleep, self._may_wake = True, False
        self.endpoints.sleep(level, timeout_s=self._deadline_s)
        after = self._call_workers("ludic_memory", WorkerMemory)
        for rank, (awake, asleep) in enumerate(zip(before, after, strict=True)):
            if awake["used"] is None or asleep["used"] is None:
                continue
            freed = awake["used"] - asleep["used"]
            if freed < awake["weights"]:
                raise PublishError(
                    f"{self.url} sleeps, and its worker {rank} has freed {freed / GIB:.2f} GiB of its device, less than its weights "
                    f"({awake['weights'] / GIB:.2f} GiB): {asleep['used'] / GIB:.2f} GiB are in use; does another process take some?"
                )
            logger.info("%s sleeps at level %d: %.2f GiB freed, %.2f in use", self.url, level, freed / GIB, asleep["used"] / GIB)

    def pause(self) -> None:
        """Freeze running requests, which keep the tokens sampled so far. A server that sleeps runs
        none: it gets the memory of its weights again, and not yet of keys and values."""
        self._cache_is_fresh = False
        if self._is_asleep and self.endpoints.wake_up("weights", timeout_s=self._deadline_s):
            self._is_asleep = False  # it was only paused, and runs again
        if not self._is_asleep:
            self.endpoints.pause("keep")
            return
        for rank, worker in enumerate(self._call_workers("ludic_after_wake", WokenWorker)):
            if changed := worker["changed"]:
                raise PublishError(
                    f"worker {rank} of {self.url} woke with other values in {len(changed)} tensors than it slept with, first "
                    f"{changed[0]!r}; restart it"
                )

    def resume(self) -> None:
        """Let requests continue, or wake up. The caches are reset first, if they were not since the
        pause; if that fails, the server stays paused or asleep."""
        if self._is_asleep and not self._may_wake:
            raise PublishError(f"{self.url} stays asleep, because it has not loaded the weights of this push")
        if not self._cache_is_fresh:
            self._reset_cache()
        if not self._is_asleep:
            self.endpoints.resume()
            return
        if not self.endpoints.wake_up("kv_cache", timeout_s=self._deadline_s):
            raise PublishError(f"{self.url} still sleeps after it was woken; restart it")
        self._is_asleep = False

    def _reset_cache(self) -> None:
        self.endpoints.reset_prefix_cache()
        self.endpoints.reset_encoder_cache()  # after it: requests that were frozen read their images again
        self._cache_is_fresh = True

    def commit(self, version: str, sent: Mapping[str, str], served: Mapping[str, str]) -> None:
        """Load the staged weights as `version`, while the server is paused. Raises PublishError if
        the weights that arrived differ from `sent`, or those that the server then has differ from
        `served` (fingerprints by name)."""
        self._update = None
        self.endpoints.finish_update(version, timeout_s=self._deadline_s)
        self._reset_cache()
        self.check_fingerprints(version, sent, served)
        self._may_wake = True

    def check_fingerprints(self, version: str, sent: Mapping[str, str], served: Mapping[str, str]) -> None:
        """Raise PublishError if the weights that were loaded last differ from `sent`, or those that
        the server has differ from `served`."""
        for rank, answer in enumerate(self._call_workers("ludic_fingerprint", WorkerFingerprints)):
            wrong = [name for name, digest in sent.items() if answer["loaded"].get(name) != digest]
            stale = [name for name, digest in answer["served"].items() if name in served and served[name] != digest]
            if wrong or stale:
                raise PublishError(
                    f"after the push of version {version}, worker {rank} of {self.url} has other values than the trainer: "
                    f"{len(wrong)} tensors arrived with other values, {len(stale)} are served with other values, first "
                    f"{(wrong + stale)[0]!r}"
                )
            if lost := answer.get("lost"):
                raise PublishError(
                    f"after the push of version {version}, worker {rank} of {self.url} lacks {len(lost)} weights that it lost in its "
                    f"sleep and that were not pushed, first {lost[0]!r}; restart it"
                )

    def drain(self) -> None:
        """Take the server out of service, because it is not known which weights it has."""
        self.drained = True
        self.close()
        try:
            self.endpoints.pause("abort")
        except InferenceError as error:
            logger.warning("%s could not be paused: %s", self.url, error)

    def close(self) -> None:
        """Close the process group. The server keeps its weights."""
        if self._group is not None:
            from ludic.inference.vllm.in_server.weight_receiver import close_group

            group, self._group = [self._group], None
            close_group(group)
