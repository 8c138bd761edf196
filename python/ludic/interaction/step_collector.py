"""Collects the steps of several agents into rollouts."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from ludic.types import Rollout, Step


class TraceCollector:
    """Collects the steps of each agent. `global_meta` is added to the meta of every rollout."""

    def __init__(self, **global_meta: Any) -> None:
        self._global_meta = global_meta
        self._traces: defaultdict[str, list[Step]] = defaultdict(list)

    def add(self, agent_id: str, step: Step) -> None:
        self._traces[agent_id].append(step)

    def extract_rollouts(self, *, episode_truncated: bool = False, truncation_reason: str | None = None) -> list[Rollout]:
        """One rollout for each agent with a step, all with the same status."""
        return [
            self._rollout(agent_id, episode_truncated, truncation_reason) for agent_id, steps in self._traces.items() if steps
        ]

    def extract_rollouts_with_per_agent_status(self) -> list[Rollout]:
        """One rollout for each agent with a step, with the status of its last step."""
        return [self._rollout(agent_id, *_status(steps[-1])) for agent_id, steps in self._traces.items() if steps]

    def _rollout(self, agent_id: str, truncated: bool, reason: str | None) -> Rollout:
        meta = {
            **self._global_meta,
            "agent_id": agent_id,
            "episode_truncated": truncated,
            "truncation_reason": reason,
        }
        return Rollout(steps=list(self._traces[agent_id]), meta=meta)


def _status(last: Step) -> tuple[bool, str | None]:
    """(truncated, reason) of an agent's episode."""
    if last.truncated and not last.terminated:
        return True, last.info.get("truncation_reason", "env")
    return False, None
