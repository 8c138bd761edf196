"""`ludic worker actor RUN`: a process that samples for the trainer of a run.

It reads the run's config.yaml, takes the number of an entry from the queue, loads the version of
the policy that the entry is to be sampled with, plays its episodes and delivers them. It writes
nothing to the run's folder but the images that it shows.

Requests by the number of an entry: what an actor plays follows from the run's seed and this
number alone.

Example: 4 prompts a batch, 2 an entry, groups of 3.

    entry     0     1     2     3     4     5
    batch     0     0     1     1     2     2
    prompts   0 1   2 3   0 1   2 3   0 1   2 3

Entry 5 has prompts 2 and 3 of batch 2: 6 requests.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
import uuid
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any, cast

import torch
from torch import Tensor

from ludic.errors import ConfigError, PublishError
from ludic.images.store import ImageStore, use_store
from ludic.inference.client import ChatClient
from ludic.inference.local import LocalChatClient
from ludic.inference.vllm.client import VLLMChatClient
from ludic.models.loading import compare_processor
from ludic.recipes.actors import check_actors, count_prompts_per_entry, uses_queue
from ludic.recipes.compose import choose_devices, compose
from ludic.recipes.mixture import add_reward_models, build_run_task, list_parts
from ludic.recipes.model import build_policy, choose_threads
from ludic.recipes.processes import choose_kind, choose_logprob_convention
from ludic.recipes.schema import Recipe
from ludic.runs.actors.policy_versions import read_version
from ludic.runs.actors.queue import open_queue, wait_until_open
from ludic.runs.adapters import name_adapters
from ludic.runs.directory import RunDirectory, collect_versions
from ludic.runs.rollouts import TrainingRequests, check_rollouts, make_engine, make_training_requests
from ludic.runs.sampler import open_sampler
from ludic.runs.stop_request import Interrupted, listen_for_signals
from ludic.tasks import EpisodicTask
from ludic.training.queue.actor import run_actor
from ludic.training.queue.base import Work
from ludic.training.queue.opening import QueueRetryPolicy
from ludic.training.rng import seed_everything, seed_phase
from ludic.training.rollouts.episodes import PlayedRollouts
from ludic.training.types import RolloutRequest

logger = logging.getLogger(__name__)

POLL_S = 0.05
"""How often an actor looks for a version that it waits for."""
APPEAR_S = 5.0
"""How long an announced version may be absent while it is replaced."""
SERVE_S = 30.0
"""How long servers may serve an older version than was announced."""


class LocalWeights:
    """Loads versions from the run's folder into the actor's own model."""

    def __init__(self, client: LocalChatClient, root: Path) -> None:
        self._client, self._root = client, root
        self._loaded: int | None = None

    async def load(self, version: int) -> None:
        """Sample with this version from now on. Raises PublishError if it cannot be read."""
        if version == self._loaded:
            return
        weights = await asyncio.to_thread(self._read, version)
        self._loaded = None  # of which weights, is not known until all are copied
        self._client.sync_weights(weights, version=version)
        self._loaded = version

    def _read(self, version: int) -> dict[str, Tensor]:
        """The weights. A trainer that was resumed may write them again at this moment."""
        deadline = time.monotonic() + APPEAR_S
        while True:
            try:
                return read_version(self._root, version, self._client.model)
            except FileNotFoundError as error:
                if time.monotonic() > deadline:
                    raise PublishError(f"{error.filename} does not exist, but version {version} was announced") from error
                time.sleep(POLL_S)


class ServerWeights:
    """Takes only answers of a version or later ones, of the servers that the trainer of the run in
    the folder `run` publishes to. One that was restarted has none until it does: they are waited
    for, for `serve_s` seconds."""

    def __init__(self, client: VLLMChatClient, run: Path, *, serve_s: float = SERVE_S) -> None:
        self._client, self._run, self._serve_s = client, run, serve_s

    async def load(self, version: int) -> None:
        """Return once a server has the version. Raises PublishError if none has in time."""
        self._client.require_version(version)
        deadline = time.monotonic() + self._serve_s
        while not await self._client.has_version(version, name_adapters(self._run)):
            if time.monotonic() > deadline:
                raise PublishError(f"no server has had version {version} for {self._serve_s:g} s; restart one, or resume the run")
            await asyncio.sleep(POLL_S)


def run_actor_process(folder: Path, *, name: str | None = None) -> int:
    """Sample for the run in `folder` until its trainer is done. Returns 0, or 128 plus the number
    of the signal that ended it earlier."""
    directory = RunDirectory.open_to_read(folder)
    recipe = compose([str(directory.config)])
    choose_devices(recipe)
    if not uses_queue(recipe):
        raise ConfigError(f"{folder} is a run without actors; start one with place.actors=N, or with queue.url=ADDRESS")
    began, here = (versions or {} for versions in (directory.read_progress().versions, collect_versions()))
    if began.get("ludic", here["ludic"]) != here["ludic"]:  # its entries may differ
        raise ConfigError(f"the run began with ludic {began['ludic']}, this is {here['ludic']}; install the same version")
    with use_store(ImageStore(directory.images)):
        return asyncio.run(_sample(recipe, directory, name or f"{socket.gethostname()}-{os.getpid()}"))


async def _sample(recipe: Recipe, directory: RunDirectory, name: str) -> int:
    stop, signals = listen_for_signals()
    task, model, tokenizer = _build(recipe)
    compare_processor(model, directory.read_progress().images)
    async with AsyncExitStack() as opened:
        opened.push_async_callback(task.aclose)
        try:
            client, model_name, weights = await _open_client(recipe, model, tokenizer, directory, opened, stop)
        except Interrupted:
            return 128 + signals[0]
        log = open_queue(recipe.queue, directory.path)
        opened.callback(log.disconnect)
        requests = NumberedRequests(task, recipe)
        engine = make_engine(task, client, model_name=model_name, system_prompt=recipe.rollout.system_prompt, trained=True)

        async def play(work: Work) -> PlayedRollouts:
            """The rollouts of the entry, without groups in which an episode failed: they depend on
            the recipe, the number of the entry and the weights, not on what the process played
            before. Raises RolloutError if none is left."""
            seed_phase(recipe.seed, f"entry {work.number}")  # for tasks that draw from the global generators
            engine.load_state_dict({"episodes": work.number * requests.episodes_per_entry})
            return await engine.generate_rollouts(
                requests(work.number), max_steps=task.max_turns, concurrency=recipe.rollout.concurrency, for_training=True
            )

        print(f"{name} samples for {directory.path}", flush=True)
        if recipe.place.on == "slurm":
            await wait_until_open(log, QueueRetryPolicy(recipe.queue.patience_s), stop)
        await run_actor(
            log,
            play=play,
            weights=weights.load,
            actor=name,
            stop=stop,
            order="exact" if recipe.queue.order == "exact" else "arrival",
            lease_s=recipe.queue.lease_s,
            patience_s=recipe.queue.patience_s,
        )
    return 128 + signals[0] if signals else 0


def _build(recipe: Recipe) -> tuple[EpisodicTask, Any, Any]:
    """The task, the model and the tokenizer: an actor needs no algorithm, no optimizer, and no
    adapters, since published weights have them merged. The weights of the model belong to no
    version yet."""
    check_actors(recipe)
    task = build_run_task(recipe)
    for part in list_parts(recipe, task):
        check_rollouts(part.recipe, part.task)
    seed_everything(recipe.seed)
    model, tokenizer = build_policy(recipe)
    torch.set_num_threads(choose_threads(recipe, model))
    task = add_reward_models(recipe, task, tokenizer)
    # As in a run without actors: with batches ahead its sampler has a copy without gradients, of
    # which torch computes other last digits.
    model.requires_grad_(recipe.inference.batches_ahead == 0)
    return task, model.to(recipe.trainer.model_device), tokenizer


async def _open_client(
    recipe: Recipe, model: Any, tokenizer: Any, directory: RunDirectory, opened: AsyncExitStack, stop: asyncio.Event
) -> tuple[ChatClient, str, LocalWeights | ServerWeights]:
    """(client, name of the model, how it gets a version)."""
    if choose_kind(recipe.inference) == "vllm":
        sampler = await opened.enter_async_context(
            open_sampler(
                recipe,
                model,
                tokenizer,
                directory.model,
                log=directory.server_log,
                note=print,
                pushes=False,
                is_stopped=stop.is_set,
            )
        )
        weights = ServerWeights(cast(VLLMChatClient, sampler.client), directory.path)
        return sampler.client, sampler.model_name, weights
    convention = choose_logprob_convention(recipe.rollout)
    client = LocalChatClient(
        model,
        tokenizer,
        max_batch_size=recipe.rollout.concurrency,
        logprobs_mode="processed" if convention.processed else "raw",
        keep_candidates=recipe.rollout.keep_candidates,
        keep_routes=recipe.trainer.replay_routing,
    )
    return client, recipe.model or "small", LocalWeights(client, directory.policy)


class NumberedRequests:
    """The requests of each entry."""

    def __init__(self, task: EpisodicTask, recipe: Recipe) -> None:
        self._requests: TrainingRequests = make_training_requests(task, recipe.rollout, seed=recipe.seed)
        self._seed, self._per_entry = recipe.seed, count_prompts_per_entry(recipe)
        largest = max(part.recipe.rollout.group_size for part in list_parts(recipe, task))
        self.episodes_per_entry = self._per_entry * largest
        """The most that an entry has: environments may differ."""
        self.entries_per_batch = recipe.rollout.prompts // self._per_entry
        self._batch: tuple[int, Sequence[Sequence[RolloutRequest]]] = (-1, ())

    def __call__(self, number: int) -> list[RolloutRequest]:
        """The requests of entry `number`, group after group. The id of a group follows from its
        place in the run, so that an entry that is played again is the same."""
        batch, part = divmod(number, self.entries_per_batch)
        if self._batch[0] != batch:
            self._requests.batches = batch
            groups = groupby(self._requests(), key=lambda request: request.meta["group_id"])
            self._batch = batch, [list(members) for _, members in groups]
        requests, first = [], part * self._per_entry
        for place in range(first, first + self._per_entry):
            bits = Random(f"group {self._seed} {batch} {place}").getrandbits(128)
            meta = {"group_id": str(uuid.UUID(int=bits, version=4))}
            requests += [replace(request, meta={**request.meta, **meta}) for request in self._batch[1][place]]
        return requests
