"""The engine that samples for training, in this process or on vLLM servers. It is open during the
reinforcement."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ludic.distributed.interfaces import PolicyPublisher
from ludic.errors import ConfigError, InferenceError
from ludic.inference.client import ChatClient, Publisher
from ludic.launch.local import LOOPBACK
from ludic.models.published import has_frozen_weights
from ludic.recipes.actors import choose_lag
from ludic.recipes.processes import InferenceSection, choose_kind, choose_logprob_convention
from ludic.recipes.schema import Recipe
from ludic.runs.adapters import SERVED_NAME, try_adapters
from ludic.runs.launching import list_servers
from ludic.runs.rollouts import make_training_inference
from ludic.runs.servers import connect_to_servers, make_client, start_server
from ludic.tasks import EpisodicTask
from ludic.training import ranks
from ludic.training.backend.offload import Offload
from ludic.training.loop.step_record import PhaseTimer
from ludic.training.preflight.check import MAX_DIFFERENCE, MAX_ROUNDING, Preflight

logger = logging.getLogger(__name__)

HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head dimensions that vLLM 0.32 supports on a CPU. A server with another one is healthy until
its first request."""


@dataclass(frozen=True)
class Sampler:
    """A client that samples answers, and a publisher that sends it weights."""

    client: ChatClient
    publisher: PolicyPublisher | None
    model_name: str
    remote: bool
    """It is a server. Its weights must be replaced by the policy's before the first answer."""


@asynccontextmanager
async def open_sampler(
    recipe: Recipe,
    model: Any,
    tokenizer: Any,
    folder: Path,
    *,
    log: Path,
    note: Callable[[str], None],
    pushes: bool = True,
    timer: PhaseTimer | None = None,
    is_follower: bool = False,
    is_stopped: Callable[[], bool] = lambda: False,
    find_end: Callable[[], str | None] = lambda: None,
) -> AsyncIterator[Sampler]:
    """Open the sampler of a recipe, and start a server if it asks for one; the server is stopped at
    exit.

    `folder` has the policy in Hugging Face layout, for a server to load. Without `pushes` a server
    that runs already keeps its weights. `timer` measures `server_start`. `is_follower`: this is
    another rank than 0, which has the only sampler; its stand-in here is never called. `is_stopped`
    and `find_end` are asked while the servers of the run are waited for: whether the run was asked
    to stop, and why none will answer."""
    if is_follower:
        elsewhere: Any = object()
        yield Sampler(elsewhere, elsewhere, "", remote=choose_kind(recipe.inference) != "local")
        return
    if choose_kind(recipe.inference) == "local":
        yield _make_local_sampler(recipe, model, tokenizer)
        return
    if recipe.place.servers:
        placed = connect_to_servers(
            recipe, model, tokenizer, folder.parent, pushes=pushes, note=note, is_stopped=is_stopped, find_end=find_end
        )
        note(f"Waiting for {', '.join(list_servers(recipe.place))}; their output is in {folder.parent / 'workers'}")
        async with AsyncExitStack() as opened:
            with (timer or PhaseTimer()).phase("server_start"):
                client, publisher = await opened.enter_async_context(placed)
            yield Sampler(client, publisher, SERVED_NAME, remote=True)
        return
    if recipe.inference.url is not None:
        async with _connect(recipe, model, tokenizer, _list_urls(recipe.inference), folder, note if pushes else None) as sampler:
            note(f"Sampling from {', '.join(_list_urls(recipe.inference))}")
            yield sampler
        return
    if recipe.inference.colocate:  # a server does not start on a device whose memory is taken
        await asyncio.to_thread(Offload([model]).to_host)
    async with (
        _run_server(recipe, folder, log, note, timer or PhaseTimer(), pushes) as url,
        _connect(recipe, model, tokenizer, [url], folder, note if pushes else None) as sampler,
    ):
        yield sampler


def check_inference(recipe: Recipe, model: Any) -> None:
    """Raise `ConfigError` for settings or a model that the sampler would fail with later."""
    section, where = recipe.inference, recipe.evaluation.on
    is_local = choose_kind(section) == "local"
    if where not in ("trainer", "servers") or (where == "servers" and (is_local or recipe.trainer.sync_every_steps != 1)):
        raise ConfigError(f"evaluation.on ({where}) must be trainer, or servers (inference=vllm, trainer.sync_every_steps=1)")
    if is_local:
        return
    if section.colocate and ranks.is_distributed():
        raise ConfigError("inference.colocate is for one trainer on one GPU; leave it out, or train with one process")
    if section.colocate and where == "trainer" and (recipe.trainer.eval_every_n_steps or recipe.trainer.eval_at_start):
        raise ConfigError(
            "evaluation.on (trainer) needs the GPU in the server's turn (inference.colocate); set evaluation.on=servers"
        )
    from ludic.inference.vllm.endpoints import VllmEndpoints
    from ludic.inference.vllm.launch import check_has_vllm, is_cpu_build, server_python
    from ludic.inference.vllm.servers import HEALTH_TIMEOUT_S, server_url
    from ludic.models.wrappers import find_text_config

    if section.url is not None:
        for url in _list_urls(section):
            try:
                VllmEndpoints(server_url(url)).call("get", "/health", timeout_s=HEALTH_TIMEOUT_S)
            except InferenceError as error:
                raise ConfigError(f"inference.url ({url}) does not answer: {error}; start a server with `ludic serve`") from error
        return
    if recipe.place.servers and recipe.place.on != "local":
        return  # they find vLLM, or not, on their own machines
    python = server_python(section.python)
    check_has_vllm(python)
    config = find_text_config(model)
    if config is None or not (section.device == "cpu" or (section.device == "auto" and is_cpu_build(python))):
        return
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if size not in HEAD_DIMS:
        raise ConfigError(
            f"attention heads have {size} dimensions; vLLM on a CPU has {', '.join(map(str, HEAD_DIMS))}; set inference=local, or "
            f"network.hidden_size to 32 or more times network.num_heads (now {config.hidden_size} and {config.num_attention_heads})"
        )


def _make_local_sampler(recipe: Recipe, model: Any, tokenizer: Any) -> Sampler:
    """A sampler on the trainer's own model. If batches are generated ahead, or if the model has
    adapters, which are merged for sampling, it has a copy of the weights, updated by publishing.
    Of quantised weights it has none if it gets new weights after each step: they would be whole."""
    from ludic.distributed.publisher import LocalPublisher
    from ludic.inference.local.client import LocalChatClient
    from ludic.models.quantization import find_quantized_layers
    from ludic.models.wrappers import has_adapters

    convention = choose_logprob_convention(recipe.rollout)
    overlaps = recipe.inference.batches_ahead > 0 or choose_lag(recipe) > 0
    every = recipe.trainer.sync_every_steps
    is_shared = not overlaps and every == 1 and not ranks.is_distributed() and bool(find_quantized_layers(model))
    client = LocalChatClient(
        model,
        tokenizer,
        max_batch_size=recipe.rollout.concurrency,
        copy_model=overlaps or (has_adapters(model) and every > 0 and not is_shared),
        logprobs_mode="processed" if convention.processed else "raw",
        keep_candidates=recipe.rollout.keep_candidates,
        keep_routes=recipe.trainer.replay_routing,
    )
    return Sampler(client, LocalPublisher(client, shares_model=is_shared), recipe.model or "small", remote=False)


@asynccontextmanager
async def _run_server(
    recipe: Recipe, folder: Path, log: Path, note: Callable[[str], None], timer: PhaseTimer, pushes: bool
) -> AsyncIterator[str]:
    """Start a server of the policy in `folder` and yield its address."""
    from ludic.inference.servers.ports import free_port
    from ludic.inference.vllm.launch import server_python, stop_vllm_server, wait_for_vllm_health

    section = recipe.inference
    python, port = server_python(section.python), free_port()
    weights: Any = section.weights or "gloo"  # works for two processes on one GPU; NCCL does not
    note(f"Starting a vLLM server from {python}; its output is in {log}")
    proc = start_server(recipe, folder, LOOPBACK, port, weights=weights, takes_adapters=pushes, log=log)
    try:
        with timer.phase("server_start"):
            await asyncio.to_thread(wait_for_vllm_health, LOOPBACK, port, proc, section.timeout_s)
        yield f"http://{LOOPBACK}:{port}"
    finally:
        await asyncio.to_thread(stop_vllm_server, proc)


@asynccontextmanager
async def _connect(
    recipe: Recipe, model: Any, tokenizer: Any, urls: list[str], folder: Path, note: Callable[[str], None] | None
) -> AsyncIterator[Sampler]:
    """A client of the servers at `urls`, with a publisher if it can `note` how it publishes."""
    from ludic.distributed.adapters.vllm import create_vllm_publisher
    from ludic.inference.vllm.in_server.weight_receiver import Checkpoint

    async with await make_client(recipe, tokenizer, urls) as client:
        served = client.models()
        if not served:
            raise ConfigError(f"{urls[0]} lists no model; is it a vLLM server?")
        if note is None:
            yield Sampler(client, None, served[0], remote=True)
            return
        adapters: Publisher | None = await asyncio.to_thread(try_adapters, recipe, client, model, folder.parent, note, served[0])
        by_folder = folder.parent / "pushed" if recipe.inference.weights == "disk" else None
        partial = has_frozen_weights(model)
        level = (1 if partial else 2) if recipe.inference.colocate else None  # frozen weights are not pushed again
        publisher = (
            adapters
            if adapters is not None
            else await asyncio.to_thread(
                lambda: create_vllm_publisher(
                    client,
                    directory=by_folder,
                    push=recipe.inference.push,
                    master_address=recipe.inference.trainer_address,
                    timeout_s=recipe.inference.timeout_s,
                    partial=partial,
                    sleep_level=level,
                )
            )
        )
        try:
            if partial and recipe.inference.url is not None:  # it may have other frozen weights: it was started by somebody else
                stored = Checkpoint(folder)
                await asyncio.to_thread(lambda: publisher.publish(dict(stored.read(list(stored.weights))), version=0))
            if level is not None:
                await asyncio.to_thread(publisher.sleep)  # until the trainer's first push
            yield Sampler(client, publisher, served[0], remote=True)
        finally:
            await asyncio.to_thread(publisher.close)


def _list_urls(section: InferenceSection) -> list[str]:
    return [section.url] if isinstance(section.url, str) else [str(url) for url in section.url]


def make_preflight(recipe: Recipe, task: EpisodicTask, tokenizer: Any, sampler: Sampler) -> Preflight | None:
    """The comparison of trainer and sampler before the first step. A sampler in this process is
    compared, too: it runs the same model with other code."""
    section = recipe.inference
    if not section.preflight:
        return None
    is_exact = recipe.dtype == "float32" and recipe.trainer.mixed_precision_dtype is None and recipe.quantization.kind is None
    threshold = section.preflight_threshold
    return Preflight(
        sampling=make_training_inference(recipe.rollout, task).sampling,
        tokenizer=tokenizer if task.tool_use is None else None,  # its template alone gives no prompt with tools
        client=None if section.colocate else sampler.client,  # it sleeps
        threshold=(MAX_DIFFERENCE if is_exact else MAX_ROUNDING) if threshold is None else threshold,
    )
