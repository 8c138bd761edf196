"""Rows of Alpaca and ShareGPT as conversations, and the formats of a file."""

import json

import pytest

from ludic.data.formats import (
    FORMATS,
    convert_alpaca,
    convert_alpaca_to_text,
    convert_sharegpt,
    count_formats,
    detect_format,
    read_tools,
)
from ludic.errors import DataError


def turn(sender: str, value: object) -> dict[str, object]:
    return {"from": sender, "value": value}


def test_the_columns_tell_the_format() -> None:
    assert detect_format({"instruction": "a", "output": "b", "text": "both"}) == "alpaca"  # as in Stanford's own file
    assert detect_format({"conversations": [], "id": 1}) == "sharegpt"
    assert detect_format({"text": "a", "messages": None}) == "text"  # Arrow gives every row the columns of all
    assert detect_format({"prompt": "a", "completion": "b", "text": "c"}) == "prompt_completion"
    assert detect_format({"body": "a"}) is None
    assert all(detect_format({columns[0]: 1}) == name for name, columns in FORMATS.items())


def test_an_alpaca_row_is_a_question_and_an_answer() -> None:
    row = {"instruction": "Add.", "input": "2 2", "output": "4"}
    assert convert_alpaca(row, "r") == [{"role": "user", "content": "Add.\n2 2"}, {"role": "assistant", "content": "4"}]
    assert convert_alpaca({**row, "input": ""}, "r")[0]["content"] == "Add."
    full = convert_alpaca({**row, "system": "Be brief.", "history": [["Hi", "Yo"]]}, "r")
    assert [message["role"] for message in full] == ["system", "user", "assistant", "user", "assistant"]
    assert [message["content"] for message in full] == ["Be brief.", "Hi", "Yo", "Add.\n2 2", "4"]


def test_without_a_template_alpaca_has_the_words_of_its_paper() -> None:
    prompt, completion = convert_alpaca_to_text({"instruction": "A {x}", "input": "B {y}", "output": "C"}, "r")
    assert prompt.endswith("### Instruction:\nA {x}\n\n### Input:\nB {y}\n\n### Response:\n")
    assert completion == "C"
    prompt, _ = convert_alpaca_to_text({"instruction": "A", "input": None, "output": "C"}, "r")
    assert prompt.endswith("the request.\n\n### Instruction:\nA\n\n### Response:\n")
    with pytest.raises(DataError, match=r"r has history .*'Hi'.*chat_template=FILE\.jinja"):
        convert_alpaca_to_text({"instruction": "A", "output": "C", "history": [["Hi", "Yo"]]}, "r")


def test_a_sharegpt_row_is_a_conversation_with_calls() -> None:
    call = json.dumps({"name": "look", "arguments": {"at": 3}})
    turns = [turn("human", "hi"), turn("function_call", call), turn("observation", "7"), turn("gpt", "It is 7.")]
    messages = convert_sharegpt({"conversations": turns, "system": "Be kind."}, "r")
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert messages[2] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {"at": 3}}}],
    }
    two = convert_sharegpt({"conversations": [turn("function_call", f"[{call},{call}]")]}, "r")
    assert len(two[0]["tool_calls"]) == 2
    plain = convert_sharegpt({"conversations": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "r")
    assert plain == [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    tools = [{"type": "function", "function": {"name": "look"}}]
    assert read_tools({"tools": json.dumps(tools)}, "r") == read_tools({"tools": tools}, "r") == tools
    assert read_tools({"tools": ""}, "r") is None


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ("hi", r"conversations \('hi'\) must be a list"),
        ([], r"conversations \(\[\]\) must be a list"),
        (["hi"], r"message 1 \('hi'\) must be"),
        ([turn("human", "a"), turn("moderator", "b")], r"message 2: its from \('moderator'\) .*system, human"),
        ([turn("human", 3)], r"message 1: its value \(3\) .*text"),
        ([turn("human", "a"), turn("function_call", "look(3)")], r"function_call, \('look\(3\)'\) is not JSON"),
        ([turn("function_call", '{"name": "look"}')], r"""function_call \(\{'name': 'look'\}\) must be \{"name": """),
        ([turn("function_call", '{"name": "look", "arguments": "at"}')], r"function_call \('at'\) is not JSON"),
    ],
)
def test_a_malformed_turn_is_named_with_its_value(turns: object, expected: str) -> None:
    with pytest.raises(DataError, match=rf"data\.jsonl, line 4.*{expected}"):
        convert_sharegpt({"conversations": turns}, "data.jsonl, line 4")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"instruction": 3, "output": "b"}, r"its instruction \(3\) must be text"),
        ({"instruction": " ", "output": "b"}, r"instruction \(' '\) is empty; .*row out"),
        ({"instruction": "a", "response": "b"}, r"output \(None\) .*text; .*instruction, response"),
        ({"instruction": "a", "output": "b", "history": [["one"]]}, r"turn 1 of its history \(\['one'\]\)"),
    ],
)
def test_a_malformed_alpaca_row_is_named_with_its_value(row: dict[str, object], expected: str) -> None:
    with pytest.raises(DataError, match=rf"line 4.*{expected}"):
        convert_alpaca(row, "line 4")


def test_what_was_found_is_one_line() -> None:
    rows = [
        ("line 1", {"instruction": "a", "output": "b", "id": 1}),
        ("line 2", {"instruction": "a", "input": "c", "output": "b"}),
    ]
    described = count_formats(rows, "rows.jsonl").describe()
    assert described == "rows.jsonl: 2 rows of alpaca (instruction, input, output); not read: id"
    mixed = [("line 1", {"prompt": "a", "completion": "b"}), ("line 2", {"messages": []})]
    assert (
        count_formats(mixed, "m").describe() == "m: 1 row of prompt_completion (prompt, completion), 1 row of messages (messages)"
    )
    named = [("line 1", {"instruction": "a", "output": "b", "text": "t"})]
    assert count_formats(named, "m", "text").describe() == "m: 1 row of text (text); not read: instruction, output"


def test_a_mixture_names_the_first_row_of_each() -> None:
    rows = [("line 1", {"instruction": "a"}), ("line 2", {"instruction": "b"}), ("line 3", {"text": "c"})]
    with pytest.raises(DataError, match=r"line 1 has alpaca .*line 3 has text.*data_format=alpaca"):
        count_formats(rows, "m")
    with pytest.raises(DataError, match=r"line 9 .*columns body, .*messages: .*text: text\)"):
        count_formats([("line 9", {"body": "a"})], "m")
