"""Parsing tool calls from text: what is accepted, what is rejected, and that parsing never
fails."""

import json

import pytest
from hypothesis import given, strategies as st

from ludic.inference.prompts.tool_calls import assistant_message, count_tool_calls, parse_tool_calls

ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'


def test_an_answer_without_calls_is_only_text():
    assert assistant_message("  just text ") == {"role": "assistant", "content": "  just text "}


def test_calls_have_openais_format():
    message = assistant_message(
        f'First this.\n{ADD}\n<tool_call>{{"name": "now", "arguments": {{}}}}</tool_call> and more', first_id=7
    )
    assert message == {
        "role": "assistant",
        "content": "First this.",
        "tool_calls": [
            {"id": "call00007", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": [2]}'}},
            {"id": "call00008", "type": "function", "function": {"name": "now", "arguments": "{}"}},
        ],
    }
    assert assistant_message(ADD)["content"] is None
    assert all(len(call["id"]) == 9 and call["id"].isalnum() for call in message["tool_calls"])
    assert count_tool_calls([message, {"role": "user", "content": ""}, message, {"role": "assistant", "tool_calls": None}]) == 4


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>add(1, 2)</tool_call>",
        '<tool_call>{"name": "add", "arguments": {}}',  # not closed
        '<tool_call>{"name": "add", "arguments": {}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {}} please</tool_call>',
        '<tool_call>{"name": "add"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>["add"]</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>',
        "<tool_call>" + "[" * 100_000,
        "<tool_call>" + '{"name": "add", "arguments": {"a": ' + "9" * 10_000 + "}}</tool_call>",
        ADD + "<tool_call>{",  # one of two is malformed
    ],
)
def test_a_malformed_call_gives_an_answer_without_calls(text):
    assert parse_tool_calls(text) == []
    assert assistant_message(text) == {"role": "assistant", "content": text}


letters = st.text('ab<>"\\\n {}é😀', max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | letters,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(letters, inner, max_size=2),
    max_leaves=3,
)
calls = st.lists(st.tuples(letters.filter(bool), st.dictionaries(letters, values, max_size=2)), min_size=1, max_size=2)


@given(calls, st.booleans(), st.sampled_from(["", " ", "\n"]), st.text("ab {}\n", max_size=5))
def test_written_calls_survive_a_round_trip(made, escaped, space, prose):
    """Even if an argument contains the tags themselves."""
    made = [*made, ("quote", {"text": "</tool_call><tool_call>"})]
    texts = [json.dumps({"name": name, "arguments": arguments}, ensure_ascii=escaped) for name, arguments in made]
    text = prose + "".join(f"<tool_call>{space}{t}{space}</tool_call>{space}" for t in texts)
    assert parse_tool_calls(text) == made
    message = assistant_message(text)
    assert [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message["tool_calls"]] == made
    assert message["content"] == (prose.rstrip() or None)


pieces = st.sampled_from(
    ["<tool_call>", "</tool_call>", "{", "}", '"name": "f"', '"arguments": {}', ", ", " ", "\\u", '"', "x", "[1", "é"]
)


@given(st.lists(pieces, max_size=12).map("".join) | st.text())
def test_any_text_can_be_parsed(text):
    message = assistant_message(text)
    assert message.get("tool_calls") or message["content"] == text
