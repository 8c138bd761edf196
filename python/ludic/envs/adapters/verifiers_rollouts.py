"""Traces of verifiers (`verifiers.v1`, 0.4) as rollouts, with the tokens that were sampled; nothing
is tokenized again.

A trace is a graph of messages, each with the tokens that it added. A message that the model sampled
is a step of the rollout. The input is a `Trace`, or its record as read from `traces.jsonl`; the
latter does not need verifiers installed. Records round log-probabilities to 4 digits unless they
were written with `to_record(float_decimals=None)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ludic.envs.adapters.episode import to_json_types
from ludic.errors import DataError, RolloutError
from ludic.types import Info, Rollout, Step, TokenTrace

TRACE_VERSION = 1
_LIMITS = frozenset({"max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "compaction_failed"})
"""Stop conditions that truncate an episode."""
_NODE_FIELDS = ("parent", "message", "sampled", "token_ids", "mask", "logprobs", "semantic_parents")
_FIELDS = ("version", "id", "task", "agent", "calls", "rewards", "metrics", "is_completed", "ok", "stop_condition", "errors")

Record = Mapping[str, Any]


def rollout_from_trace(trace: Any) -> Rollout:
    """The rollout of a trace: one step for each message that was sampled on a branch that
    verifiers trains on, in the order of the calls.

    The last step gets the trace's reward, the weighted sum of its rewards; its info has `rewards`
    and `metrics`. A step without token ids (from an endpoint that returns none) has no trace, and
    no sample can be made of it. Raises RolloutError for a trace that failed, is unfinished, or
    contains no sampled message; DataError for another version or inconsistent tokens.
    """
    record: Record = trace
    if not isinstance(trace, Mapping):
        fields = {**dict.fromkeys(_FIELDS, True), "nodes": {"__all__": dict.fromkeys(_NODE_FIELDS, True)}}
        record = trace.model_dump(mode="json", include=fields, context={"float_decimals": None})
    _check(record)
    nodes: Sequence[Record] = record["nodes"]
    calls = {call["node"]: call for call in record["calls"] if call.get("node") is not None}
    trained = _trained(nodes)
    sampled = [number for number, node in enumerate(nodes) if node["sampled"] and number in trained]
    if not sampled:
        raise RolloutError(f"trace {record['id']}: the model sampled nothing in it, so there is no rollout")
    steps = [_step(record, index, number, calls.get(number)) for index, number in enumerate(sampled)]
    for step, following in zip(steps, sampled[1:], strict=False):
        step.next_obs = _shown_before(nodes, following)
    truncated = _end(record, steps[-1])
    task, agent = record["task"], record["agent"]
    meta = {
        "agent_name": agent.get("name", "agent"),
        "env_name": task["type"],
        "task_idx": task["data"].get("idx"),
        "trainable": agent.get("trainable", True),
        "stop_condition": record.get("stop_condition"),
        "episode_truncated": truncated,
        "truncation_reason": "env" if truncated else None,
    }
    return Rollout(id=str(record["id"]), steps=steps, meta=meta)


def _check(record: Record) -> None:
    where = f"trace {record.get('id')}"
    if record.get("version") != TRACE_VERSION:
        raise DataError(f"{where} is of version {record.get('version')}; version {TRACE_VERSION}, of verifiers 0.4, can be read")
    if not record["ok"]:
        errors = record.get("errors") or []
        reason = f"{errors[-1]['type']}: {errors[-1]['message']}" if errors else f"stopped by {record.get('stop_condition')}"
        raise RolloutError(f"{where} failed ({reason}); a failed episode has no rollout")
    if not record["is_completed"]:
        raise RolloutError(f"{where} is unfinished; wait for its end")


def _trained(nodes: Sequence[Record]) -> set[int]:
    """Nodes on a path to a leaf that is trained on: every leaf but a compaction of the history
    that was attempted and discarded."""
    parents = {node["parent"] for node in nodes}
    accepted = {link["node"] for node in nodes for link in node.get("semantic_parents", ()) if link["type"] == "compaction"}
    trained: set[int] = set()
    for leaf in range(len(nodes)):
        links = nodes[leaf].get("semantic_parents", ())
        dropped = any(link["type"] == "compaction_attempt" for link in links) and leaf not in accepted
        if leaf not in parents and not dropped:
            trained.update(_path(nodes, leaf))
    return trained


def _path(nodes: Sequence[Record], number: int) -> list[int]:
    """Nodes from the root to `number`."""
    path = [number]
    while (parent := nodes[path[-1]]["parent"]) is not None:
        if not 0 <= parent < path[-1]:
            raise DataError(f"the parent of node {path[-1]} of a trace ({parent}) must be an earlier node")
        path.append(parent)
    return path[::-1]


def _step(record: Record, index: int, number: int, call: Record | None) -> Step:
    nodes: Sequence[Record] = record["nodes"]
    finish_reason = None if call is None else call.get("finish_reason")
    trace = _tokens(nodes, number, finish_reason, f"trace {record['id']}, node {number}")
    message = nodes[number]["message"]
    info: Info = {"node": number}
    if finish_reason is not None:
        info["finish_reason"] = finish_reason
    if message.get("tool_calls"):
        info["tool_calls"] = to_json_types(message["tool_calls"])
    return Step(
        index=index,
        prev_obs=_shown_before(nodes, number),
        action=_text(message),
        next_obs=None,
        reward=0.0,
        truncated=False,
        terminated=False,
        info=info,
        trace=trace,
    )


def _tokens(nodes: Sequence[Record], number: int, finish_reason: str | None, where: str) -> TokenTrace | None:
    """The tokens of the path, split before the tokens that the last node sampled.

    Example: nodes with ids `[5 6]` and `[7 8 9]`, the second with mask `[0 1 1]`, are the prompt
    `[5 6 7]` and the completion `[8 9]`.
    """
    node = nodes[number]
    ids, mask = list(node["token_ids"]), list(node["mask"])
    if not ids:
        return None
    num_sampled = sum(mask)
    prefix = len(ids) - num_sampled
    if len(mask) != len(ids) or any(mask[:prefix]):
        raise DataError(f"{where}: its mask is not a run of sampled tokens at the end of its {len(ids)} tokens")
    before = [token for parent in _path(nodes, number)[:-1] for token in nodes[parent]["token_ids"]]
    logps = list(node["logprobs"])
    if logps and len(logps) != num_sampled:
        raise DataError(f"{where} has {len(logps)} log-probabilities for {num_sampled} sampled tokens; it must have one for each")
    return TokenTrace(
        prompt_token_ids=before + ids[:prefix],
        completion_token_ids=ids[prefix:],
        completion_logprobs=[float(logp) for logp in logps] if logps or not num_sampled else None,
        finish_reason=finish_reason,
    )


def _shown_before(nodes: Sequence[Record], number: int) -> str:
    """The texts on this path since the previous assistant message, which may be one that a
    compaction wrote."""
    shown: list[str] = []
    for parent in reversed(_path(nodes, number)[:-1]):
        if nodes[parent]["message"]["role"] == "assistant":
            break
        shown.append(_text(nodes[parent]["message"]))
    return "\n".join(reversed([text for text in shown if text]))


def _text(message: Record) -> str:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part["text"] for part in content if part.get("type") == "text")


def _end(record: Record, last: Step) -> bool:
    """Set the reward and the end of the last step; returns whether the episode was truncated."""
    scores = {name: reward for name, reward in record["rewards"].items() if reward is not None}
    last.reward = float(sum(reward["score"] * reward.get("weight", 1.0) for reward in scores.values()))
    last.info["rewards"] = {name: reward["score"] for name, reward in scores.items()}
    last.info["metrics"] = dict(record["metrics"])
    finished = [call for call in record["calls"] if not call.get("error")]
    too_long = bool(finished) and finished[-1].get("finish_reason") == "length"
    last.truncated = record.get("stop_condition") in _LIMITS or too_long
    last.terminated = not last.truncated
    return last.truncated
