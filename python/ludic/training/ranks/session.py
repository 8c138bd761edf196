"""Joining the ranks of a run and leaving them: from the launcher's environment to a process group,
and from an error on one rank to its end on all; errors and answers that all ranks share; and
reductions over ranks. Without `torch.distributed` there is one rank and each reduction is the
identity. Nothing is pickled: values travel as numbers and JSON."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

# Functions of this module have the process group that exists at its import as a default (torch
# 2.13). If it is imported later, the threads of gloo outlive `destroy_process_group` and may abort
# the process at its end.
import torch.distributed.nn.functional
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store  # torch has no public name for it

from ludic.errors import TRY_AGAIN, ConfigError, RankError
from ludic.launch.rank_environment import RankEnvironment, read_rank_environment
from ludic.training import watchdog
from ludic.training.ranks.collectives import is_distributed, prepare_groups, rank, world_size
from ludic.training.ranks.liveness import name_ranks
from ludic.training.ranks.rank_store import open_store
from ludic.training.ranks.rendezvous import Rendezvous

logger = logging.getLogger(__name__)

T = TypeVar("T")

TIMEOUT_S, RENDEZVOUS_TIMEOUT_S = 600.0, 600.0
STOP_S = 600.0
"""How long the other ranks wait for rank 0 to be done with what it does alone."""
LEAVE_S = 5.0
"""How long the rank that serves the store waits for another one to leave."""
WAIT_S = 7200.0
"""How long a rank waits for the others outside of the phases of the watchdog."""

_rendezvous: Rendezvous | None = None
_environment: RankEnvironment | None = None
_of_groups: WeakKeyDictionary[Any, Rendezvous] = WeakKeyDictionary()
"""Of process groups that `start` did not make; gone with the group, whose store they hold."""


def current_rendezvous() -> Rendezvous | None:
    """What the ranks share: since `start`, or through the store of a process group that was made
    in another way. None for one process."""
    if _rendezvous is not None or not is_distributed():
        return _rendezvous
    group = dist.group.WORLD
    if group not in _of_groups:
        _of_groups[group] = Rendezvous(PrefixStore("ludic", _get_default_store()), rank(), world_size())
        _of_groups[group].announce()
    return _of_groups[group]


@contextmanager
def agree(doing: str) -> Iterator[None]:
    """Raise on every rank if the block fails on any: its own error, or RankError with the error of
    a rank that failed. Without this, the others would wait in the next collective until the group's
    timeout.

    The block must take part in its collectives also after an error. All ranks call it, and meet at
    the store, until the deadline of the watchdog's phase.
    """
    together = current_rendezvous()
    if together is None:
        yield
        return
    with together.agree(doing, watchdog.remaining_s(WAIT_S)):
        yield


@contextmanager
def rank_0_alone(doing: str) -> Iterator[list[Any]]:
    """Work in the block on rank 0 alone; the other ranks, which do nothing in theirs, wait for its
    end at the store. Its error is raised on all. The JSON values that rank 0 puts into the list are
    in the lists of all ranks afterwards.

    >>> with rank_0_alone("measuring") as shared:
    ...     if rank() == 0:
    ...         shared.append(measure())
    """
    together = current_rendezvous()
    if together is None:
        yield []
        return
    with together.rank_0_alone(doing, watchdog.remaining_s(WAIT_S)) as values:
        yield values


def ask_rank_0(doing: str, question: Callable[[], T]) -> T:
    """The JSON value of `question`, which is called on rank 0 alone. Use it for values read from
    files: ranks that look for themselves may see different ones. Its error is raised on all, as by
    `agree`."""
    with rank_0_alone(doing) as shared:
        if rank() == 0:
            shared.append(question())
    answer: T = shared[0]
    return answer


def barrier() -> None:
    """Wait for all ranks."""
    with agree("waiting for all ranks"):
        pass


def start(
    environment: RankEnvironment | None = None,
    *,
    timeout_s: float = TIMEOUT_S,
    rendezvous_timeout_s: float = RENDEZVOUS_TIMEOUT_S,
    exit_code: Callable[[BaseException], int] = lambda error: TRY_AGAIN,
) -> RankEnvironment | None:
    """Join the other ranks, as torchrun's or Slurm's environment says. Returns that environment;
    None, and nothing is done, if it says that there is one process.

    All ranks first meet at a store, for which `rendezvous_timeout_s` bounds the wait, because the
    imports of the slowest rank may take longer than any collective should. The process group is
    made then: NCCL for tensors on CUDA devices, gloo for those on the CPU. `timeout_s` bounds each
    of its collectives. Each rank gets the GPU of its local number. `exit_code`: the exit status of
    all ranks for an error on one. Raises RankError, which names the ranks that did not come.
    """
    global _rendezvous, _environment
    environment = read_rank_environment() if environment is None else environment
    if environment is None:
        return None
    if _rendezvous is not None or dist.is_initialized():
        raise ConfigError("ranks.start was called twice, or after torch.distributed.init_process_group; call it once")
    ends = time.monotonic() + rendezvous_timeout_s
    attempt = _name_attempt(environment)
    store = open_store(environment, rendezvous_timeout_s)
    prefixed = PrefixStore(f"ludic/{attempt}", store)
    shared = Rendezvous(prefixed, environment.rank, environment.world_size, exit_code=exit_code)
    shared.gather(max(1.0, ends - time.monotonic()))
    _choose_device(environment)
    if _is_loopback(environment.address) and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        store=PrefixStore(f"group/{attempt}", store),
        rank=environment.rank,
        world_size=environment.world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    prepare_groups(timedelta(seconds=timeout_s))
    _rendezvous, _environment = shared, environment
    return environment


def stop(*, failed: bool = False) -> None:
    """Leave the other ranks. Rank 0 leaves first, so that a launcher that ends all ranks once one
    has ended does not interrupt it; if it serves the store, it waits for the others to leave.

    `failed`: this rank ends with an error. The others find it in the store, also those that wait
    in a collective, whose connections are closed.
    """
    global _rendezvous, _environment
    prepare_groups(None)
    shared, environment, _rendezvous, _environment = _rendezvous, _environment, None, None
    if shared is None or environment is None:
        return
    if failed and not torch.cuda.is_available():  # NCCL may hang here; the watchdogs of the others end them
        dist.destroy_process_group()
    try:
        if environment.rank > 0 and not failed:
            shared.wait_until_left(0, STOP_S)
        shared.leave()
        if environment.rank == 0 and not environment.has_store:
            for rank in range(1, environment.world_size):
                shared.wait_until_left(rank, LEAVE_S)
    except RankError:
        logger.debug("the store was gone before this rank left", exc_info=True)
    if dist.is_initialized() and not failed:
        dist.destroy_process_group()


@contextmanager
def joined(
    environment: RankEnvironment | None = None,
    *,
    timeout_s: float = TIMEOUT_S,
    rendezvous_timeout_s: float = RENDEZVOUS_TIMEOUT_S,
    exit_code: Callable[[BaseException], int] = lambda error: TRY_AGAIN,
) -> Iterator[RankEnvironment | None]:
    """`start` and `stop` around a block. An error that leaves it is told to the other ranks, which
    end with it. An error that only shows that another rank ended is replaced by RankError, which
    has the error of that rank, or names it. Any other error stays: the failure of another rank may
    be an echo of it."""
    joined_environment = start(environment, timeout_s=timeout_s, rendezvous_timeout_s=rendezvous_timeout_s, exit_code=exit_code)
    if joined_environment is None:
        yield None
        return
    try:
        yield joined_environment
    except BaseException as error:
        try:
            explained = explain(error)
            if explained is error:
                raise
            raise explained from error
        finally:
            stop(failed=True)
    stop()


def explain(error: BaseException) -> BaseException:
    """The error to raise for one that ends this rank: itself, after the others were told, or
    RankError with the failure of another rank that caused it."""
    shared = _rendezvous
    if shared is None:
        return error
    is_own = isinstance(error, RankError) or not _comes_from_collective(error)
    try:
        if not is_own:
            silent = [] if shared.find_failure() else [rank for rank in shared.find_silent() if rank != shared.rank]
            failure = shared.find_failure()
            if failure is not None:
                return failure.to_error(None, shared.world_size)
            error = _describe_loss(error, silent, shared)
        shared.report_failure(shared.describe(error))
    except RankError as gone:
        return error if isinstance(error, RankError) or is_own else gone
    return error


def raise_if_failed() -> None:
    """Raise RankError if another rank has failed. For waits that this module does not know."""
    meeting = current_rendezvous()
    if meeting is not None:
        meeting.raise_if_failed()


def _describe_loss(error: BaseException, silent: list[int], shared: Rendezvous) -> RankError:
    """The error for a collective that failed while no rank has said why. The ranks that do not
    answer were killed, or hang."""
    text = str(error).splitlines()[0]
    if "imed out" in text:
        watchdog.print_stacks()
    where = (
        f"no sign from {name_ranks(silent)} of {shared.world_size}, which was killed or hangs" if silent else "all ranks answer"
    )
    return RankError(f"rank {shared.rank} lost the others in an exchange between ranks: {where} ({text})")


def _comes_from_collective(error: BaseException | None) -> bool:
    """Whether torch.distributed raised the error, or it was raised while such an error was
    handled."""
    while error is not None:
        text = str(error).lower()
        named = any(word in text for word in ("gloo", "nccl", "connection closed by peer", "connection reset by peer"))
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and named):
            return True
        error = error.__cause__ or error.__context__
    return False


def _name_attempt(environment: RankEnvironment) -> str:
    """A prefix that tells the keys of this start of the ranks from earlier starts in the same
    store; the same on all ranks. A store that rank 0 serves is new at each start, for which the
    agents of several machines may have counted differently."""
    if not environment.has_store:
        return "0"
    if environment.num_machines > 1:
        raise ConfigError(
            f"torchrun on {environment.num_machines} machines needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and --rdzv-backend c10d"
        )
    return environment.attempt


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(socket.gethostbyname(address)).is_loopback
    except OSError:
        return False


def _choose_device(environment: RankEnvironment) -> None:
    """Make the GPU of the local rank the current one. A launcher may show each rank its own
    alone."""
    if not torch.cuda.is_available():
        return
    available = torch.cuda.device_count()
    if available > 1 and environment.local_rank >= available:
        raise ConfigError(f"local rank {environment.local_rank} needs a GPU and this machine has {available}; start fewer ranks")
    torch.cuda.set_device(environment.local_rank if available > 1 else 0)
