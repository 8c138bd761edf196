"""Rows of every format as samples: which tokens they have and which of them are trained."""

import itertools
import json

import numpy as np
import pytest
from chat_tokenizers import CHATML, chat_tokenizer, merging_tokenizer
from hypothesis import given, strategies as st

from ludic.errors import DataError
from ludic.files.jsonl import read_jsonl
from ludic.models.byte_tokenizer import make_byte_tokenizer
from ludic.training.samples.sft import SFTItems


def items_of(row, tokenizer=None, **options):
    return SFTItems(tokenizer or make_byte_tokenizer(), **options).of_row(row, "data.jsonl:1")


def ids(text):
    return [byte + 3 for byte in text.encode()]


def test_text_rows_give_prompt_completion_and_end_token():
    [item] = items_of({"prompt": "2+2=", "completion": "4"})
    assert item.input_ids.tolist() == [*ids("2+2=4"), 2]
    assert item.action_mask.tolist() == [0, 0, 0, 0, 1, 1]
    assert item.weight == 1.0
    assert item.meta == {"rollout_id": "data.jsonl:1", "step_index": 0, "completion_length": 2, "prompt_length": 4}


def test_with_an_empty_prompt_the_whole_text_is_trained():
    [item] = items_of({"prompt": "", "completion": "abc"})
    assert item.action_mask.tolist() == [1, 1, 1, 1]


def test_the_prompt_is_tokenised_on_its_own_as_at_inference():
    tokenizer = merging_tokenizer()
    prompt = tokenizer("user:go bot:", add_special_tokens=False)["input_ids"]
    assert tokenizer("user:go bot:yes", add_special_tokens=False)["input_ids"][: len(prompt)] != prompt
    [item] = items_of({"prompt": "user:go bot:", "completion": "yes"}, tokenizer)
    assert item.input_ids[item.action_mask == 0].tolist() == prompt
    assert tokenizer.decode(item.input_ids[item.action_mask == 1]) == "yes<eos>"


def test_conversations_train_what_the_assistant_says():
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 2
    tokenizer = chat_tokenizer(CHATML)
    [whole] = items_of({"messages": talk}, tokenizer)
    assert tokenizer.decode(whole.input_ids[whole.action_mask == 1]) == "b<|im_end|>b<|im_end|>"
    each = items_of({"messages": talk}, tokenizer, assistant_turns="each")
    assert [item.meta["step_index"] for item in each] == [0, 1]
    assert [item.meta["rollout_id"] for item in each] == [
        "data.jsonl:1"
    ] * 2  # samples of a conversation stay together in a mini-batch
    [split] = items_of({"prompt": talk[:3], "completion": talk[3:]}, tokenizer)
    assert split.input_ids.tolist() == whole.input_ids.tolist()
    assert tokenizer.decode(split.input_ids[split.action_mask == 1]) == "b<|im_end|>"


def test_settings_of_the_template_come_from_the_row():
    template = CHATML.replace("{% for m", "{{ mood }}{% for m", 1)
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    [item] = items_of({**row, "chat_template_kwargs": {"mood": "calm"}}, chat_tokenizer(template))
    assert chat_tokenizer(template).decode(item.input_ids).startswith("calm<|im_start|>")


def test_a_recorded_rollout_keeps_its_token_ids():
    """Ids that no text tokenises to: the two halves of a character, and an end token in the
    middle."""
    trace = {"prompt_token_ids": [198, 5], "completion_token_ids": [198, 2, 172], "completion_logprobs": [-1, -2, -3]}
    step = {"prev_obs": "q", "action": "?", "reward": 1.0, "trace": trace}
    items = items_of({"id": "r", "steps": [step, {**step, "index": 1}]})
    assert [item.input_ids.tolist() for item in items] == [[198, 5, 198, 2, 172]] * 2
    assert [item.action_mask.tolist() for item in items] == [[0, 0, 1, 1, 1]] * 2
    assert all(
        item.actor_logps is None for item in items
    )  # other formats have none, and a batch has them for all samples or for none


def test_token_ids_and_masks_are_used_as_they_are():
    [item] = items_of({"input_ids": [5, 6, 7], "action_mask": [0, 1, 0]})
    assert (item.input_ids.tolist(), item.action_mask.tolist()) == ([5, 6, 7], [0, 1, 0])
    assert item.input_ids.dtype == np.int32


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"body": "a"}, "columns body, .*no format"),
        ({"text": ""}, "empty text"),
        ({"text": 3}, "text must be text, not int"),
        ({"instruction": "a"}, "its output .None. must be text"),
        ({"conversations": [{"from": "human", "value": "a"}]}, "no assistant message"),
        ({}, "none"),
        (
            {"prompt": "a", "answer": "b"},
            "completion is missing; it has prompt, answer",
        ),
        ({"prompt": "a", "completion": None}, "lists of messages, not str and NoneType"),
        ({"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]}, "not str and list"),
        ({"prompt": "a", "completion": ""}, "empty completion"),
        ({"messages": "a"}, "messages must be a list"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no assistant message"),
        ({"steps": []}, "has no steps"),
        ({"input_ids": [1, 2]}, "action_mask a list of 0 and 1"),
        ({"input_ids": [1, 2], "action_mask": [1]}, "action_mask a list of 0 and 1"),
        ({"input_ids": [1, 2.5], "action_mask": [0, 1]}, "whole numbers"),
        ({"input_ids": [1, 2], "action_mask": [0, 0]}, "no token to train on"),
        ({"input_ids": [1, 2**31], "action_mask": [0, 1]}, "below 2"),
    ],
)
def test_an_invalid_row_is_named(row, expected):
    with pytest.raises(DataError, match=rf"data\.jsonl:1.*{expected}"):
        items_of(row, chat_tokenizer(CHATML))


def test_errors_number_the_lines_and_blank_lines_are_skipped(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('\n{"prompt": "é", "completion": "b"}\r\n\n{"prompt": "c", "completion": "d"}', encoding="utf-8")
    rows = list(read_jsonl(path))
    assert [where for where, _ in rows] == [f"{path}:2", f"{path}:4"]
    assert rows[0][1]["prompt"] == "é"
    for wrong, expected in (("[1]", "holds a list"), ("{", "is not JSON"), ("\xff", "is not JSON")):
        path.write_bytes(b"{}\n" + wrong.encode("latin-1"))
        with pytest.raises(DataError, match=f"rows.jsonl:2 {expected}"):
            list(read_jsonl(path))
    path.write_text(json.dumps({}) + "\n" + "[" * 100_000)
    with pytest.raises(DataError, match=r"rows\.jsonl:2 is nested too deeply"):
        list(read_jsonl(path))


def test_alpaca_rows_train_the_output() -> None:
    row = {"instruction": "Add.", "input": "2 2", "output": "4"}
    tokenizer = chat_tokenizer(CHATML)
    [item] = items_of(row, tokenizer)
    assert tokenizer.decode(item.input_ids).startswith("<|im_start|>user\nAdd.\n2 2<|im_end|>")
    assert tokenizer.decode(item.input_ids[item.action_mask == 1]) == "4<|im_end|>"
    [plain] = items_of(row)
    assert make_byte_tokenizer().decode(plain.input_ids[plain.action_mask == 1]) == "4<eos>"


CALLS = CHATML.replace("{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls or [] %}<{{ c.function.name }}>{% endfor %}")


def test_sharegpt_rows_train_answers_and_calls_but_no_observations() -> None:
    turns = [
        *({"from": "human", "value": "a"}, {"from": "function_call", "value": '{"name": "look", "arguments": {}}'}),
        *({"from": "observation", "value": "7"}, {"from": "gpt", "value": "b"}),
    ]
    tokenizer = chat_tokenizer(CALLS)
    [item] = items_of({"conversations": turns}, tokenizer)
    assert tokenizer.decode(item.input_ids[item.action_mask == 1]) == "<look><|im_end|>b<|im_end|>"
    with pytest.raises(DataError, match=r"data\.jsonl:1 has tool calls, .*template leaves out"):
        items_of({"conversations": turns}, chat_tokenizer(CHATML))


def test_all_tokens_of_a_text_are_trained_but_the_first() -> None:
    [item] = items_of({"text": "abc"})
    assert item.input_ids.tolist() == [*ids("abc"), 2]
    assert item.action_mask.tolist() == [0, 1, 1, 1]


@given(st.text("ab", min_size=1, max_size=40), st.integers(2, 12))
def test_a_long_text_is_divided_and_each_token_is_trained_once(text: str, max_tokens: int) -> None:
    items = items_of({"text": text}, max_tokens=max_tokens)
    assert all(len(item.input_ids) <= max_tokens for item in items)
    trained = [token for item in items for token in item.input_ids[item.action_mask == 1].tolist()]
    assert [*items[0].input_ids[:1].tolist(), *trained] == [*ids(text), 2]
    for before, after in itertools.pairwise(items):
        assert before.input_ids[-1] == after.input_ids[0]  # the context of its first trained token
    assert len({item.meta["prompt_digest"] for item in items}) == 1
    assert [item.meta["is_continued"] for item in items] == [True] * (len(items) - 1) + [False]


def test_the_format_of_a_row_can_be_named() -> None:
    row = {"prompt": "a", "completion": "b", "text": "cd"}
    assert items_of(row)[0].input_ids.tolist() == [*ids("ab"), 2]
    assert items_of(row, row_format="text")[0].input_ids.tolist() == [*ids("cd"), 2]
    with pytest.raises(DataError, match="messages must be a list"):
        items_of(row, row_format="messages")
