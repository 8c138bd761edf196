"""The settings of the processes of a run: how many there are, where they run, who restarts them,
the engine that samples, and the queue between actors and the trainer."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Optional
from urllib.parse import parse_qsl, urlsplit

from ludic.agents.mcp_tools import ON_EXIT
from ludic.errors import ConfigError
from ludic.inference.request import make_sampling
from ludic.recipes.rules import setting

_ACTORS = "place.actors or queue.url"
_DEADLINE = "a call without a deadline may never end"


@dataclass
class TrainersSection:
    """The processes of a run. By default there is one."""

    on: str = setting("local", choices=("local", "ray", "slurm"))
    """Where processes run. `local`: this machine. `ray`: a Ray cluster. `slurm`: a job, for which a
    script is written and not submitted. `place=ray` is short for `place.on=ray`."""
    address: Optional[str] = setting(  # noqa: UP045  OmegaConf reads this annotation at run time
        None, needs="place.on=ray"
    )
    """The Ray cluster: auto, the one that this machine belongs to; local, one on this machine for
    this run alone; or HOST:PORT. Null: auto."""
    insecure: bool = setting(False, needs="place.on=ray")
    """Use a Ray cluster that demands no token: whoever reaches it can run code on its machines."""
    trainers: int = setting(1, least=1, relation="a multiple of place.nodes")
    """Processes (ranks) that train one model together, over all machines. `ranks=2` is short for
    `place.trainers=2`."""
    nodes: int = setting(
        1, least=1, needs="place.on=ray or place.on=slurm", hint="without them, torchrun starts the ranks of each machine"
    )
    """Machines of the trainers, which are divided evenly among them; with `on=slurm`, machines of
    the whole job."""
    min_nodes: Optional[int] = setting(None, least=1, relation="at most place.nodes")  # noqa: UP045
    """Machines with which trainers go on if others are lost. Null: all are needed."""
    restarts: int = setting(3, least=0)
    """How often a process that fails is started again in ten minutes; one failure more ends the
    run, which can be resumed."""
    stop_s: float = setting(120.0, least=1)
    """Seconds that trainers have to finish their step and save when they are asked to stop, before
    they are killed. A Slurm job asks them this and a minute before its time limit."""
    trainer_cpus: float = setting(1, least=0)
    """Cores that Ray or Slurm reserves for each trainer."""
    trainer_gpus: float = setting(0, least=0)
    """GPUs of each trainer. On this machine 0 means all of them, shared by all processes."""
    slurm_time: str = "24:00:00"
    """Time limit of a Slurm job. Shortly before it the run is saved, and the job queued again."""
    slurm_options: list[str] = field(default_factory=list, metadata={"needs": "place.on=slurm"})
    """More options of sbatch, such as ['--partition=gpu','--account=lab']."""


@dataclass
class PlaceSection(TrainersSection):
    """The processes of a run. By default there is one, which samples and trains."""

    actors: int = setting(0, least=0)
    """Actors: processes that sample for the trainer, each with a model of its own. 0: none; with
    `queue.url`, actors that are started by hand are waited for."""
    actor_cpus: float = setting(1, least=0)
    """Cores that Ray or Slurm reserves for each actor."""
    actor_gpus: float = setting(0, least=0)
    """GPUs of each actor; less than 1 shares one."""
    servers: int = setting(0, least=0, excludes="inference.url or inference.kind=local")
    """Inference servers that are started for the run, and from which trainer and actors sample. 0:
    none; `inference.url` names servers that run already."""
    server_cpus: float = setting(1, least=0)
    """Cores that Ray or Slurm reserves for each server."""
    server_gpus: float = setting(0, least=0)
    """GPUs of each server; less than 1 shares one."""


SHORT_FORMS = {"ranks": "place.trainers", **{name: f"place.{name}" for name in ("trainers", "actors", "servers")}}
"""Settings that have a short name on the command line. A mapping is the section of this name."""


def parse_place(value: Any) -> dict[str, Any]:
    """The settings that `place=VALUE` stands for: `ray`, or `ray://HOST:PORT`."""
    text = str(value)
    return {"on": "ray", "address": text} if text.startswith("ray://") else {"on": text}


def needs_launcher(place: TrainersSection) -> bool:
    """Whether the command of the user only starts and watches the processes of the run. Otherwise
    it trains itself, and starts actors as well."""
    return place.on != "local" or place.trainers > 1


def is_on_one_machine(section: TrainersSection) -> bool:
    """Whether all processes of the run are on this machine."""
    return section.on == "local" or (section.on == "ray" and section.address == "local")


def check_place(section: TrainersSection) -> None:
    """Raise `ConfigError` for one GPU and a share of another."""
    for name, value in asdict(section).items():
        if name.endswith("_gpus") and value > 1 and value != int(value):
            raise ConfigError(f"place.{name} ({value}) must be a whole number, or less than 1 to share a GPU")


@dataclass
class RanksSection:
    """Waits of several ranks for each other, in seconds. With one process none of them is used."""

    timeout_s: float = setting(600.0, above=0)
    """How long a rank waits in an exchange of tensors for the slowest one."""
    rendezvous_timeout_s: float = setting(600.0, above=0)
    """How long the ranks wait for each other at the start."""
    port: Optional[int] = setting(None, least=1, most=65535)  # noqa: UP045
    """Port at which ranks meet under Slurm; null: one that follows from the job's id. With
    `place.nodes`, the port of torchrun's agents; null: 29400."""
    step_s: float = setting(3600.0, above=0)
    """Longest time of a step without the phases below. A rank that exceeds this or one of the
    following prints the stacks of all its threads and exits with 75."""
    generation_s: float = setting(7200.0, above=0)
    """Longest time until a batch is sampled."""
    save_s: float = setting(3600.0, above=0)
    """Longest time of a checkpoint."""
    load_s: float = setting(3600.0, above=0)
    """Longest time of loading a checkpoint."""
    publish_s: float = setting(3600.0, above=0)
    """Longest time of sending weights to servers."""
    evaluation_s: float = setting(7200.0, above=0)
    """Longest time of a held-out measurement."""


def phase_deadlines(section: RanksSection) -> dict[str, float]:
    """The deadline of each phase of the watchdog, in seconds."""
    phases = ("step", "generation", "save", "load", "publish", "evaluation")
    return {phase: getattr(section, f"{phase}_s") for phase in phases}


@dataclass
class InferenceSection:
    """The engine that samples. `inference=vllm` on the command line is short for
    `inference.kind=vllm`."""

    kind: Optional[str] = setting(None, choices=("local", "vllm"))  # noqa: UP045
    """`local`: the model in this process. `vllm`: a vLLM server. Null: vllm if `python` or `url`
    is set, else local."""
    python: Optional[str] = setting(None, excludes="inference.kind=local or inference.url")  # noqa: UP045
    """Python interpreter of an environment with vLLM, from which a server is started for the run.
    Null: the one of ./.venv-vllm, if it exists."""
    url: Any = field(default=None, metadata={"excludes": "inference.kind=local"})
    """A server that runs already, such as http://127.0.0.1:8000, or a list of them. It is
    neither started nor stopped."""
    colocate: bool = setting(
        False,
        needs="inference.kind=vllm or inference.python",
        excludes="inference.url or place.trainers or place.servers or place.actors or queue.url or inference.batches_ahead or "
        "rollout.over_sampling_factor or rollout.group_filter or info_seed.num_seeds or reward_model or inference.weights=ludic_nccl",
        hint="trainer and server take turns on one device, and nothing else may compute on it",
    )
    """Trainer and server share one GPU, in turn: the server sleeps while the trainer computes, and
    is woken to get the new weights; `trainer.offload` says what the trainer leaves there
    meanwhile."""
    device: str = setting("auto", choices=("auto", "cpu", "cuda"))
    """Device of a server that is started: cpu, cuda, or auto."""
    server_args: list[str] = field(default_factory=list)
    """More arguments of a server that is started, such as [--tensor-parallel-size,'2']."""
    weights: Optional[str] = setting(None, choices=("gloo", "ludic_nccl", "disk"))  # noqa: UP045
    """How weights are sent to a server: gloo, ludic_nccl or disk. Null: gloo, which also works
    for a trainer and a server on one GPU; ludic_nccl needs separate GPUs. A server that runs
    already chooses between these two itself; disk needs a server that can read the run's folder."""
    push: str = setting("auto", choices=("auto", "whole"))
    """`auto`: send a server what changed in a step, where that is smaller than all weights. For
    it, the trainer and each worker of the server keep the weights in host memory. `whole`: send
    all. The servers of `place.servers` load all weights."""
    trainer_address: str = "127.0.0.1"
    """The address of this process for the servers that receive its weights; set it for servers on
    other machines."""
    timeout_s: float = setting(600.0, above=0, hint=_DEADLINE)
    """Deadline in seconds for the start of a server and for each of its answers."""
    push_timeout_s: float = setting(180.0, above=0, hint=_DEADLINE)
    """Seconds in which a server of `place.servers` must have loaded new weights. If none has, or at
    the first version not all have, the run ends."""
    push_wait_s: float = setting(10.0, least=0)
    """Seconds that a push waits for the other servers of `place.servers` once one has the new
    weights. Those that need longer are sent no requests until they have them."""
    routing: str = setting(
        "least_busy",
        choices=("least_busy", "session", "prefix"),
        needs="inference.kind=vllm or inference.python or inference.url",
    )
    """Which of several servers gets a request: the least busy one; the one of the episode's last
    request; or the one that has cached most of the prompt. An overloaded one is passed over."""
    max_kv_use: Optional[float] = setting(0.9, above=0, most=1, optional=True)  # noqa: UP045
    """Requests wait in this process while a server reports that it uses more than this share of
    its KV cache. Null: they never do."""
    batches_ahead: int = setting(0, least=0, hint="0 generates and trains in turn")
    """Batches that are generated while another trains; samples are then up to that many policy
    versions old. 0: none."""
    preflight: bool = True
    """Before the first step, compare the probabilities that trainer and sampler give the same
    tokens, and stop if they differ."""
    preflight_threshold: Optional[float] = None  # noqa: UP045
    """Largest mean difference of log-probabilities that is accepted, in nats; null: 0.02, and 0.1
    for a policy that computes in bfloat16 or has quantised weights."""


def choose_kind(section: InferenceSection) -> Literal["local", "vllm"]:
    """The engine that the settings select."""
    names_server = section.python is not None or section.url is not None
    return "vllm" if (section.kind or ("vllm" if names_server else "local")) == "vllm" else "local"


@dataclass(frozen=True)
class LogprobConvention:
    """The distribution whose log-probabilities sampler and trainer compute. It must be the same one
    in both, or every ratio is wrong."""

    processed: bool
    """The sampler returns log-probabilities of the distribution that it samples from; if False, of
    the model's raw logits."""
    temperature: float
    """The trainer's policy is softmax(logits / temperature)."""


def choose_logprob_convention(rollout: object) -> LogprobConvention:
    """The convention for a section `rollout`.

    Samples come from the policy at `temperature`, and that policy is trained. With top-p, top-k,
    min-p or a penalty they come from another distribution, which the trainer does not know: both
    use the raw logits. So they do in greedy decoding (`temperature` 0). With `keep_candidates` the
    trainer knows what top-p, top-k and min-p left, and trains the distribution sampled from.
    """
    sampling = make_sampling(rollout)
    if getattr(rollout, "keep_candidates", False):
        return LogprobConvention(processed=True, temperature=sampling.temperature)
    if sampling.is_cut or sampling.temperature in (0.0, 1.0):
        return LogprobConvention(processed=False, temperature=1.0)
    return LogprobConvention(processed=True, temperature=sampling.temperature)


URL_VARIABLE = "LUDIC_QUEUE_URL"
QUEUE_FILE = "queue.sqlite"
"""The queue in the folder of a run, if no address is given."""


@dataclass
class QueueSection:
    """The queue of a run with actors (`place.actors`)."""

    url: Optional[str] = None  # noqa: UP045
    """redis://HOST:6379/0, or rediss:// for TLS: a Redis server, for actors on other machines. A
    name that ends in .sqlite: a file in the run's folder, for actors on this machine, which is the
    default with `place.actors`. The variable LUDIC_QUEUE_URL replaces the address; one with a
    password belongs there."""
    order: str = setting("exact", choices=("exact", "arrival"), needs=_ACTORS)
    """`exact`: each batch has its own prompts, sampled by the version `inference.batches_ahead`
    before it, so that the run does not depend on when actors finish or die. `arrival`: a batch has
    the prompts that are finished first."""
    max_lag: Optional[int] = setting(  # noqa: UP045
        None,
        relation="more than inference.batches_ahead",
        needs=_ACTORS,
        excludes="queue.order=exact",
        hint="it belongs to queue.order=arrival",
    )
    """With `order=arrival`: a step waits for prompts that are still being answered by a version
    this much older. Null: `inference.batches_ahead` + 2."""
    prompts_per_entry: Optional[int] = setting(  # noqa: UP045
        None, least=1, relation="a divisor of rollout.prompts", needs=_ACTORS
    )
    """Prompts that an actor answers at a time; must divide `rollout.prompts`. More are faster,
    fewer are shared by more actors. Null: at most a quarter of a batch. The last digits of results
    depend on it."""
    lease_s: float = setting(60.0, above=0, needs=_ACTORS)
    """Seconds after which another actor takes the prompts of one that died."""
    patience_s: float = setting(300.0, above=0, needs=_ACTORS)
    """Seconds without an answer of the queue, or without any actor at work, after which the run
    ends; it can be resumed."""


def find_queue(section: QueueSection, folder: Path) -> str:
    """The address of the queue of the run in `folder`, with the password if it has one: never print
    it. Raises `ConfigError` if `LUDIC_QUEUE_URL` is no address."""
    address = os.environ.get(URL_VARIABLE)
    if address and "://" not in address and not address.endswith(".sqlite"):
        raise ConfigError(f"{URL_VARIABLE} ({len(address)} characters) must begin with redis:// or rediss://, or end in .sqlite")
    address = address or section.url or QUEUE_FILE
    return address if "://" in address else str(folder / address)


def check_url(url: str) -> None:
    """Raise `ConfigError` for text that is no address of a queue, and for one that may have a
    password."""
    if "://" not in url and url.endswith(".sqlite"):
        return
    start = url.find("://") + 3 if "://" in url else 0
    _, at, place = url[start:].rpartition("@")  # a password may hold any other character
    shown = f"{url[:start]}{'***@' if at else ''}{place.partition('?')[0].partition('#')[0]}"
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ConfigError(f"queue.url ({shown}) has no readable host") from None
    if parts.scheme not in ("redis", "rediss"):
        raise ConfigError(f"queue.url ({shown}) must begin with redis:// or rediss://, or be a file name in .sqlite")
    after_host = parts.path + parts.query + parts.fragment
    named = any(name.lower().endswith("password") for name, _ in parse_qsl(parts.query))
    if parts.password or "@" in after_host or named:  # a password with a `/` ends the host, as in redis://:/secret@host
        raise ConfigError(f"queue.url ({shown}) must have no password; set {URL_VARIABLE} to the address with it")


@dataclass
class McpSection:
    """Servers of the Model Context Protocol in `tools`."""

    per_episode: bool = setting(False, needs="tools")
    """Every episode that calls a tool has a server of its own, for servers with a state; false: one
    server for all episodes of a process."""
    on_exit: str = setting("restart", choices=ON_EXIT, needs="tools")
    """When a server ends during a call. `restart`: the call fails, and the next one starts the
    server again. `lose`: the episode fails."""
    start_timeout_s: float = setting(60.0, above=0, needs="tools")
    """Seconds until a server that was started has answered."""
