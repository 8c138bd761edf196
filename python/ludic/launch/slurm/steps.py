"""The steps of a job, its servers and its training: which nodes and GPUs of the allocation they
have, and their command lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ludic.errors import ConfigError, check_value
from ludic.launch.rank_environment import STOP_ONCE
from ludic.launch.slurm.settings import SlurmSettings
from ludic.launch.torchrun import AGENT, ENV, RENDEZVOUS_S, STOP_VARIABLE

LOOPBACK = "127.0.0.1"
TRAIN = "train"
"""The name of the step that trains."""
YOUNG_S = 5
"""At most 9. A step is listed before its processes have begun, and they would miss a signal: one of
that age is asked to save later."""
_URL, _ADDRESS = "inference.url=", "inference.trainer_address="


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
    if not settings.serve:
        return Placement(nodes, gpus)
    size, count, shared = settings.tensor_parallel, settings.data_parallel, len(nodes) == 1
    each = max(0, len(gpus) - shared) // size  # servers of a node
    room = each * max(1, len(nodes) - 1)
    place = f"{len(nodes)} nodes of {len(gpus)} GPUs have room for {room} servers of {size} GPUs"
    remedy = f"lower it or tensor_parallel ({size}), or add nodes: training needs {'a GPU' if shared else 'a node'} of its own"
    check_value("data_parallel", count, f"{place}; {remedy}", most=room)
    serving = nodes if shared else nodes[len(nodes) - -(-count // each) :]
    servers = []
    for number in range(count):
        node, first = serving[number // each], number % each * size
        servers.append(Server(node, gpus[first : first + size], settings.server_port + number, LOOPBACK if shared else node))
    return Placement(nodes if shared else nodes[: -len(serving)], gpus[count * size :] if shared else gpus, tuple(servers))


def server_steps(settings: SlurmSettings, placement: Placement, job_id: str) -> list[list[str]]:
    """One command for each server, in their order."""
    model = None if settings.server or not placement.servers else _find_model(settings.train)
    commands = []
    for number, server in enumerate(placement.servers):
        base = list(settings.server) if model is None else ["-m", "ludic.cli", "serve", model]
        own = base.index("--") if "--" in base else len(base)  # from here on flags of vLLM
        address = ["--host", server.host, "--port", str(server.port)]
        flags = [*(base[own:] or ["--"]), "--tensor-parallel-size", str(len(server.gpus))]
        command = [settings.python, *base[:own], *address, *flags]
        log = f"{settings.logs}/vllm-{job_id}{f'-{number}' if number else ''}.out"
        commands.append(_srun(settings, f"server-{number}", (server.node,), log, server.gpus, {}, command))
    return commands


def training_step(settings: SlurmSettings, placement: Placement, job_id: str) -> list[str]:
    """The command that trains, on all nodes of the training: the settings' own, with the addresses
    of the servers unless it has some. With several ranks, one torchrun agent on each node starts
    them."""
    nodes, ranks = placement.train_nodes, placement.ranks_per_node
    environment = {STOP_ONCE: "1", STOP_VARIABLE: str(settings.stop_before_end_s), **(ENV if len(nodes) > 1 else {})}
    agent: list[str] = []
    if len(nodes) * ranks > 1:
        agent = ["-m", AGENT, f"--nnodes={len(nodes)}", f"--nproc-per-node={ranks}", f"--rdzv-id={job_id}", "--rdzv-backend=c10d"]
        agent += [f"--rdzv-endpoint={nodes[0]}:{settings.master_port}", f"--rdzv-conf=join_timeout={RENDEZVOUS_S}"]
    command = [settings.python, *agent, *settings.train, *tell_servers(settings.train, placement)]
    log = f"{settings.logs}/train_{job_id}.log"
    return _srun(settings, TRAIN, nodes, log, placement.train_gpus, environment, command)


def tell_servers(train: Sequence[str], placement: Placement) -> list[str]:
    """The settings of the recipe that name the servers, and this side for servers elsewhere. A run
    that is resumed is always told its side, since its recipe has the side of its last job."""
    if not placement.servers or any(part.startswith(_URL) for part in train):
        return []
    told = [f"{_URL}[{','.join(placement.urls)}]"]
    is_here = placement.servers[0].node in placement.train_nodes
    if any(part.startswith(_ADDRESS) for part in train) or (is_here and "--resume" not in train):
        return told
    return [*told, f"{_ADDRESS}{LOOPBACK if is_here else placement.train_nodes[0]}"]


def _srun(
    settings: SlurmSettings,
    name: str,
    nodes: Sequence[str],
    log: str,
    gpus: Sequence[int],
    environment: Mapping[str, str],
    command: Sequence[str],
) -> list[str]:
    """GPUs are named inside the step, since srun sets them for what it starts. A node that has
    ended leaves the others time (`--wait`), or rank 0 could lose what it is about to save."""
    count = len(nodes)
    variables = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), **environment}
    return [
        *("srun", f"--job-name={name}", "--overlap", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"),
        *(f"--nodelist={','.join(nodes)}", f"--cpus-per-task={settings.cpus_per_task}"),
        *("--kill-on-bad-exit=0", f"--wait={settings.stop_before_end_s}"),
        *("--unbuffered", f"--output={log}", "--error=" + log, "--open-mode=append"),
        *("env", *(f"{key}={value}" for key, value in variables.items()), *command),
    ]


def _find_model(train: Sequence[str]) -> str:
    model = next((part.removeprefix("model=") for part in reversed(train) if part.startswith("model=")), None)
    if model in (None, "", "null"):
        raise ConfigError("servers need a model, and train names none; set model=DIRECTORY, or serve=False")
    return str(model)
