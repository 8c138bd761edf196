"""The buffer of prompts: a resumed buffer gives what the other would have given, other data are an
error, and the list of the caller is never touched."""

import copy
import json
from random import Random

import numpy as np
import pytest

from ludic.errors import ConfigError, ConfigTypeError, DataError, RequestsExhausted
from ludic.rollouts.training.datasets import (
    DataBuffer,
    create_buffer_from_jsonl,
    load_prompts_from_jsonl,
    load_prompts_from_list,
)


def written_out(prompts, seed, passes):
    """The oracle: each pass shuffles the original list anew."""
    order = []
    for number in range(passes):
        of_pass = list(prompts)
        if number:
            Random(seed + number).shuffle(of_pass)
        order += of_pass
    return order


@pytest.mark.parametrize("n", range(1, 9))
def test_a_buffer_resumed_at_any_offset_goes_on_as_the_other(n):
    prompts = [f"p{i}" for i in range(n)]
    expected = written_out(prompts, 5, 8)
    for size in range(1, n + 3):
        buffer, taken = DataBuffer(prompts, seed=5), 0
        while taken < 4 * n:
            assert (buffer.epoch_id, buffer.sample_offset) == divmod(taken, n)
            resumed = DataBuffer(prompts, seed=5)
            resumed.load_state(json.loads(json.dumps(buffer.save_state())))
            assert resumed.get_prompts(2 * n) == expected[taken : taken + 2 * n]
            assert buffer.get_prompts(size) == expected[taken : taken + size]
            taken += size
    assert prompts == [f"p{i}" for i in range(n)]
    assert [buffer.at(position) for position in range(4 * n)] == expected[: 4 * n]


def test_a_buffer_can_begin_anywhere():
    prompts = list("abc")
    assert DataBuffer(prompts, epoch_id=1, sample_offset=2, seed=3).get_prompts(4) == written_out(prompts, 3, 3)[5:9]


def edited(prompts, rng):
    """The prompts with one edit: a character, a key, the order of two, one fewer or more."""
    prompts = copy.deepcopy(prompts)
    row = rng.randrange(len(prompts))
    edit = rng.randrange(6)
    if edit == 0:
        text = prompts[row]["question"]
        at = rng.randrange(len(text))
        prompts[row]["question"] = text[:at] + chr(ord(text[at]) + 1) + text[at + 1 :]
    elif edit == 1:
        prompts[row]["answer"] += 1
    elif edit == 2:
        other = (row + 1 + rng.randrange(len(prompts) - 1)) % len(prompts)
        prompts[row], prompts[other] = prompts[other], prompts[row]
    elif edit == 3:
        del prompts[row]
    elif edit == 4:
        prompts.insert(row, {"question": "new", "answer": 0})
    else:
        prompts[row] = {"question": prompts[row]["question"]}
    return prompts


def test_every_edit_of_the_data_is_found():
    rng = Random(0)
    found = 0
    for number in range(1000):
        prompts = [{"question": f"{number} + {i}", "answer": number + i} for i in range(rng.randrange(2, 9))]
        buffer = DataBuffer(prompts)
        buffer.get_prompts(rng.randrange(1, 20))
        other = DataBuffer(edited(prompts, rng))
        with pytest.raises(ConfigError, match=r"the prompts differ|num_prompts="):
            other.load_state(buffer.save_state(), changed="grow" if len(other) == len(prompts) else "error")
        assert other.position == 0
        found += 1
    assert found == 1000


def test_the_error_says_which_of_seed_number_and_content_differs():
    state = DataBuffer(list("abc"), seed=1).save_state()
    with pytest.raises(ConfigError, match=r"seed \(2\) must be 1, as saved"):
        DataBuffer(list("abc"), seed=2).load_state(state)
    with pytest.raises(ConfigError, match=r"num_prompts=3, here are 4 prompts.*changed='grow'"):
        DataBuffer(list("abcd"), seed=1).load_state(state)
    with pytest.raises(ConfigError, match=r"num_prompts=3, .*2 prompts; put them back"):
        DataBuffer(list("ab"), seed=1).load_state(state, changed="grow")
    with pytest.raises(ConfigError, match="the prompts differ"):
        DataBuffer(list("abd"), seed=1).load_state(state)
    with pytest.raises(ConfigError, match="the first 3 prompts differ"):
        DataBuffer(list("abdc"), seed=1).load_state(state, changed="grow")
    with pytest.raises(ConfigError, match="no epoch_id"):
        DataBuffer(list("abc")).load_state({"sample_offset": 0})
    with pytest.raises(ConfigError, match=r"sample_offset \(.*\) from 0 to"):
        DataBuffer(list("abc")).load_state({"epoch_id": 0, "sample_offset": 3})
    with pytest.raises(ConfigError, match=r"changed \('yes'\) must be one of error, grow"):
        DataBuffer(list("abc")).load_state(state, changed="yes")


def test_a_state_with_the_documents_three_keys_loads():
    buffer = DataBuffer(list("abc"))
    buffer.load_state({"epoch_id": 1, "sample_offset": 2, "seed": 42})
    assert buffer.get_prompts(1) == [written_out("abc", 42, 2)[5]]


@pytest.mark.parametrize("taken", range(10))
def test_grown_data_begin_with_the_next_pass(taken):
    """3 prompts become 5: the pass that has begun ends over 3, those after it have 5."""
    buffer = DataBuffer(list("abc"), seed=7)
    before = [prompt for _ in range(taken) for prompt in buffer.get_prompts(1)]
    grown = DataBuffer(list("abcde"), seed=7)
    grown.load_state(buffer.save_state(), changed="grow")
    old_passes = -(-taken // 3)
    expected = written_out("abc", 7, old_passes)
    for number in range(old_passes, old_passes + 4):
        of_pass = list("abcde")
        if number:
            Random(7 + number).shuffle(of_pass)
        expected += of_pass
    assert before + grown.get_prompts(8) == expected[: taken + 8]
    assert [grown.at(position) for position in range(taken + 8)] == expected[: taken + 8]
    again = DataBuffer(list("abcde"), seed=7)
    again.load_state(grown.save_state())
    assert again.get_prompts(6) == expected[taken + 8 : taken + 14]
    assert [again.at(position) for position in range(taken)] == before


def test_the_last_epoch_gives_what_is_left_and_then_ends():
    buffer = DataBuffer(list("abc"), epochs=2)
    assert len(buffer.get_prompts(4)) == 4
    assert len(buffer.get_prompts(4)) == 2
    with pytest.raises(RequestsExhausted, match=r"2 epochs of 3 prompts.*epochs=None"):
        buffer.get_prompts(1)
    resumed = DataBuffer(list("abc"), epochs=2)
    resumed.load_state(buffer.save_state())
    with pytest.raises(RequestsExhausted):
        resumed.get_prompts(1)
    assert resumed.at(5) == buffer.at(5)
    with pytest.raises(RequestsExhausted, match="position 6"):
        resumed.at(6)


def test_prompts_may_hold_what_json_lacks():
    class Image:
        pass

    prompts = [{"image": Image(), "scores": np.array([1, 2])}]
    state = DataBuffer(prompts).save_state()
    DataBuffer([{"image": Image(), "scores": np.array([1, 2])}]).load_state(state)
    with pytest.raises(ConfigError, match="differ"):
        DataBuffer([{"image": Image(), "scores": np.array([1, 3])}]).load_state(state)
    with pytest.raises(DataError, match="prompt 0 cannot be compared"):
        DataBuffer([{(1, 2): "x"}]).save_state()


def test_what_is_written_into_a_prompt_later_does_not_change_the_digest():
    rows = [{"question": f"{n}", "facts": {"tags": ["a"]}} for n in range(3)]
    buffer, fresh = DataBuffer(copy.deepcopy(rows)), DataBuffer(rows)
    [row] = buffer.get_prompts(1)
    row["facts"]["tags"].append("b")
    row["facts"]["weight_version"] = 0
    fresh.load_state(buffer.save_state())
    assert fresh.get_prompts(1) == rows[1:2]
    grown = DataBuffer([*rows, {"question": "3"}])
    grown.get_prompts(1)[0]["facts"].clear()
    grown.load_state(buffer.save_state(), changed="grow")


@pytest.mark.parametrize(
    ("make", "error", "remedy"),
    [
        (lambda: DataBuffer([]), ConfigError, "at least one prompt"),
        (lambda: DataBuffer("what is 2+2?"), ConfigTypeError, r"one prompt is \[prompt\]"),
        (lambda: DataBuffer({"prompt": "x"}), ConfigTypeError, "a list of prompts"),
        (lambda: DataBuffer(["a"], epochs=0), ConfigError, "epochs .0."),
        (lambda: DataBuffer(["a"], sample_offset=1), ConfigError, "sample_offset .1."),
        (lambda: DataBuffer(["a"], epoch_id=-1), ConfigError, "epoch_id .-1."),
        (lambda: DataBuffer(["a"]).get_prompts(0), ConfigError, "n .0. must be at least 1"),
    ],
)
def test_a_wrong_argument_is_an_error_that_names_the_remedy(make, error, remedy):
    with pytest.raises(error, match=remedy):
        make()


def test_prompts_of_a_file(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text('{"prompt": "a", "answer": 1}\n\n{"question": "b"}\n{"prompt": "c"}\n')
    assert load_prompts_from_jsonl(path) == ["a", {"question": "b"}, "c"]
    assert load_prompts_from_jsonl(path, prompt_key="question", limit=2) == [{"prompt": "a", "answer": 1}, "b"]
    assert create_buffer_from_jsonl(path, limit=1, seed=3).get_prompts(2) == ["a", "a"]
    prompts = ["a"]
    assert load_prompts_from_list(prompts) == prompts
    assert load_prompts_from_list(prompts) is not prompts
    with pytest.raises(ConfigError, match=r"limit .0."):
        load_prompts_from_jsonl(path, limit=0)
    path.write_text("\n")
    with pytest.raises(DataError, match="no prompts"):
        load_prompts_from_jsonl(path)
