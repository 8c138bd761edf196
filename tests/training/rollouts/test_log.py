"""Rollouts as JSON lines: complete, readable and appended."""

import json

import numpy as np
from hypothesis import given, strategies as st

from ludic.training.rollouts.log import RolloutLog, append_rollouts, read_rollouts
from ludic.types import Rollout, Step, TokenTrace

text = st.text(st.characters(exclude_categories=["Cs"]))
traces = st.lists(st.floats(-50, 0), max_size=4).map(lambda logps: TokenTrace([1], list(range(len(logps))), logps, "stop"))
steps = st.builds(
    Step,
    index=st.integers(0, 9),
    prev_obs=text,
    action=text,
    next_obs=st.none() | text,
    reward=st.floats(-1e300, 1e300),
    truncated=st.booleans(),
    terminated=st.booleans(),
    info=st.dictionaries(text, st.none() | st.integers(-9, 9) | text | st.lists(text, max_size=2), max_size=2),
    trace=st.none() | traces,
    ts_ns=st.integers(0, 2**62),
)


@given(st.lists(st.builds(Rollout, id=text, steps=st.lists(steps, max_size=3), meta=st.dictionaries(text, text)), max_size=3))
def test_a_line_has_the_whole_rollout(tmp_path_factory, rollouts):
    path = tmp_path_factory.mktemp("log") / "rollouts.jsonl"
    for rollout in rollouts:
        append_rollouts(path, [rollout])
    lines = path.read_bytes().split(b"\n") if rollouts else [b""]
    assert lines.pop() == b""
    for line, rollout in zip(lines, rollouts, strict=True):
        read = json.loads(line)
        again = [
            Step(**{**step, "trace": None if step["trace"] is None else TokenTrace.from_dict(step["trace"])})
            for step in read["steps"]
        ]
        assert Rollout(read["id"], again, read["meta"]) == rollout
        assert (read["total_reward"], read["length"], read["duration_ns"]) == (
            rollout.total_reward,
            rollout.length,
            rollout.duration_ns,
        )


def test_a_sum_that_is_not_finite_is_written_as_null_beside_its_rewards(tmp_path):
    largest = 1.7976931348623157e308
    path = tmp_path / "rollouts.jsonl"
    append_rollouts(
        path, [Rollout(steps=[Step(0, "", "", None, largest, False, False), Step(1, "", "", None, largest, False, True)])]
    )
    read = json.loads(path.read_text())
    assert read["total_reward"] is None
    assert [step["reward"] for step in read["steps"]] == [largest, largest]


def test_values_that_json_cannot_represent_are_converted(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    meta = {"score": np.float32(0.5), "ids": np.arange(3), "place": path, "half": "\ud83d", 7: "seven"}
    append_rollouts(path, [Rollout(meta=meta)])
    assert json.loads(path.read_text())["meta"] == {
        "score": 0.5,
        "ids": [0, 1, 2],
        "place": str(path),
        "half": "\ud83d",
        "7": "seven",
    }


def test_a_torn_line_is_removed_before_the_next_is_written(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    append_rollouts(path, [Rollout(id="first", steps=[Step(0, "", "", None, 0.0, False, True)])])
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:-9])  # killed while the second line was written
    append_rollouts(path, [Rollout(id="third", steps=[Step(0, "", "", None, 0.0, False, True)])])
    assert [rollout.id for rollout in read_rollouts(path)] == ["first", "third"]


def test_an_info_that_contains_itself_is_dropped_without_its_rollout(tmp_path):
    info = {"kept": 1}
    info["itself"] = info
    path = tmp_path / "rollouts.jsonl"
    steps = [Step(0, "", "", None, 1.0, False, True, info=info)]
    append_rollouts(path, [Rollout(id="a", steps=steps), Rollout(id="b", steps=[Step(0, "", "", None, 2.0, False, True)])])
    first, second = read_rollouts(path)
    assert first.steps[0].info == {"kept": 1, "itself": "<this dict contains itself>"}
    assert (first.total_reward, second.total_reward) == (1.0, 2.0)


def test_every_nth_batch_is_written(tmp_path):
    for every, written in ((1, "01234"), (2, "024"), (3, "03")):
        log = RolloutLog(tmp_path / f"{every}.jsonl", every)
        for number in range(5):
            log.write(number, [Rollout(str(number), [Step(0, "", "", None, 1.0, False, True)])])
        assert "".join(rollout.id for rollout in read_rollouts(tmp_path / f"{every}.jsonl")) == written


def test_a_log_of_no_batch_writes_no_file(tmp_path):
    RolloutLog(tmp_path / "rollouts.jsonl", 0).write(0, [Rollout(steps=[Step(0, "", "", None, 1.0, False, True)])])
    RolloutLog(tmp_path / "rollouts.jsonl").write(0, [])
    assert not (tmp_path / "rollouts.jsonl").exists()
