"""The traces of verifiers (`verifiers.v1`, 0.4) as rollouts: the tokens that were sampled, never
tokenised again.

A trace is a graph of messages, each with the tokens that it added; a message that the model sampled
is a step of the rollout. Works on a `Trace`, and on its record as read from `traces.jsonl`, without
verifiers installed. Records round log-probabilities to 4 digits unless they were written with
`to_record(float_decimals=None)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ludic.envs.adapters.plain import to_plain
from ludic.errors import DataError, RolloutError
from ludic.types import Info, Rollout, Step, TokenTrace

TRACE_VERSION = 1
_LIMITS = frozenset({"max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "compaction_failed"})
"""Conditions to stop that cut an episode short."""
_NODE_FIELDS = ("parent", "message", "sampled", "token_ids", "mask", "logprobs", "semantic_parents")
_FIELDS = ("version", "id", "task", "agent", "calls", "rewards", "metrics", "is_completed", "ok", "stop_condition", "errors")

Record = Mapping[str, Any]


def rollout_from_trace(trace: Any) -> Rollout:
    """One rollout of a trace, a step for every message sampled on a branch that verifiers trains
    on, in the order of the calls.

    The trace's reward, the weighted sum of its rewards, is that of the last step, whose info has
    `rewards` and `metrics`. A step without token ids (an endpoint that returns none) has no trace,
    and no sample can be made of it. Raises RolloutError for a trace that failed, is unfinished, or
    holds nothing that was sampled; DataError for one of another version or whose tokens do not fit
    together.
    """
    record = _record(trace)
    _check(record)
    nodes: Sequence[Record] = record["nodes"]
    calls = {call["node"]: call for call in record["calls"] if call.get("node") is not None}
    kept = _trained(nodes)
    sampled = [number for number, node in enumerate(nodes) if node["sampled"] and number in kept]
    if not sampled:
        raise RolloutError(f"trace {record['id']}: the model sampled nothing in it, there is nothing to make a rollout of")
    steps = [_step(record, index, number, calls.get(number)) for index, number in enumerate(sampled)]
    for step, following in zip(steps, sampled[1:], strict=False):
        step.next_obs = _shown_before(nodes, following)
    truncated = _end(record, steps[-1])
    return Rollout(id=str(record["id"]), steps=steps, meta=_meta(record, truncated))


def _record(trace: Any) -> Record:
    if isinstance(trace, Mapping):
        return trace
    fields: dict[str, Any] = dict.fromkeys(_FIELDS, True)
    fields["nodes"] = {"__all__": dict.fromkeys(_NODE_FIELDS, True)}
    record: Record = trace.model_dump(mode="json", include=fields, context={"float_decimals": None})
    return record


def _check(record: Record) -> None:
    where = f"trace {record.get('id')}"
    if record.get("version") != TRACE_VERSION:
        raise DataError(f"{where} is of version {record.get('version')}; version {TRACE_VERSION}, of verifiers 0.4, can be read")
    if not record["ok"]:
        errors = record.get("errors") or []
        said = f"{errors[-1]['type']}: {errors[-1]['message']}" if errors else f"stopped by {record.get('stop_condition')}"
        raise RolloutError(f"{where} failed ({said}); a failed episode is no rollout")
    if not record["is_completed"]:
        raise RolloutError(f"{where} is unfinished; wait for its end")


def _trained(nodes: Sequence[Record]) -> set[int]:
    """Nodes on a path to a leaf that is trained on: all but an attempt to compact the history
    that was not taken up."""
    parents = {node["parent"] for node in nodes}
    taken_up = {link["node"] for node in nodes for link in node.get("semantic_parents", ()) if link["type"] == "compaction"}
    kept: set[int] = set()
    for leaf in range(len(nodes)):
        links = nodes[leaf].get("semantic_parents", ())
        dropped = any(link["type"] == "compaction_attempt" for link in links) and leaf not in taken_up
        if leaf not in parents and not dropped:
            kept.update(_path(nodes, leaf))
    return kept


def _path(nodes: Sequence[Record], number: int) -> list[int]:
    """Root to node."""
    path = [number]
    while (parent := nodes[path[-1]]["parent"]) is not None:
        if not 0 <= parent < path[-1]:
            raise DataError(f"node {path[-1]} of a trace has node {parent} before it; a node follows one that is older")
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
        info["tool_calls"] = to_plain(message["tool_calls"])
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
    """The path's tokens, split before what the last node sampled."""
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
        raise DataError(
            f"{where} has {len(logps)} log-probabilities for {num_sampled} sampled tokens; there must be one for each"
        )
    return TokenTrace(
        prompt_token_ids=before + ids[:prefix],
        completion_token_ids=ids[prefix:],
        completion_logprobs=[float(logp) for logp in logps] if logps or not num_sampled else None,
        finish_reason=finish_reason,
    )


def _shown_before(nodes: Sequence[Record], number: int) -> str:
    """What the model was shown since it last spoke on this path, or was said to have spoken
    where the history was written anew."""
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
    """Give the last step the trace's reward and end; whether the episode was cut short."""
    scores = {name: reward for name, reward in record["rewards"].items() if reward is not None}
    last.reward = float(sum(reward["score"] * reward.get("weight", 1.0) for reward in scores.values()))
    last.info["rewards"] = {name: reward["score"] for name, reward in scores.items()}
    last.info["metrics"] = dict(record["metrics"])
    finished = [call for call in record["calls"] if not call.get("error")]
    too_long = bool(finished) and finished[-1].get("finish_reason") == "length"
    last.truncated = record.get("stop_condition") in _LIMITS or too_long
    last.terminated = not last.truncated
    return last.truncated


def _meta(record: Record, truncated: bool) -> dict[str, Any]:
    task, agent = record["task"], record["agent"]
    return {
        "agent_name": agent.get("name", "agent"),
        "env_name": task["type"],
        "task_idx": task["data"].get("idx"),
        "trainable": agent.get("trainable", True),
        "stop_condition": record.get("stop_condition"),
        "episode_truncated": truncated,
        "truncation_reason": "env" if truncated else None,
    }
