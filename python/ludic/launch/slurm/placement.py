"""Which nodes and GPUs of an allocation train, and which serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ludic.errors import ConfigError
from ludic.launch.slurm.settings import SlurmSettings

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Allocation:
    """What Slurm gave the job."""

    nodes: Sequence[str]
    """Their names, in Slurm's order."""
    gpus_per_node: int


@dataclass(frozen=True)
class Server:
    """A server of a job."""

    node: str
    gpus: tuple[int, ...]
    """Numbers on its node."""
    port: int
    host: str
    """The address that it listens on: its node, or loopback if training is on the same one."""

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


@dataclass(frozen=True)
class Placement:
    """Where a job trains and serves."""

    train_nodes: tuple[str, ...]
    train_gpus: tuple[int, ...]
    """Of each of these nodes."""
    servers: tuple[Server, ...] = ()

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(server.url for server in self.servers)

    @property
    def ranks_per_node(self) -> int:
        """One for each GPU; on nodes without GPUs one."""
        return max(1, len(self.train_gpus))


def place(settings: SlurmSettings, allocation: Allocation) -> Placement:
    """Without servers every node trains. With them: of one node, the servers have the first GPUs
    and training the others; of several, the servers have the last nodes, as few as hold them.

    Example: 3 nodes with 4 GPUs and 2 servers of 2 GPUs each. Training has the 8 GPUs of the first
    two nodes, the servers GPUs 0, 1 and 2, 3 of the third. Raises ConfigError if the GPUs are too
    few.
    """
    nodes, gpus = tuple(allocation.nodes), tuple(range(allocation.gpus_per_node))
    if not nodes:
        raise ConfigError("the allocation has no nodes")
    if not settings.serve:
        return Placement(nodes, gpus)
    size, count, shared = settings.tensor_parallel, settings.data_parallel, len(nodes) == 1
    each = max(0, len(gpus) - shared) // size  # servers of a node
    room = each * max(1, len(nodes) - 1)
    if count > room:
        raise ConfigError(
            f"{len(nodes)} nodes of {len(gpus)} GPUs have room for {room} servers of {size} GPUs, and data_parallel is {count}: training "
            f"needs {'a GPU' if shared else 'a node'} of its own; lower data_parallel or tensor_parallel ({size}), or add nodes"
        )
    serving = nodes if shared else nodes[len(nodes) - -(-count // each) :]
    servers = []
    for number in range(count):
        node, first = serving[number // each], number % each * size
        servers.append(Server(node, gpus[first : first + size], settings.server_port + number, LOOPBACK if shared else node))
    return Placement(nodes if shared else nodes[: -len(serving)], gpus[count * size :] if shared else gpus, tuple(servers))
