"""Seeds the random generators of a run, so that two runs of one recipe draw the same numbers."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch

from ludic.recipes.epochs_schema import EpochsRecipe
from ludic.recipes.schema import Recipe


def seed_everything(recipe: Recipe | EpochsRecipe) -> None:
    """Seed Python and torch, and set torch's threads: two runs of one recipe draw the same
    weights, data and samples."""
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    random.seed(recipe.seed)
    torch.manual_seed(recipe.seed)


def seed_phase(seed: int, phase: str) -> None:
    """Seed Python, numpy and torch by the seed and the phase alone: a phase draws the same
    numbers whatever was drawn before it, also when it is resumed in another process."""
    derived = int.from_bytes(hashlib.sha256(f"{seed} {phase}".encode()).digest()[:4], "little")
    random.seed(derived)
    np.random.seed(derived)
    torch.manual_seed(derived)
