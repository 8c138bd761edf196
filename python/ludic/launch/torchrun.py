"""The command lines of torchrun's agents: one for each machine, which starts and watches its ranks.

If a rank ends badly, its agent ends all of its ranks, and the others' agents theirs. An agent then
starts its ranks again, up to `max_restarts` times, or ends with the status of the rank, by which
the `Supervisor` decides whether to restart the agent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ludic.errors import ConfigError, check_value
from ludic.launch.process import PYTHON

AGENT = "ludic.training.ranks.agent"
"""The module that is torchrun, but ends with the status of its ranks."""
PORT = 29400
"""The port of torchrun's rendezvous on the first machine."""
RENDEZVOUS_S = 600
"""How long an agent waits for the agents of the other machines."""

ENV: Mapping[str, str] = MappingProxyType({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
"""The environment of agents on several machines (`Process.env`). Rank 0 then serves a new store at
each start of the ranks; the store of the agents would still have the keys of an earlier start."""

STOP_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Seconds after which an agent that got a signal kills ranks that have not ended; 30 without it,
and in a torch that does not know it."""


def torchrun_argv(
    command: Sequence[str],
    *,
    ranks: int,
    nodes: int = 1,
    min_nodes: int | None = None,
    node: int = 0,
    host: str = "",
    port: int = PORT,
    run_id: str = "ludic",
    max_restarts: int = 0,
    rendezvous_timeout_s: int = RENDEZVOUS_S,
) -> tuple[str, ...]:
    """The command of the agent of machine `node`, 0 to `nodes` - 1.

    `command` is a script or `-m MODULE`, and its arguments; `ranks` are started on each machine. On
    one machine (`nodes` 1) agent and ranks meet on a free port of it. Several agents meet on
    `port` of `host`, the address of machine 0; with `min_nodes` they begin with that many, and
    start all ranks again when machines come or go. `run_id` must be the same on all machines and of
    no other job on this port. Agents on several machines need `ENV` in their environment; without
    it their ranks refuse to start.

    >>> torchrun_argv(["-m", "ludic.cli", "train", "sort"], ranks=2)[1:5]
    ('-m', 'ludic.training.ranks.agent', '--nproc-per-node=2', '--max-restarts=0')
    """
    least = nodes if min_nodes is None else min_nodes
    check_value("ranks", ranks, least=1)
    check_value("max_restarts", max_restarts, least=0)
    check_value("rendezvous_timeout_s", rendezvous_timeout_s, least=1)
    check_value("min_nodes", least, f"there are {nodes} nodes", least=1, most=nodes)
    check_value("node", node, f"there are {nodes} nodes", least=0, below=nodes)
    if not command or (nodes > 1 and not host):
        raise ConfigError(
            f"torchrun needs a command ({' '.join(command)!r}), and {nodes} nodes the host ({host!r}) where they meet"
        )
    options = [f"--nproc-per-node={ranks}", f"--max-restarts={max_restarts}"]
    if nodes == 1:
        options += ["--nnodes=1", "--standalone"]
    else:
        timeouts = f"join_timeout={rendezvous_timeout_s},is_host={int(node == 0)}"
        options += [f"--nnodes={least}:{nodes}", f"--rdzv-id={run_id}", "--rdzv-backend=c10d"]
        options += [f"--rdzv-endpoint={host}:{port}", f"--rdzv-conf={timeouts}"]
    return (PYTHON, "-m", AGENT, *options, *command)
