"""How well the seeds of a policy can be told from fresh answers, and how often one of them is
right.

How well completions with different seeds can be told apart: statistics and heat maps.

Shapes: N representations of width D, of S seeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import nn

from ludic.errors import ConfigError, DataError, check_value
from ludic.files.atomic import write_json
from ludic.inference import InferenceSpec, ReturnSpec
from ludic.inference.request import make_sampling
from ludic.models.wrappers import evaluation_mode
from ludic.training.algorithm import forward_batch
from ludic.training.info_seed.prompts import SeedPrompts
from ludic.training.info_seed.seed_tags import InfoSeed, seed_of, without_tags
from ludic.training.loss.info_seed import pool_completions, seed_directions
from ludic.training.rollouts.engine import RolloutEngine
from ludic.training.rollouts.to_samples import sample_from_step
from ludic.training.types import EnvSpec, ProtocolSpec, RolloutRequest, SAWBatch, SAWItem
from ludic.types import Rollout, group_of

Metrics = dict[str, float]
ROWS = 64
"""Answers in one forward pass."""
SAMPLING_SEED = 2_000_000


class SeedEvaluator:
    """For each held-out problem, samples an answer to each seed, in an environment that is
    `seed_tagged`. Its metrics, which the trainer logs under these names:

    - `eval_seed/pass_at_n`: share of problems for which one of the `num_seeds` answers is right
    - `eval_seed/pred_acc`, `eval_seed/diversity_l2`: see `seed_metrics`; by the loss `ce` with its
      directions. Chance is 1 / `num_seeds`. Only with `model`, whose hidden states under the plain
      prompt represent the answers.

    A plain answer is sampled too, for its prompt. `task`: a `ludic.tasks.EpisodicTask`.
    `rollout`: the sampling, such as the `rollout` section of a recipe. `prompts`: of how many
    problems of the first suite; `samples`: answers to each seed. `heatmaps`: folder to write heat
    maps to, each under the number of its evaluation, or `step`.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        task: Any,
        info_seed: InfoSeed,
        *,
        rollout: Any,
        model: nn.Module | None = None,
        prompts: int | None = None,
        samples: int = 1,
        heatmaps: str | Path | None = None,
    ) -> None:
        check_value("samples", samples, least=1)
        if heatmaps is not None and model is None:
            raise ConfigError("heat maps compare hidden states; pass model=")
        self.engine, self.task, self.info_seed, self.rollout = engine, task, info_seed, rollout
        self.model, self.prompts, self.samples, self.heatmaps = model, prompts, samples, heatmaps
        self.step = 0
        """Number in the name of the next heat map; counts up."""

    async def eval(
        self,
        *,
        requests: Any = None,
        reducers: Any = None,
        max_steps: int | None = None,
        timeout_s: float | None = None,
        concurrency: int | None = None,
    ) -> tuple[list[dict[str, Any]], Metrics]:
        """([], metrics). `requests`, `reducers` and `max_steps` are ignored: the task has its
        own."""
        played = await self.engine.generate_rollouts(
            requests=self._make_requests(),
            max_steps=self.task.max_turns,
            timeout_s=timeout_s,
            concurrency=concurrency or self.rollout.concurrency,
        )
        metrics = {"pass_at_n": self._pass_at_n(played)}
        if self.model is not None:
            pooled, seeds = self._represent(played, self.model)
            head = seed_directions(self.info_seed.num_seeds, pooled.shape[1]).numpy() if self.info_seed.loss == "ce" else None
            metrics |= seed_metrics(pooled, seeds, head=head)
            if self.heatmaps is not None:
                write_seed_heatmap(self.heatmaps, self.step, pooled, seeds)
        self.step += 1
        return [], {f"eval_seed/{name}": value for name, value in metrics.items()}

    def _make_requests(self) -> list[RolloutRequest]:
        section = self.rollout
        problems = next(iter(self.task.suites().values()))[: self.prompts]
        tokens = section.max_new_tokens or self.task.max_new_tokens
        sampling = make_sampling(section, max_tokens=tokens)
        inference = InferenceSpec(sampling=sampling, return_=ReturnSpec.for_eval())
        size = 1 + self.info_seed.num_seeds
        plain = [
            RolloutRequest(
                env=EnvSpec("task", {"problem": problem}),
                protocol=ProtocolSpec("single_agent"),
                env_seed=SAMPLING_SEED + place * size,
                sampling_seed=SAMPLING_SEED + place * size,
                inference=inference,
            )
            for place, problem in enumerate(list(problems) * self.samples)
        ]
        return SeedPrompts(1, self.info_seed).expand(plain)

    def _pass_at_n(self, played: Sequence[Rollout]) -> float:
        """Right from the task's own success on; without one, from any reward above 0 on."""
        least = self.task.success_reward
        seeded = [rollout for rollout in played if seed_of(rollout.meta)]
        right = [
            any(rollout.total_reward > 0 if least is None else rollout.total_reward >= least for rollout in group)
            for _, group in groupby(seeded, key=lambda rollout: group_of(rollout.meta))
        ]
        return float(np.mean(right)) if right else 0.0

    def _represent(self, played: Sequence[Rollout], model: nn.Module) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """[N, D] representations of the answers, and their seeds."""
        items = [sample_from_step(rollout, step, 0.0) for rollout in played for step in rollout.steps]
        seeded = [item for item in without_tags(SAWBatch(items)).items if seed_of(item.meta)]
        if any(item.images for item in seeded):
            raise DataError("InfoSeed represents answers to text, and the prompts have images; leave out its evaluator")
        device = next(model.parameters()).device
        pooled = []
        with torch.no_grad(), evaluation_mode(model):
            for batch in _collate(seeded, device):
                _, with_hidden = forward_batch(model, batch, with_hidden=True, skip_logits=True)
                pooled.append(pool_completions(with_hidden, self.info_seed.pooling).double().cpu().numpy())
        rows = np.concatenate(pooled) if pooled else np.zeros((0, self.info_seed.num_seeds))
        return rows, np.array([seed_of(item.meta) for item in seeded], dtype=np.int64)


def _collate(items: Sequence[SAWItem], device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
    for start in range(0, len(items), ROWS):
        rows = items[start : start + ROWS]
        width = max(len(item.input_ids) for item in rows)
        columns = {"input_ids": torch.zeros(len(rows), width, dtype=torch.long)}
        columns |= {name: torch.zeros(len(rows), width, dtype=torch.long) for name in ("attention_mask", "action_mask")}
        for row, item in enumerate(rows):
            for name, tensor in columns.items():
                tensor[row, : len(item.input_ids)] = torch.as_tensor(np.asarray(getattr(item, name)))
        yield {name: tensor.to(device) for name, tensor in columns.items()}


Array = NDArray[np.float64]


def seed_metrics(pooled: ArrayLike, seed_ids: ArrayLike, *, head: ArrayLike | None = None) -> dict[str, float]:
    """`pred_acc`, the share of rows whose seed is predicted, and `diversity_l2`, the mean distance
    between the mean representations of two seeds. One that is not defined is left out.

    pooled: [N, D]; seed_ids: [N], below 1 for a row without a seed, which is ignored; head: [S, D]
    weights of a classifier of the seeds 1..S. Without `head` a row's prediction is the seed whose
    mean direction, without the row itself, has the largest cosine with it.

    Example: means (.9, .35) and (-.1, .95) of two seeds have diversity 1.1662.
    """
    rows, ids = _seeded(pooled, seed_ids)
    seeds = np.unique(ids)
    metrics = {}
    if head is not None and len(ids):
        metrics["pred_acc"] = float(np.mean((rows @ np.asarray(head, dtype=np.float64).T).argmax(axis=1) + 1 == ids))
    elif len(seeds) > 1:
        metrics["pred_acc"] = float(np.mean(_predict_by_direction(rows, ids, seeds) == ids))
    if len(seeds) > 1:
        means = _means(rows, ids, seeds)
        metrics["diversity_l2"] = float(np.mean([np.linalg.norm(first - second) for first, second in combinations(means, 2)]))
    return metrics


def seed_heatmap(pooled: ArrayLike, seed_ids: ArrayLike) -> dict[str, Any]:
    """`labels`, the seeds, and `matrix`, the [S, S] cosines between their mean representations."""
    rows, ids = _seeded(pooled, seed_ids)
    seeds = np.unique(ids)
    directions = _unit(_means(rows, ids, seeds))
    return {"labels": seeds.tolist(), "matrix": (directions @ directions.T).tolist()}


def write_seed_heatmap(folder: str | Path, step: int, pooled: ArrayLike, seed_ids: ArrayLike) -> Path:
    """Write `seed_heatmap` to `seed_heatmap_step{step}.json` in `folder`, and return its path."""
    path = Path(folder) / f"seed_heatmap_step{step}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"step": step, **seed_heatmap(pooled, seed_ids)})
    return path


def _seeded(pooled: ArrayLike, seed_ids: ArrayLike) -> tuple[Array, NDArray[np.int64]]:
    rows, ids = np.asarray(pooled, dtype=np.float64), np.asarray(seed_ids).astype(np.int64)
    if rows.ndim != 2 or ids.shape != rows.shape[:1]:
        raise DataError(f"pooled {rows.shape} must be [N, D] and seed_ids {ids.shape} [N]")
    return rows[ids >= 1], ids[ids >= 1]


def _unit(rows: Array) -> Array:
    """Rows of length 1; a row of zeros stays."""
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


def _means(rows: Array, ids: NDArray[np.int64], seeds: NDArray[np.int64]) -> Array:
    return np.array([rows[ids == seed].mean(axis=0) for seed in seeds]).reshape(len(seeds), rows.shape[1])


def _predict_by_direction(rows: Array, ids: NDArray[np.int64], seeds: NDArray[np.int64]) -> NDArray[np.int64]:
    """[N] seed whose summed directions, the row's own left out, are nearest to the row. A seed
    without other rows is never predicted."""
    x = _unit(rows)
    is_own = ids[:, None] == seeds[None, :]
    sums = is_own.T.astype(np.float64) @ x
    others = sums[None, :, :] - is_own[:, :, None] * x[:, None, :]
    cosines = np.einsum("nd,nsd->ns", x, others) / np.maximum(np.linalg.norm(others, axis=2), 1e-12)
    counts = is_own.sum(axis=0)[None, :] - is_own
    return seeds[np.where(counts > 0, cosines, -np.inf).argmax(axis=1)]
