"""Derives sampling seeds from the seed of an episode: for each step, each agent, and each model
call within a step.

They are outputs of SplitMix64 (Steele et al. 2014), reduced to the 31 bits that every server
accepts. From None, all derived seeds are None.
"""

from __future__ import annotations

import hashlib

GAMMA = 0x9E3779B97F4A7C15
"""The increment of SplitMix64."""


def derive_seed(seed: int | None, index: int) -> int | None:
    """The seed of a step, or of another part with this index: `seed` itself for index 0, a derived
    one for any other."""
    if seed is None or index == 0:
        return seed
    return _mix(seed + index * GAMMA)


def call_seed(seed: int | None, call: int) -> int | None:
    """The seed of a model call within a step: the step's own seed for call 0, a derived one for any
    other. Indices of calls are negative, so that the calls of step 0 do not get the seeds of later
    steps."""
    return derive_seed(seed, -call)


def agent_seed(seed: int | None, agent_id: str, step: int) -> int | None:
    """The seed of one agent's step. It depends on the agent's id, not on the other agents."""
    if seed is None:
        return None
    name = int.from_bytes(hashlib.blake2b(agent_id.encode(), digest_size=8).digest(), "little")
    return _mix(seed + name + step * GAMMA)


def _mix(number: int) -> int:
    """The output function of SplitMix64, modulo 2**31."""
    mixed = number % 2**64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
    return (mixed ^ (mixed >> 31)) % 2**31
