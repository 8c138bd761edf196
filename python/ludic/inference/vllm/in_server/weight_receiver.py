"""Receives weights from a trainer. A push is staged completely and checked before any of it is
loaded.

A push that fails or does not fit the model is dropped, and the server keeps its weights. This
module runs inside the server and needs only torch, safetensors and numpy. `worker` connects it to
vLLM.

A trainer that gives a push an id may later send what changed since: a delta. The receiver keeps the
tensors of such a push in host memory, and refuses a delta of any other. A delta is applied when it
arrives, as the kept tensors are not the ones that are served; it is applied again, which undoes it,
if the push is dropped.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from ludic.inference.vllm.in_server.weight_fingerprint import fingerprint

c10d: Any = dist
"""torch has stores and process groups under these names, but does not export them to type
checkers."""

INDEX = "model.safetensors.index.json"
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "U8": "uint8"}
"""Name of a dtype in safetensors -> name in torch."""
BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
LOOPBACK = ("127.0.0.1", "localhost")
CLOSE_TIMEOUT_S = 5.0
"""How long a process waits at its end for process groups that are being closed."""


DELTA_FILE = "weights.delta"
"""The file of a delta in the folder of its version."""


class WeightTransferError(RuntimeError):
    """A push was refused. None of it was loaded."""


class DeltaHeader(TypedDict):
    """What a receiver must know about the bytes of a delta, which has the changes of its tensors
    one after the other."""

    base: str
    """The id of the push that it changes."""
    names: list[str]
    sizes: list[int]
    """Bytes of the change of each tensor."""
    digest: str
    """See `digest_delta`."""


def digest_delta(push_id: str, base: str, names: Sequence[str], sizes: Sequence[int], changes: NDArray[np.uint8]) -> str:
    """32 hexadecimal digits, of all bytes."""
    head = json.dumps([push_id, base, list(names), list(sizes)]).encode()
    return hashlib.blake2b(changes.data, digest_size=16, key=hashlib.blake2b(head, digest_size=16).digest()).hexdigest()


def view_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """The bytes of a contiguous tensor in host memory, which share its memory: [bytes]."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def find_delta_codec() -> Callable[[NDArray[np.uint8], NDArray[np.uint8], int], None] | None:
    """`apply_delta` of ludic's extension, which a server has that finds ludic. None for an
    interpreter that cannot load it: pushes are then whole."""
    try:
        from ludic._core import apply_delta
    except ImportError:
        return None
    return apply_delta


class Checkpoint:
    """The weights in a folder of safetensors, read one at a time.

    >>> Checkpoint(Path("model")).weights["model.norm.weight"]
    {'shape': [64], 'dtype': 'float32'}
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._places: dict[str, Path] = {}
        self.weights: dict[str, dict[str, Any]] = {}
        for path in _weight_files(folder):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  it is not a mapping
                    part = file.get_slice(name)
                    self._places[name] = path
                    stored = part.get_dtype()
                    self.weights[name] = {"shape": list(part.get_shape()), "dtype": DTYPES.get(stored, stored.lower())}

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors with these names. Each file is opened once."""
        for path in sorted({self._places[name] for name in names}):
            with safe_open(path, framework="pt") as file:
                for name in (name for name in names if self._places[name] == path):
                    yield name, file.get_tensor(name)


def _weight_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise WeightTransferError(f"{folder} is not a folder here; trainer and server must both see it under this path")
    index = folder / INDEX
    if index.exists():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        if any(Path(name).name != name for name in names):
            raise WeightTransferError(f"{index} names a file outside its folder")
        return [folder / name for name in names]
    files = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("adapter_"))
    if not files:
        raise WeightTransferError(f"{folder} holds no *.safetensors")
    return files


class WeightReceiver:
    """Stages pushes, one at a time: `start`, then `receive` or `read`, then `take` or `discard`."""

    def __init__(self, checkpoint: Checkpoint | None = None, *, device: torch.device | str = "cpu") -> None:
        """`checkpoint` is the server's own, against which pushes are checked; None skips the
        checks. Tensors arrive on `device` and are staged in host memory."""
        self.checkpoint = checkpoint
        self.device = torch.device(device)
        self.open = False
        """Whether a push has started and was neither loaded nor dropped."""
        self.fingerprints: dict[str, str] = {}
        """Name -> fingerprint of the weights that were loaded last."""
        self.loaded_shapes: dict[str, list[int]] = {}
        self.base_id: str | None = None
        """The id of the push whose tensors are kept. None if there are none."""
        self._base: dict[str, Tensor] = {}
        self._changes: list[tuple[str, NDArray[np.uint8]]] = []
        """Tensors of the base that the staged delta changed, and their changes."""
        self._push_id: str | None = None
        self._apply_delta = find_delta_codec()
        self._staged: dict[str, Tensor] | None = None
        self._pushed: set[str] = set()
        self._ever_loaded: set[str] = set()
        self._group: Any = None
        self.group_id: str | None = None
        """The trainer's id for the current group. None if there is no group."""

    @property
    def staged(self) -> int:
        """The number of tensors that are staged."""
        return len(self._staged or ())

    def connect(
        self,
        *,
        master_address: str,
        master_port: int,
        rank: int,
        world_size: int,
        timeout_s: float,
        group_id: str,
        kind: str = "gloo",
    ) -> None:
        """Join the trainer's group, and leave any other group. `kind` is gloo or nccl.

        Waits at most `timeout_s` each for the trainer's store, for the group, and for every
        transfer. Raises WeightTransferError if the store does not answer.
        """
        self.close()
        timeout = timedelta(seconds=timeout_s)
        store = _connect_store(master_address, master_port, world_size, timeout_s)
        self._group = open_process_group(store, rank, world_size, timeout=timeout, kind=kind, loopback=master_address in LOOPBACK)
        self.group_id = group_id

    def start(self) -> None:
        """Start a push, and drop an earlier one that is unfinished."""
        self.discard()
        self.open = True

    def receive(
        self, names: Sequence[str], dtype_names: Sequence[str], shapes: Sequence[Sequence[int]], push_id: str | None = None
    ) -> None:
        """Receive the trainer's broadcasts of these tensors, in this order, and keep them under
        `push_id` once they are loaded. Any error drops the push and the group."""
        self._check_connected()
        try:
            self._check(names, shapes)
            self._forget_base()
            staged = {}
            for name, dtype_name, shape in zip(names, dtype_names, shapes, strict=True):
                staged[name] = self._receive_tensor(list(shape), _torch_dtype(dtype_name))
            self._stage(staged, push_id)
        except BaseException:
            self.discard()
            self.close()  # tells the trainer, and leaves no half-read stream to the next push
            raise

    def _check_connected(self) -> None:
        if self._group is None:
            raise WeightTransferError("no trainer is connected; the trainer connects with /init_weight_transfer_engine")

    def _receive_tensor(self, shape: list[int], dtype: torch.dtype) -> Tensor:
        arriving = torch.empty(shape, dtype=dtype, device=self.device)
        broadcast(self._group, arriving)
        return arriving.cpu()

    def read(self, path: str, push_id: str | None = None) -> None:
        """Stage all tensors of a folder of safetensors, and keep them under `push_id` once they are
        loaded."""
        try:
            pushed = Checkpoint(Path(path))
            self._check(list(pushed.weights), [weight["shape"] for weight in pushed.weights.values()])
            self._forget_base()
            read = pushed.read(list(pushed.weights))
            # Kept tensors must not be views of a file that the trainer will delete.
            self._stage({name: tensor if push_id is None else tensor.clone() for name, tensor in read}, push_id)
        except BaseException:
            self.discard()
            raise

    def receive_delta(self, header: DeltaHeader, push_id: str, path: str | None = None) -> None:
        """Receive what changed since the push that is kept, as one broadcast or in a folder, and
        keep the result under `push_id` once it is loaded. Any error drops the push. One of the
        delta itself also drops the kept weights, so that the trainer knows to push all."""
        try:
            # 1. It must be of the weights that are kept.
            names, sizes = header["names"], header["sizes"]
            if self._apply_delta is None or self.base_id is None or header["base"] != self.base_id:
                raise self._refuse_delta(f"it is of push {header['base']}, and push {self.base_id} is kept")
            for name, size in zip(names, sizes, strict=True):
                if name not in self._base or not 0 <= size <= 1 + self._base[name].nbytes:
                    raise self._refuse_delta(f"{size} bytes are no change of the weight {name!r}")
            # 2. All of it must arrive as it was sent.
            if path is not None:
                changes = np.fromfile(Path(path) / DELTA_FILE, np.uint8)
            else:
                self._check_connected()
                changes = self._receive_tensor([sum(sizes)], torch.uint8).numpy()
            if len(changes) != sum(sizes) or digest_delta(push_id, header["base"], names, sizes, changes) != header["digest"]:
                raise self._refuse_delta("its digest is not the trainer's, so it was damaged on its way")
            # 3. The kept weights become the new ones, in place.
            for name, change in zip(names, np.split(changes, np.cumsum(sizes[:-1])), strict=True):
                self._change_base(name, change)
                self._changes.append((name, change))
            self._stage({name: self._base[name] for name in names}, push_id)
        except BaseException:
            self.discard()
            if path is None:
                self.close()
            raise

    def _refuse_delta(self, reason: str) -> WeightTransferError:
        self._forget_base()
        return WeightTransferError(f"a delta was refused, because {reason}; push all weights")

    def _change_base(self, name: str, change: NDArray[np.uint8]) -> None:
        assert self._apply_delta is not None
        try:
            self._apply_delta(view_bytes(self._base[name]), change, self._base[name].itemsize)
        except BaseException as error:
            raise self._refuse_delta(str(error)) from error

    def _forget_base(self) -> None:
        self.base_id, self._base, self._changes = None, {}, []

    def _check(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> None:
        """Raise WeightTransferError unless the model has a weight of each name and shape. Loading a
        tensor of another shape would crash the engine."""
        if self.checkpoint is None:
            return
        own = self.checkpoint.weights
        for name, shape in zip(names, shapes, strict=True):
            if name not in own:
                raise WeightTransferError(f"the model has no weight {name!r}")
            if list(shape) != own[name]["shape"]:
                raise WeightTransferError(f"weight {name!r} has shape {list(shape)}, the model's is {own[name]['shape']}")

    def _stage(self, staged: dict[str, Tensor], push_id: str | None) -> None:
        self._pushed = set(staged)
        if self.checkpoint is not None:
            absent = [name for name in neighbours(self.checkpoint.weights, staged) if name not in staged]
            staged.update({name: self._base[name] for name in absent if name in self._base})  # a delta does not change them
            absent = [name for name in absent if name not in staged]
            lost = sorted(self._ever_loaded.intersection(absent))
            if lost:
                raise WeightTransferError(f"{lost[0]!r} of earlier pushes is missing; push it too, or restart the server")
            staged.update(self.checkpoint.read(absent))  # they are frozen, as they were never pushed
        self._staged, self._push_id = staged, push_id

    def take(self) -> list[tuple[str, Tensor]]:
        """End the push, set `fingerprints`, and return the weights to load; empty if the push was
        dropped."""
        staged, self._staged, self.open = self._staged or {}, None, False
        if staged:
            is_delta, self._changes = bool(self._changes), []
            if not is_delta:
                self.fingerprints, self.loaded_shapes = {}, {}
                if self._push_id is not None and self._apply_delta is not None:
                    self._base = {name: staged[name] for name in self._pushed}
            self.base_id = self._push_id if self._base else None
            self.fingerprints |= fingerprint(staged)
            self.loaded_shapes |= {name: list(tensor.shape) for name, tensor in staged.items()}
            self._ever_loaded |= self._pushed
        return list(staged.items())

    def empty(self) -> None:
        """Drop the staged weights. The push stays open until `take`, which then returns nothing."""
        self._staged, changes, self._changes = None, self._changes, []
        for name, change in changes:
            self._change_base(name, change)  # applied again, it is undone

    def discard(self) -> None:
        """Drop the push without loading any of it, and end it."""
        self.empty()
        self.open = False

    def close(self) -> None:
        """Leave the trainer's group."""
        self.group_id = None
        if self._group is not None:
            group, self._group = [self._group], None
            close_group(group)


def neighbours(weights: Mapping[str, Any], names: Mapping[str, Any]) -> list[str]:
    """All weights of the layers that `names` belong to. They have to be loaded together, because a
    server fuses weights within a layer.

    For `layers.3.q.weight` these are `layers.3.q.weight`, `layers.3.k.weight` and so on.
    """
    layers = {_layer(name) for name in names}
    return [name for name in weights if _layer(name) in layers]


def _layer(name: str) -> str:
    """`model.layers.3` of `model.layers.3.mlp.up_proj.weight`; `model.norm` of
    `model.norm.weight`."""
    parts = name.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    return ".".join(parts[:-1] if number is None else parts[: number + 1])


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightTransferError(f"{name!r} is not a dtype of torch")
    return dtype


def open_process_group(store: Any, rank: int, size: int, *, timeout: timedelta, kind: str, loopback: bool) -> Any:
    """Open a process group in addition to the default one of this process. Gloo uses the interface
    in GLOO_SOCKET_IFNAME or the host's default; with `loopback`, only the loopback interface."""
    if kind == "nccl":
        return _nccl_group(store, rank, size, timeout)
    if not loopback:
        return c10d.ProcessGroupGloo(store, rank, size, timeout)
    options = c10d.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return c10d.ProcessGroupGloo(store, rank, size, options)


def _nccl_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A group whose waits raise an error at the deadline. By default NCCL's watchdog would end the
    process."""
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout
    before = os.environ.get(BLOCKING_WAIT)
    os.environ[BLOCKING_WAIT] = "1"  # NCCL reads it while the group is made
    try:
        return c10d.ProcessGroupNCCL(store, rank, size, options)
    finally:
        if before is None:
            del os.environ[BLOCKING_WAIT]
        else:
            os.environ[BLOCKING_WAIT] = before


def broadcast(group: Any, tensor: Tensor, *, refused: Callable[[], bool] | None = None) -> None:
    """Send a tensor as rank 0, or receive it, and wait until the transfer is complete.

    Raises RuntimeError if the other side is gone or too slow, or as soon as `refused` returns True;
    otherwise a broadcast without a receiver would wait for its deadline.
    """
    options = c10d.BroadcastOptions()
    options.rootRank = 0
    work = group.broadcast([tensor], options)
    del group  # else the traceback of an error would keep it open
    while refused is not None and not work.is_completed():
        if refused():
            raise WeightTransferError("the other side refused the transfer")
    work.wait()
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def close_group(groups: list[Any]) -> None:
    """Close a group in its own thread. `groups` is a list with this one group, and must hold the
    only reference to it.

    A group closes its connections when it is freed, after its running work. The process waits for
    the thread before it ends, because freeing a group while Python shuts down aborts the process.
    """
    groups[0].abort()
    closing = threading.Thread(target=groups.clear, name="ludic-close-group", daemon=True)
    closing.start()
    _CLOSING_THREADS[:] = [*(thread for thread in _CLOSING_THREADS if thread.is_alive()), closing]


_CLOSING_THREADS: list[threading.Thread] = []


@atexit.register
def _wait_for_closing_groups() -> None:
    """Wait until every group is freed, for at most `CLOSE_TIMEOUT_S`."""
    deadline = time.monotonic() + CLOSE_TIMEOUT_S
    for thread in _CLOSING_THREADS:
        thread.join(max(0.0, deadline - time.monotonic()))


def _connect_store(address: str, port: int, size: int, timeout_s: float) -> Any:
    """Connect to the trainer's store. The deadline is enforced here, because torch's own has no
    effect if the other side listens but never answers; the attempt then continues in its thread
    until that connection ends."""
    store: Future[Any] = Future()

    def connect() -> None:
        try:
            store.set_result(c10d.TCPStore(address, port, size, is_master=False, timeout=timedelta(seconds=timeout_s)))
        except Exception as error:
            store.set_exception(error)

    threading.Thread(target=connect, name="ludic-find-store", daemon=True).start()
    try:
        return store.result(timeout_s)
    except TimeoutError as error:
        raise WeightTransferError(
            f"{address}:{port} did not answer within {timeout_s:g} s; pass master_address= to the publisher"
        ) from error


def open_store(address: str, size: int, timeout: timedelta) -> tuple[Any, int]:
    """Open a store for `size` processes. Returns it and its port. It listens only on this address;
    by default torch listens on all."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as listener:
        listener.bind((address, 0))
        listener.listen(64)
        port = listener.getsockname()[1]
        handle = listener.detach()  # the store closes it
    store = c10d.TCPStore(address, port, size, True, timeout, wait_for_workers=False, master_listen_fd=handle)
    return store, port
