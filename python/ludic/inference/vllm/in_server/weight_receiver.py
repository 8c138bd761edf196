"""What a server does with weights that a trainer sends: a whole push is taken aside and checked
before any of it is loaded.

A push that breaks off, or that does not fit the model, is dropped, and the weights that were served
are served on. It runs inside the server, beside vLLM, so it needs torch and safetensors and nothing
else of the trainer's. `vllm_worker` binds it to vLLM.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from ludic.inference.vllm.in_server.weight_fingerprint import fingerprint

c10d: Any = dist
"""torch names stores and groups without exporting them to type checkers."""

INDEX = "model.safetensors.index.json"
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "U8": "uint8"}
"""What safetensors calls the dtypes that weights have."""
BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
LOOPBACK = ("127.0.0.1", "localhost")
LEAVE_S = 5.0
"""What groups that are being left may take of the end of a process."""


class WeightTransferError(RuntimeError):
    """A push that cannot be taken; nothing of it was loaded."""


class Checkpoint:
    """The weights in a folder of safetensors, by name, read one at a time.

    >>> Checkpoint(Path("model")).weights["model.norm.weight"]
    {'shape': [64], 'dtype': 'float32'}
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._places: dict[str, Path] = {}
        self.weights: dict[str, dict[str, Any]] = {}
        for path in _weight_files(folder):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  it is no mapping
                    part = file.get_slice(name)
                    self._places[name] = path
                    self.weights[name] = {"shape": list(part.get_shape()), "dtype": _dtype_name(part.get_dtype())}

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """The tensors of these names; each file is opened once."""
        for path in sorted({self._places[name] for name in names}):
            with safe_open(path, framework="pt") as file:
                for name in (name for name in names if self._places[name] == path):
                    yield name, file.get_tensor(name)


def _weight_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise WeightTransferError(f"{folder} is no folder here; trainer and server must both see it under this path")
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


def _dtype_name(stored: str) -> str:
    return DTYPES.get(stored, stored.lower())


class WeightReceiver:
    """Takes pushes aside, one at a time.

    `start`, then `receive` or `read`, then `take` (or `discard`). `known` has the shape of every
    weight of the model by name; None where the server could not find its own checkpoint, and then
    nothing is checked here.
    """

    def __init__(self, checkpoint: Checkpoint | None = None, *, device: torch.device | str = "cpu") -> None:
        """`device` is where tensors arrive; they are kept in the host's memory."""
        self.checkpoint = checkpoint
        self.device = torch.device(device)
        self.open = False
        """A push has been started, and neither loaded nor dropped."""
        self.marks: dict[str, str] = {}
        """Fingerprint of what was loaded last, by name."""
        self.loaded_shapes: dict[str, list[int]] = {}
        self._staged: dict[str, Tensor] | None = None
        self._sent: set[str] = set()
        self._ever_loaded: set[str] = set()
        self._group: Any = None
        self.group_id: str | None = None
        """What the trainer calls the group that it connected last; None where there is none."""

    @property
    def staged(self) -> int:
        """Tensors that wait to be loaded."""
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
        """Join the trainer's group, and leave that of another. `kind` is gloo or nccl. Waits at
        most `timeout_s` for the trainer's store, as long for the group, and as long in every
        later transfer. Raises WeightTransferError where there is no store."""
        self.close()
        timeout = timedelta(seconds=timeout_s)
        store = _store_at(master_address, master_port, world_size, timeout_s)
        self._group = process_group(store, rank, world_size, timeout=timeout, kind=kind, loopback=master_address in LOOPBACK)
        self.group_id = group_id

    def start(self) -> None:
        """Begin a push; what an earlier one left is dropped."""
        self.discard()
        self.open = True

    def receive(self, names: Sequence[str], dtype_names: Sequence[str], shapes: Sequence[Sequence[int]]) -> None:
        """Take the trainer's broadcasts of these tensors, in this order. Anything that goes
        wrong drops the push and the group."""
        if self._group is None:
            raise WeightTransferError("no trainer is connected; the trainer connects with /init_weight_transfer_engine")
        try:
            self._check(names, shapes)
            staged = {}
            for name, dtype_name, shape in zip(names, dtype_names, shapes, strict=True):
                arriving = torch.empty(list(shape), dtype=_torch_dtype(dtype_name), device=self.device)
                broadcast(self._group, arriving)
                staged[name] = arriving.cpu()
            self._stage(staged)
        except BaseException:
            self.discard()
            self.close()  # the trainer notices at once, and the next push finds no half-read stream
            raise

    def read(self, path: str) -> None:
        """Take all tensors of a folder of safetensors."""
        try:
            given = Checkpoint(Path(path))
            self._check(list(given.weights), [weight["shape"] for weight in given.weights.values()])
            self._stage(dict(given.read(list(given.weights))))
        except BaseException:
            self.discard()
            raise

    def _check(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> None:
        """Every name and shape is the model's. Loading a tensor of another shape would end the
        engine."""
        if self.checkpoint is None:
            return
        known = self.checkpoint.weights
        for name, shape in zip(names, shapes, strict=True):
            if name not in known:
                raise WeightTransferError(f"the model has no weight {name!r}")
            if list(shape) != known[name]["shape"]:
                raise WeightTransferError(f"weight {name!r} came with shape {list(shape)}, the model's is {known[name]['shape']}")

    def _stage(self, staged: dict[str, Tensor]) -> None:
        self._sent = set(staged)
        if self.checkpoint is not None:
            absent = never_loaded_neighbours(self.checkpoint.weights, staged, self._ever_loaded)
            lost = sorted((self._ever_loaded - set(staged)) & set(neighbours(self.checkpoint.weights, staged)))
            if lost:
                raise WeightTransferError(
                    f"{lost[0]!r} was part of earlier pushes and is missing in this one; push it too, or restart the server"
                )
            staged.update(self.checkpoint.read(absent))
        self._staged = staged

    def take(self) -> list[tuple[str, Tensor]]:
        """What is to be loaded now, and `marks` of it. Empty where the push was dropped. The
        push is over."""
        staged, self._staged, self.open = self._staged or {}, None, False
        if staged:
            self.marks = fingerprint(staged)
            self.loaded_shapes = {name: list(tensor.shape) for name, tensor in staged.items()}
            self._ever_loaded |= self._sent
        return list(staged.items())

    def discard(self) -> None:
        """Drop the push; nothing of it was loaded."""
        self._staged, self.open = None, False

    def close(self) -> None:
        """Leave the trainer's group."""
        self.group_id = None
        if self._group is not None:
            left, self._group = [self._group], None
            leave(left)


def neighbours(known: Mapping[str, Any], names: Mapping[str, Any]) -> list[str]:
    """The weights of the layers that `names` are in. A server fuses weights within a layer, and
    loads a fused one whole or not."""
    layers = {_layer(name) for name in names}
    return [name for name in known if _layer(name) in layers]


def never_loaded_neighbours(known: Mapping[str, Any], names: Mapping[str, Any], loaded: set[str]) -> list[str]:
    """Those of them that no push has brought: frozen ones, whose values are those of the
    server's own checkpoint."""
    return [name for name in neighbours(known, names) if name not in names and name not in loaded]


def _layer(name: str) -> str:
    """`model.layers.3` of `model.layers.3.mlp.up_proj.weight`; `model.norm` of
    `model.norm.weight`."""
    parts = name.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    return ".".join(parts[:-1] if number is None else parts[: number + 1])


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightTransferError(f"{name!r} is no dtype of torch")
    return dtype


def process_group(store: Any, rank: int, size: int, *, timeout: timedelta, kind: str, loopback: bool) -> Any:
    """A group of its own, beside whatever groups this process has. Gloo uses the interface that
    GLOO_SOCKET_IFNAME names, or the host's own; on loopback nothing else."""
    if kind == "nccl":
        return _nccl_group(store, rank, size, timeout)
    if not loopback:
        return c10d.ProcessGroupGloo(store, rank, size, timeout)
    options = c10d.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return c10d.ProcessGroupGloo(store, rank, size, options)


def _nccl_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """With waits that raise at the deadline: by default NCCL's watchdog then ends the whole
    process."""
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout
    before = os.environ.get(BLOCKING_WAIT)
    os.environ[BLOCKING_WAIT] = "1"  # read while the group is made
    try:
        return c10d.ProcessGroupNCCL(store, rank, size, options)
    finally:
        if before is None:
            del os.environ[BLOCKING_WAIT]
        else:
            os.environ[BLOCKING_WAIT] = before


def broadcast(group: Any, tensor: Tensor, root: int = 0, *, refused: Callable[[], bool] | None = None) -> None:
    """Send or take one tensor; waits until it is there. Raises RuntimeError where the other side
    is gone or too slow, or `refused` the transfer: a broadcast that nobody takes would wait for
    its deadline."""
    options = c10d.BroadcastOptions()
    options.rootRank = root
    work = group.broadcast([tensor], options)
    del group  # an error's traceback must not keep it open
    while refused is not None and not work.is_completed():
        if refused():
            raise WeightTransferError("the other side refused the transfer")
    work.wait()
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def leave(groups: list[Any]) -> None:
    """Empty the list of one, which must hold the only reference. A group closes its connections
    when it is freed; that waits for what it still does, and happens aside. The end of the
    process waits for it: a group that is freed while Python ends aborts the process."""
    groups[0].abort()
    leaving = threading.Thread(target=groups.clear, name="ludic-leave-group", daemon=True)
    leaving.start()
    _LEAVING[:] = [*(thread for thread in _LEAVING if thread.is_alive()), leaving]


_LEAVING: list[threading.Thread] = []


@atexit.register
def _wait_until_left() -> None:
    """Until every group is freed, for `LEAVE_S` at most."""
    deadline = time.monotonic() + LEAVE_S
    for thread in _LEAVING:
        thread.join(max(0.0, deadline - time.monotonic()))


def _store_at(address: str, port: int, size: int, timeout_s: float) -> Any:
    """The trainer's store. torch's own deadline does not hold where somebody listens and says
    nothing, so that it is kept here; the attempt goes on in a thread of its own until that
    connection ends."""
    found: Future[Any] = Future()

    def connect() -> None:
        try:
            found.set_result(c10d.TCPStore(address, port, size, is_master=False, timeout=timedelta(seconds=timeout_s)))
        except Exception as error:
            found.set_exception(error)

    threading.Thread(target=connect, name="ludic-find-store", daemon=True).start()
    try:
        return found.result(timeout_s)
    except TimeoutError as error:
        raise WeightTransferError(
            f"the trainer's store at {address}:{port} said nothing within {timeout_s:g} s; the workers must reach that address: pass "
            "master_address= to the publisher"
        ) from error


def listening_store(address: str, size: int, timeout: timedelta) -> tuple[Any, int]:
    """A store for `size` processes, and its port. It listens on this address alone; one left to
    itself listens on all."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        listener.bind((address, 0))
        listener.listen(64)
        port = listener.getsockname()[1]
    except OSError:
        listener.close()
        raise
    store = c10d.TCPStore(address, port, size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, port
