"""The part of a run's state that differs between ranks: random generators and batch sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ludic.errors import CheckpointError
from ludic.training import ranks
from ludic.training.batching.overlapped import PENDING, STATES_AFTER
from ludic.training.batching.source import BatchSourceBase
from ludic.training.rng import reseed_for_rank, set_rng_state

SOURCE = "batch_source"
OF_EACH_RANK, RANKS = ("rng_state", SOURCE), "ranks"
"""Entries that differ between ranks, and the key under which a checkpoint has those of each. A
source that all ranks share has one state, which is not among them."""


def add_ranks(state: dict[str, Any], source: BatchSourceBase) -> None:
    """With several ranks, add the generators and the source of each. All ranks call it."""
    if ranks.is_distributed():
        own = [name for name in OF_EACH_RANK if name in state and not (name == SOURCE and _is_shared(source))]
        state[RANKS] = ranks.gather_json({name: state[name] for name in own})


def restore_of_this_rank(source: BatchSourceBase, metadata: Mapping[str, Any]) -> None:
    """Restore the batch source and the random generators."""
    own = _state_of_this_rank(metadata, shared=_is_shared(source))
    if SOURCE in own:
        source.load_state_dict(own[SOURCE])
    if "rng_state" in own:
        set_rng_state(own["rng_state"])
    if ranks.world_size() != len(metadata.get(RANKS, [metadata])):
        reseed_for_rank(ranks.rank())


def _is_shared(source: BatchSourceBase) -> bool:
    """Whether one source feeds all ranks, so that there is one position."""
    return source.divided_by_trainer and not source.shards_across_ranks


def _state_of_this_rank(metadata: Mapping[str, Any], *, shared: bool) -> Mapping[str, Any]:
    """The entries of `OF_EACH_RANK`. `shared`: the ranks share one source now."""
    saved, world = metadata.get(RANKS, [metadata]), ranks.world_size()
    own = saved[ranks.rank()] if len(saved) == world else metadata
    if any(SOURCE in state for state in metadata.get(RANKS, [])):
        return own if len(saved) == world and not shared else {**own, SOURCE: _find_common_position(saved)}
    if SOURCE not in metadata:
        return own
    one_source = shared or world == 1
    return {**own, SOURCE: metadata[SOURCE] if one_source else _remove_pending(metadata[SOURCE])}


def _find_common_position(saved: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The data position of ranks that had a source each. Raises CheckpointError if they differ:
    no other rank, nor a source that ranks share, could go on with all of it."""
    positions = [_remove_pending(state.get(SOURCE)) for state in saved]
    if any(position != positions[0] for position in positions):
        raise CheckpointError(
            f"the checkpoint has the data positions of {len(saved)} ranks, which differ, and there are {ranks.world_size()} now; resume "
            f"on {len(saved)} ranks with a source for each, or use a source that shares its data out over the ranks"
        )
    return positions[0]


def _remove_pending(source_state: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The state of a source before its pending batches, which belong to the rank that has them."""
    if source_state is None:
        return None
    return {key: value for key, value in source_state.items() if key not in (PENDING, STATES_AFTER)}
