"""Traces of verifiers as rollouts. `verifiers_trace.json` is a recording of verifiers 0.4.0: an
episode of two turns with byte tokens, the prompt `2+3=`, the answer `7`, the reply `wrong` and the
answer `5`."""

import copy
import json
from pathlib import Path

import pytest
from byte_client import ids

from ludic.envs.adapters import rollout_from_trace
from ludic.errors import DataError, RolloutError
from ludic.training.credit_assignment import MonteCarloReturn
from ludic.training.rollouts.to_samples import batch_from_rollouts

RECORDED = json.loads((Path(__file__).parent / "verifiers_trace.json").read_text())


def modified_recording(**fields):
    return {**copy.deepcopy(RECORDED), **fields}


def node(parent, text, *, role="assistant", sampled=True, prompt=(), links=()):
    """A message node that adds the tokens `prompt`, and its text as tokens if it was sampled."""
    own = ids(text) if sampled else []
    return {
        "parent": parent,
        "message": {"role": role, "content": text},
        "sampled": sampled,
        "token_ids": [*prompt, *own],
        "mask": [False] * len(prompt) + [True] * len(own),
        "logprobs": [-1.0] * len(own),
        "semantic_parents": list(links),
    }


def test_a_sampled_message_is_a_step_with_its_original_tokens():
    rollout = rollout_from_trace(RECORDED)
    first, second = rollout.steps
    assert first.trace.prompt_token_ids == ids("Add.\n2+3=\n")
    assert first.trace.completion_token_ids == ids("7\n")
    assert first.trace.completion_logprobs == [-0.123456789, -0.246913578]  # -0.123456789 times 1 and 2
    assert second.trace.prompt_token_ids == ids("Add.\n2+3=\n7\nwrong\n")
    assert second.trace.completion_token_ids == ids("5\n")
    assert (first.action, first.prev_obs, first.next_obs) == ("7", "Add.\n2+3=", "wrong")
    assert (second.action, second.prev_obs, second.next_obs) == ("5", "wrong", None)
    assert [step.info["finish_reason"] for step in rollout.steps] == ["stop", "stop"]


def test_the_reward_is_the_weighted_sum_and_belongs_to_the_last_step():
    rollout = rollout_from_trace(RECORDED)
    assert [step.reward for step in rollout.steps] == [0.0, 2.5]  # right: 1 * 2, short: 0.5 * 1
    assert [(step.terminated, step.truncated) for step in rollout.steps] == [(False, False), (True, False)]
    assert rollout.steps[-1].info["rewards"] == {"right": 1.0, "short": 0.5}
    assert rollout.steps[-1].info["metrics"] == {"characters": 1.0}
    assert rollout.id == RECORDED["id"]
    assert rollout.meta == {
        "agent_name": "agent",
        "env_name": "Sum",
        "task_idx": 2,
        "trainable": True,
        "stop_condition": "agent_completed",
        "episode_truncated": False,
        "truncation_reason": None,
    }


def test_the_steps_give_training_samples():
    batch = batch_from_rollouts([rollout_from_trace(RECORDED)], MonteCarloReturn(gamma=0.5))
    assert [item.input_ids for item in batch.items] == [ids("Add.\n2+3=\n7\n"), ids("Add.\n2+3=\n7\nwrong\n5\n")]
    assert [item.action_mask for item in batch.items] == [[0] * 10 + [1] * 2, [0] * 18 + [1] * 2]
    assert [item.weight for item in batch.items] == [1.25, 2.5]
    assert batch.items[1].actor_logps.token_logps == [-0.123456789, -0.246913578]


@pytest.mark.parametrize("condition", ["max_turns", "max_total_tokens", "compaction_failed"])
def test_a_turn_limit_truncates_the_episode(condition):
    rollout = rollout_from_trace(modified_recording(stop_condition=condition))
    assert (rollout.steps[-1].terminated, rollout.steps[-1].truncated) == (False, True)
    assert (rollout.meta["episode_truncated"], rollout.meta["truncation_reason"]) == (True, "env")


def test_an_answer_at_the_token_limit_truncates_the_episode():
    record = modified_recording()
    record["calls"][-1]["finish_reason"] = "length"
    assert rollout_from_trace(record).steps[-1].truncated
    record["calls"].append({**record["calls"][-1], "node": None, "error": {"type": "e", "message": ""}, "finish_reason": None})
    assert rollout_from_trace(record).steps[-1].truncated  # a failed call does not affect how the episode ended


def test_a_rewritten_history_is_a_branch_and_its_shared_messages_count_once():
    nodes = [
        node(None, "q", role="user", sampled=False),
        node(0, "one", prompt=[1]),
        node(1, "again", role="user", sampled=False),
        node(2, "two", prompt=[2]),
        node(1, "other", role="user", sampled=False),  # a second branch after "one"
        node(4, "three", prompt=[3]),
    ]
    rollout = rollout_from_trace(modified_recording(nodes=nodes, calls=[]))
    assert [step.action for step in rollout.steps] == ["one", "two", "three"]
    assert [step.trace.prompt_token_ids for step in rollout.steps] == [[1], [1, *ids("one"), 2], [1, *ids("one"), 3]]
    assert [step.prev_obs for step in rollout.steps] == ["q", "again", "other"]
    assert [step.reward for step in rollout.steps] == [0.0, 0.0, 2.5]


def test_a_compaction_counts_only_if_the_episode_continues_from_it():
    nodes = [
        node(None, "q", role="user", sampled=False),
        node(0, "summary", prompt=[1], links=[{"node": 0, "type": "compaction_attempt"}]),
        node(None, "short", role="user", sampled=False),
        node(2, "answer", prompt=[2]),
    ]
    rollout_without_compaction = rollout_from_trace(modified_recording(nodes=nodes, calls=[]))
    assert [step.action for step in rollout_without_compaction.steps] == ["answer"]
    nodes[3]["semantic_parents"] = [{"node": 1, "type": "compaction"}]
    rollout_with_compaction = rollout_from_trace(modified_recording(nodes=nodes, calls=[]))
    assert [step.action for step in rollout_with_compaction.steps] == ["summary", "answer"]


def test_tool_calls_and_text_parts_are_kept():
    record = modified_recording()
    record["nodes"][1]["message"]["content"] = [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": "x"}},
        {"type": "text", "text": "this"},
    ]
    record["nodes"][2]["message"] = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "name": "add", "arguments": "{}"}],
    }
    first = rollout_from_trace(record).steps[0]
    assert (first.prev_obs, first.action) == ("Add.\nsee\nthis", "")
    assert first.info["tool_calls"] == [{"id": "c", "name": "add", "arguments": "{}"}]


def test_a_trace_without_tokens_has_steps_but_no_samples():
    record = modified_recording()
    for each in record["nodes"]:
        each.update(token_ids=[], mask=[], logprobs=[])
    rollout = rollout_from_trace(record)
    assert [step.trace for step in rollout.steps] == [None, None]
    with pytest.raises(DataError, match="Missing rollout-time token trace"):
        batch_from_rollouts([rollout], MonteCarloReturn())


def broken_recording(number, **fields):
    record = modified_recording()
    record["nodes"][number].update(fields)
    return record


@pytest.mark.parametrize(
    ("record", "error", "problem"),
    [
        (modified_recording(version=2), DataError, r"version 2; version 1, .*verifiers 0\.4"),
        (
            modified_recording(ok=False, errors=[{"type": "TaskError", "message": "no"}]),
            RolloutError,
            r"failed \(TaskError: no\)",
        ),
        (modified_recording(ok=False, stop_condition="agent_timeout"), RolloutError, r"failed \(stopped by agent_timeout\)"),
        (modified_recording(is_completed=False), RolloutError, "is unfinished"),
        (modified_recording(nodes=RECORDED["nodes"][:2]), RolloutError, "the model sampled nothing in it"),
        (broken_recording(2, mask=[True] * 12), DataError, r"node 2 .*2 log-probabilities .*12 sampled tokens"),
        (broken_recording(2, mask=[True, *[False] * 11]), DataError, "not a run .*end of its 12 tokens"),
        (broken_recording(2, mask=[True]), DataError, "not a run of sampled tokens"),
        (broken_recording(2, logprobs=[-1.0]), DataError, r"has 1 log-probabilities for 2 sampled tokens"),
        (broken_recording(2, parent=3), DataError, r"parent of node 2 of a trace \(3\)"),
        (broken_recording(2, parent=2), DataError, r"parent of node 2 of a trace \(2\)"),
    ],
)
def test_a_trace_that_cannot_be_trained_on_is_refused(record, error, problem):
    with pytest.raises(error, match=problem):
        rollout_from_trace(record)
