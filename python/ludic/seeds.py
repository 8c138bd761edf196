"""Sampling seeds that follow from the seed of an episode: one for each step, for each agent, for
each model call within a step.

They are outputs of SplitMix64 (Steele et al. 2014), cut to the 31 bits that every server takes. No
seed stays no seed.
"""

from __future__ import annotations

import hashlib

GAMMA = 0x9E3779B97F4A7C15


def derived_seed(seed: int | None, step: int) -> int | None:
    """The seed of a step: the episode's own at step 0, then others that follow from it."""
    if seed is None or step == 0:
        return seed
    return _mixed(seed + step * GAMMA)


def call_seed(seed: int | None, call: int) -> int | None:
    """The seed of a model call within a step: the step's own for call 0. It counts down where
    steps count up, so that the calls of the first step do not meet the steps that follow."""
    return derived_seed(seed, -call)


def agent_seed(seed: int | None, agent_id: str, step: int) -> int | None:
    """The seed of one agent's step. It depends on the agent's name and not on who else plays."""
    if seed is None:
        return None
    name = int.from_bytes(hashlib.blake2b(agent_id.encode(), digest_size=8).digest(), "little")
    return _mixed(seed + name + step * GAMMA)


def _mixed(number: int) -> int:
    mixed = number % 2**64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
    return (mixed ^ (mixed >> 31)) % 2**31
