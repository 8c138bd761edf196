"""The settings of the engine that samples answers for training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Optional

from ludic.errors import ConfigError
from ludic.inference.sampling import make_sampling

KINDS = ("local", "vllm")


@dataclass
class InferenceSection:
    """The engine that samples. `inference=vllm` on the command line is short for
    `inference.kind=vllm`."""

    kind: Optional[str] = None  # noqa: UP045  OmegaConf reads this annotation at run time
    """`local`: the model in this process. `vllm`: a vLLM server. Null: vllm if `python` or `url`
    is set, else local."""
    python: Optional[str] = None  # noqa: UP045
    """Python interpreter of an environment with vLLM, from which a server is started for the
    run. Null: that of ./.venv-vllm, if it exists."""
    url: Any = None
    """A server that runs already, such as http://127.0.0.1:8000, or a list of them. It is
    neither started nor stopped."""
    device: str = "auto"
    """Device of a server that is started: cpu, cuda, or auto."""
    server_args: list[str] = field(default_factory=list)
    """More arguments of a server that is started, such as [--tensor-parallel-size,'2']."""
    weights: Optional[str] = None  # noqa: UP045
    """How weights are sent to a server: gloo, ludic_nccl or disk. Null: gloo, which also works
    for a trainer and a server on one GPU; ludic_nccl needs separate GPUs. A server that runs
    already chooses between these two itself; disk needs a server that can read the run's folder."""
    trainer_address: str = "127.0.0.1"
    """The address of this process for the servers that receive its weights; set it for servers on
    other machines."""
    timeout_s: float = 600.0
    """Deadline in seconds for the start of a server and for each of its answers."""
    push_timeout_s: float = 180.0
    """Seconds in which a server of `place.servers` must have loaded new weights. If none has, or at
    the first version not all have, the run ends."""
    push_wait_s: float = 10.0
    """Seconds that a push waits for the other servers of `place.servers` once one has the new
    weights. Those that need longer are sent no requests until they have them."""
    batches_ahead: int = 0
    """Batches that are generated while another trains; samples are then up to that many policy
    versions old. 0: none."""
    preflight: bool = True
    """Before the first step, compare the probabilities that trainer and sampler give the same
    tokens, and stop if they differ."""
    preflight_threshold: Optional[float] = None  # noqa: UP045  OmegaConf reads this annotation at run time
    """Largest mean difference of log-probabilities that is accepted, in nats; null: 0.02, and 0.1
    for a policy that computes in bfloat16 or has quantised weights."""


def choose_kind(section: InferenceSection) -> Literal["local", "vllm"]:
    """The engine that the settings select. Raises ConfigError for settings that contradict each
    other."""
    names_server = section.python is not None or section.url is not None
    kind = section.kind or ("vllm" if names_server else "local")
    if kind not in KINDS:
        raise ConfigError(f"inference ({kind}) must be local or vllm")
    if kind == "local" and names_server:
        raise ConfigError("inference=local samples in this process; leave inference.python and inference.url out, or use vllm")
    if section.python is not None and section.url is not None:
        raise ConfigError("inference.python starts a server and inference.url names a running one; set only one of them")
    if section.weights not in (None, "gloo", "ludic_nccl", "disk"):
        raise ConfigError(f"inference.weights ({section.weights}) must be gloo, ludic_nccl or disk")
    if section.device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"inference.device ({section.device}) must be auto, cpu or cuda")
    if section.batches_ahead < 0:
        raise ConfigError(f"inference.batches_ahead ({section.batches_ahead}) must be >= 0; 0 generates and trains in turn")
    if section.timeout_s <= 0:
        raise ConfigError(f"inference.timeout_s ({section.timeout_s}) must be > 0; a call without a deadline may never end")
    if section.push_timeout_s <= 0 or section.push_wait_s < 0:
        raise ConfigError(
            f"inference.push_timeout_s ({section.push_timeout_s}) must be > 0, and inference.push_wait_s ({section.push_wait_s}) >= 0"
        )
    return "vllm" if kind == "vllm" else "local"


@dataclass(frozen=True)
class LogprobConvention:
    """The distribution whose log-probabilities sampler and trainer compute. It must be the same one
    in both, or every ratio is wrong."""

    processed: bool
    """The sampler returns log-probabilities of the distribution that it samples from; if False,
    those of the model's raw logits."""
    temperature: float
    """The trainer's policy is that of logits / temperature."""


def choose_logprob_convention(rollout: object) -> LogprobConvention:
    """The convention for a section `rollout`.

    Samples come from the policy at `temperature`, and that policy is trained. With top-p, top-k,
    min-p or a penalty they come from another distribution, which the trainer does not know: both
    use the raw logits. So they do in greedy decoding (`temperature` 0).
    """
    sampling = make_sampling(rollout)
    if sampling.is_cut or sampling.temperature in (0.0, 1.0):
        return LogprobConvention(processed=False, temperature=1.0)
    return LogprobConvention(processed=True, temperature=sampling.temperature)
