"""How well completions with different seeds can be told apart: statistics and heat maps.

Shapes: N representations of width D, of S seeds.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ludic.errors import DataError
from ludic.files.atomic import write_json

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
    """The rows with a seed, and their seeds."""
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
    without other rows is nobody's prediction."""
    x = _unit(rows)
    is_own = ids[:, None] == seeds[None, :]
    sums = is_own.T.astype(np.float64) @ x
    others = sums[None, :, :] - is_own[:, :, None] * x[:, None, :]
    cosines = np.einsum("nd,nsd->ns", x, others) / np.maximum(np.linalg.norm(others, axis=2), 1e-12)
    counts = is_own.sum(axis=0)[None, :] - is_own
    return seeds[np.where(counts > 0, cosines, -np.inf).argmax(axis=1)]
