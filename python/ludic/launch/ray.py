"""Runs processes on a Ray cluster. Ray places, watches and ends them; no training data goes through
it.

On the machines of the cluster runs an actor for each process, which holds it as its child.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ludic import __version__
from ludic.errors import ConfigError, LaunchError, MissingExtraError, on_error
from ludic.launch.guard import KILL_DEADLINE_S
from ludic.launch.local import LocalPlace
from ludic.launch.process import PYTHON, Ended, Place, Process, Started, check_processes

ROOM_S = 60.0
"""How long to wait for room on the cluster, and for the actor of a process to be up."""
CALL_S = 15.0
"""How long an actor may take to answer a call that does not wait."""
PROBE_S = 60.0

MODE, TOKEN = "RAY_AUTH_MODE", "token"
_WITHOUT_TOKEN = (
    "the Ray cluster at {where} demands no token, so whoever reaches it can run code on all its machines; start it with "
    f"{MODE}={TOKEN} (`ray get-auth-token --generate` makes a token), or set place.insecure=true"
)
OBJECT_STORE_BYTES = 80 << 20
"""Ray's smallest object store, nearly: nothing is put into it."""


@dataclass
class _Held:
    """A process and its actor."""

    process: Process
    bundle: int
    actor: Any = None
    stage: str = "idle"
    """idle; placing, until the actor describes its machine; starting; running."""
    reply: Any = None
    """The answer of the actor that is awaited: of `describe`, `start` or `wait`."""
    deadline: float = 0.0
    began: float = 0.0


class RayPlace(Place):
    """Processes on a Ray cluster, in one placement group with a bundle for each.

    `address`: `local` (a cluster on this machine, only for this place), `auto` (the cluster that
    this machine belongs to, or `RAY_ADDRESS`), `HOST:PORT`, or `ray://HOST:PORT`.

    A cluster that does not demand a token is refused, since whoever reaches it can run code as its
    user; with `insecure=True` it is used. `folder` is the run's folder, on a file system that all
    machines share: each process writes to `FOLDER/workers/NAME.log`, or to a temporary folder of
    its machine where `folder` does not exist. ludic must be installed on every machine, in the same
    version. `options` are passed to `ray.init`.

    Raises LaunchError if the cluster has no room within `room_s`, and ConfigError for a cluster
    without a token.
    """

    def __init__(
        self,
        processes: Sequence[Process],
        folder: Path,
        *,
        address: str = "local",
        insecure: bool = False,
        room_s: float = ROOM_S,
        **options: Any,
    ) -> None:
        check_processes(list(processes))
        self._folder, self._room_s, self._insecure = folder.absolute(), room_s, insecure
        self._ray = _connect(address, insecure=insecure, options=options)
        self._held = {process.name: _Held(process, number) for number, process in enumerate(processes)}
        self._hosts: dict[str, dict[str, Any]] = {}
        self._is_open = True
        self._group: Any = None
        with on_error(self.close):
            if not (insecure or address == "local" or address.startswith("ray://")):
                _check_token_is_demanded(self._ray.get_runtime_context().gcs_address)
            self._reserve()

    def start(self, process: Process) -> None:
        held = self._held[process.name]
        if held.stage != "idle":
            raise LaunchError(f"{process.name} runs already; stop it first")
        held.process = process
        if held.actor is None:
            self._place_actor(held)
        else:
            self._begin(held)

    def poll(self) -> list[Started | Ended]:
        awaited = {held.reply: held for held in self._held.values() if held.reply is not None}
        news: list[Started | Ended] = []
        for reply in self._wait(list(awaited), 0):
            news += self._advance(awaited[reply])
        for held in self._held.values():
            if held.stage in ("placing", "starting") and time.monotonic() > held.deadline:
                news.append(self._lose(held, f"no room for it within {self._room_s:g} s: {self._describe_room([held.process])}"))
        return news

    def ask(self, name: str, number: int = signal.SIGTERM) -> None:
        held = self._held[name]
        if held.stage == "running":
            held.actor.ask.remote(int(number))

    def stop(self, names: Sequence[str], grace_s: float) -> list[Ended]:
        chosen = [self._held[name] for name in names if self._held[name].stage != "idle"]
        replies = {held.process.name: held.actor.stop.remote(grace_s) for held in chosen if held.stage == "running"}
        answered = self._wait(list(replies.values()), grace_s + KILL_DEADLINE_S + CALL_S)
        ended = []
        for held in chosen:
            reply = replies.get(held.process.name)
            end = self._read_end(held, reply) if reply in answered else None
            ended.append(end or self._lose(held, "it was stopped before it had started, or its machine is gone"))
        return ended

    def close(self, grace_s: float = 0.0) -> list[Ended]:
        if not self._is_open:
            return []
        self._is_open = False
        try:
            return self.stop(list(self._held), grace_s)
        finally:
            if self._group is not None:
                self._ray.util.remove_placement_group(self._group)
            self._ray.shutdown()

    def _reserve(self) -> None:
        """Reserve a bundle for each process, put an actor into each, and compare the versions."""
        processes = [held.process for held in self._held.values()]
        self._group = self._ray.util.placement_group([_bundle(process) for process in processes], strategy="PACK")
        deadline = time.monotonic() + self._room_s
        if not self._group.wait(self._room_s):
            raise LaunchError(f"no room within {self._room_s:g} s: {self._describe_room(processes)}")
        for held in self._held.values():
            self._place_actor(held)
        replies = [held.reply for held in self._held.values()]
        answered = self._wait(replies, max(0.0, deadline + self._room_s - time.monotonic()))
        for held in self._held.values():
            if held.reply not in answered:
                raise LaunchError(f"the actor of {held.process.name} is not up after {self._room_s:g} s; check the cluster")
            self._note_machine(held)
            held.stage, held.reply = "idle", None

    def _wait(self, replies: list[Any], timeout_s: float) -> list[Any]:
        """The replies that have come within `timeout_s`."""
        try:
            return list(self._ray.wait(replies, num_returns=len(replies), timeout=timeout_s)[0]) if replies else []
        except ConnectionError as error:
            raise LaunchError(f"the Ray cluster does not answer any more: {error}") from error

    def _place_actor(self, held: _Held) -> None:
        """Begin to start the actor of a process in its bundle."""
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=held.bundle
        )
        holder = self._ray.remote(Holder).options(
            num_cpus=held.process.cpus, num_gpus=held.process.gpus, scheduling_strategy=strategy, max_restarts=0
        )
        held.actor = holder.remote(str(self._folder), os.getcwd())
        held.stage, held.reply, held.deadline = "placing", held.actor.describe.remote(), time.monotonic() + self._room_s

    def _note_machine(self, held: _Held) -> None:
        """Remember the machine of an actor, which has answered. Raises LaunchError if it cannot
        start, or has other versions than this machine."""
        name = held.process.name
        try:
            machine = self._ray.get(held.reply, timeout=CALL_S)
        except self._ray.exceptions.RayError as error:
            raise LaunchError(f"the actor of {name} cannot start; install ludic on every machine: {_last_line(error)}") from error
        for package, own in installed_versions().items():
            if machine["versions"][package] != own:
                raise LaunchError(f"{machine['host']} has {package} {machine['versions'][package]}, not {own}; install the same")
        if not (machine["token"] or self._insecure):
            raise ConfigError(_WITHOUT_TOKEN.format(where=machine["address"]))
        self._hosts[name] = machine

    def _begin(self, held: _Held) -> None:
        """Make the actor start its process."""
        addresses = {name: machine["address"] for name, machine in self._hosts.items()}
        argv = held.process.resolve(PYTHON, addresses)
        held.reply = held.actor.start.remote(held.process.name, list(argv), dict(held.process.env))
        held.stage, held.deadline = "starting", time.monotonic() + self._room_s

    def _advance(self, held: _Held) -> list[Started | Ended]:
        """Handle the answer that has come."""
        if held.stage == "placing":
            try:
                self._note_machine(held)
            except LaunchError as error:
                return [self._lose(held, str(error))]
            self._begin(held)
            return []
        if held.stage == "running":
            return [self._read_end(held, held.reply)]
        try:
            reply = self._ray.get(held.reply, timeout=CALL_S)
        except self._ray.exceptions.RayError as error:
            return [self._lose(held, _last_line(error))]
        if "error" in reply:
            return [self._lose(held, reply["error"])]
        held.stage, held.reply, held.began = "running", held.actor.wait.remote(), time.monotonic()
        return [Started(held.process.name, reply["pid"], reply["host"], reply["log"])]

    def _read_end(self, held: _Held, reply: Any) -> Ended:
        """How a process ended, of which its actor has answered; it can start again in it."""
        try:
            ended = Ended(**self._ray.get(reply, timeout=CALL_S))
        except self._ray.exceptions.RayError as error:
            return self._lose(held, _last_line(error))
        held.stage, held.reply = "idle", None
        return ended

    def _lose(self, held: _Held, reason: str) -> Ended:
        """Give up the actor of a process; a restart makes a new one."""
        if held.actor is not None:
            self._ray.kill(held.actor)
        seconds = time.monotonic() - held.began if held.stage == "running" else 0.0
        held.actor, held.stage, held.reply = None, "idle", None
        return Ended(held.process.name, None, None, seconds, reason)

    def _describe_room(self, processes: Sequence[Process]) -> str:
        """The resources that were requested, and the resources of the cluster."""
        wanted = ", ".join(f"{process.name} {_amounts(_bundle(process))}" for process in processes)
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        machines = "; ".join(_amounts(node) for node in nodes)
        free = _amounts(self._ray.available_resources())
        return f"requested {wanted}; the cluster has {len(nodes)} machines ({machines}), of which {free} free; add machines or request less"


def _bundle(process: Process) -> dict[str, float]:
    """The resources reserved for a process. Ray refuses empty bundles."""
    bundle = {"CPU": process.cpus, "GPU": process.gpus}
    return {name: amount for name, amount in bundle.items() if amount} or {"CPU": 0.001}


def _amounts(resources: dict[str, float]) -> str:
    """Example: `2 CPU, 0.5 GPU`."""
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in ("CPU", "GPU") if name == "CPU" or name in resources)


def _last_line(error: Exception) -> str:
    """What Ray says of an error, without its list of possible causes."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[-1]
    return line.split(" Some common causes")[0].strip()


def _connect(address: str, *, insecure: bool, options: dict[str, Any]) -> ModuleType:
    """Connect to the cluster, or start a local one. Returns the module `ray`."""
    if not insecure and os.environ.setdefault(MODE, TOKEN) != TOKEN:
        raise ConfigError(f"{MODE} is {os.environ[MODE]}, and a token is required; unset it, or set place.insecure=true")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        import ray.util
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise MissingExtraError.for_extra("ray", "ray") from error
    if ray.is_initialized():
        raise ConfigError("this process is connected to a Ray cluster already; call ray.shutdown() first")
    if address == "local":
        options = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES, **options}
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise LaunchError(f"the Ray cluster {address} cannot be used ({error}); check it and RAY_AUTH_TOKEN") from error
    return ray


def _check_token_is_demanded(gcs_address: str) -> None:
    """Raise ConfigError unless the cluster refuses a request without a token. It is asked by
    another process, because a process has one way of authentication."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")} | {MODE: "disabled"}
    command = [sys.executable, "-m", "ray.scripts.scripts", "status", "--address", gcs_address]
    try:
        answer = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PROBE_S)
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"the Ray cluster at {gcs_address} did not answer within {PROBE_S:g} s") from error
    if answer.returncode == 0 or "AuthenticationError" not in answer.stderr + answer.stdout:
        raise ConfigError(_WITHOUT_TOKEN.format(where=gcs_address))


WATCH_S = 0.05


def installed_versions() -> dict[str, str]:
    """The versions that all machines of a run must have in common."""
    return {"ludic": __version__, "Python": ".".join(platform.python_version_tuple()[:2])}


class Holder:
    """Holds the child process of one `Process`, and ends it when this actor ends, however that is.

    Only names, arguments, variables and what became of the process cross Ray.
    """

    def __init__(self, folder: str, cwd: str) -> None:
        if os.path.isdir(cwd):
            os.chdir(cwd)  # for recipes that name code of the current folder
        run = Path(folder)
        if not run.is_dir():  # not on a shared file system: logs stay on this machine
            run = Path(tempfile.gettempdir()) / f"ludic-{os.getuid()}" / run.name
        self._place = LocalPlace(run, gpus=[])  # Ray shows this actor its GPUs, and the child inherits that
        self._name, self._raylet = "", os.getppid()
        self._ended: Ended | None = None

    async def describe(self) -> dict[str, Any]:
        """This machine."""
        import ray.util

        return {
            "host": socket.gethostname(),
            "address": ray.util.get_node_ip_address(),
            "versions": installed_versions(),
            "token": os.environ.get(MODE) == TOKEN,  # set by `ray start` where it demands a token
        }

    async def start(self, name: str, argv: Sequence[str], env: Mapping[str, str]) -> dict[str, Any]:
        """Start the process. Returns its `pid` and `log`, or the `error`."""
        self._name, self._ended = name, None
        try:
            self._place.start(Process(name, "held", tuple(argv), env=dict(env)))
        except LaunchError as error:
            return {"error": str(error)}
        started = self._place.poll()[0]
        assert isinstance(started, Started)
        return {"pid": started.pid, "host": started.host, "log": started.log}

    async def wait(self) -> dict[str, Any]:
        """How the process ended, once it has."""
        while self._ended is None:
            if os.getppid() != self._raylet:
                # Ray's own process of the machine is gone. Ray ends its actors then, but sees no
                # end in a container whose first process leaves the dead uncollected.
                self._place.close()
                os._exit(1)
            self._ended = next((report for report in self._place.poll() if isinstance(report, Ended)), None)
            await asyncio.sleep(0 if self._ended else WATCH_S)
        return vars(self._ended)

    async def ask(self, number: int) -> None:
        self._place.ask(self._name, number)

    async def stop(self, grace_s: float) -> dict[str, Any]:
        """End the process as `Place.stop` does. Returns how it ended."""
        if grace_s > 0:
            self._place.ask(self._name)
        waiting = asyncio.ensure_future(self.wait())
        done, _ = await asyncio.wait([waiting], timeout=grace_s)
        if not done:
            self._ended = self._ended or next(iter(self._place.stop([self._name], 0.0)), None)
            self._ended = self._ended or Ended(self._name, None, None, 0.0, "it did not run")
        return await waiting
