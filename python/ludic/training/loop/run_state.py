"""The state of a run that a checkpoint has besides weights and optimizer, so that a resumed run
continues as if it had not ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ludic.errors import CheckpointError
from ludic.training import ranks
from ludic.training.batching.overlapped import PENDING, STATES_AFTER
from ludic.training.batching.source import BatchSourceBase
from ludic.training.loop.callbacks import Callbacks
from ludic.training.loop.control import Control
from ludic.training.loop.evaluations import Evaluations
from ludic.training.loop.schedule import RunSchedule
from ludic.training.loop.token_log import TokenLog
from ludic.training.rng import reseed_for_rank, rng_state, set_rng_state

SOURCE, TOKEN_LOG = "batch_source", "token_log"
OF_EACH_RANK, RANKS = ("rng_state", SOURCE), "ranks"
"""Entries that differ between ranks, and the key under which a checkpoint has those of each. A
source that all ranks share has one state, which is not among them."""


class ResumableRun(Protocol):
    """The members of a trainer that a checkpoint saves."""

    schedule: RunSchedule
    evaluations: Evaluations
    control: Control
    callbacks: Callbacks
    token_log: TokenLog | None

    @property
    def current_step(self) -> int: ...


def run_state(run: ResumableRun, source: BatchSourceBase) -> dict[str, Any]:
    """Schedule, early stopping, last evaluation and its step, random generators, and the states of
    controllers, callbacks, the log of tokens and the batch source if there are any. With several
    ranks, all call this; `ranks` has generators and source of each."""
    state: dict[str, Any] = {
        "scheduler_state_dict": run.schedule.state_dict(run.current_step),
        **run.evaluations.state_dict(),
        "rng_state": rng_state(),
        **run.callbacks.state(),
    }
    if run.control.controllers:
        state["controllers"] = run.control.state_dict()
    if run.token_log is not None:
        state[TOKEN_LOG] = run.token_log.state_dict()
    source_state = source.state_dict()
    if source_state is not None:
        state[SOURCE] = source_state
    if ranks.is_distributed():
        own = [name for name in OF_EACH_RANK if name in state and not (name == SOURCE and _is_shared(source))]
        state[RANKS] = ranks.gather_json({name: state[name] for name in own})
    return state


def restore_run(run: ResumableRun, source: BatchSourceBase, metadata: Mapping[str, Any]) -> None:
    """Restore the state in `metadata`. What a checkpoint of an older version lacks stays as it
    is."""
    if "scheduler_state_dict" in metadata:
        run.schedule.resume(int(metadata["scheduler_state_dict"]["total_steps"]))
    run.evaluations.load_state_dict(metadata)
    run.control.load_state_dict(metadata.get("controllers", {}))
    run.callbacks.load_state(metadata)
    if run.token_log is not None and TOKEN_LOG in metadata and ranks.rank() == 0:
        run.token_log.load_state_dict(metadata[TOKEN_LOG])
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
