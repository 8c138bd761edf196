"""Calls of tools in the formats of the known families: what is accepted, what is rejected, that
reading never fails, and how a call is forced."""

import json
from dataclasses import replace

import pytest
from chat_tokenizers import bpe_tokenizer
from hypothesis import given, settings, strategies as st

from ludic.errors import ConfigError
from ludic.inference.client import Sampled
from ludic.inference.prompts.encoder import PromptEncoder
from ludic.inference.prompts.template import Dialogue
from ludic.inference.prompts.tool_formats import FORMATS, count_tool_calls
from ludic.types import TokenTrace

assistant_message = FORMATS["hermes"].message


def parse_tool_calls(text):
    return FORMATS["hermes"].read(text)[1]


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


@pytest.mark.parametrize(
    ("written", "fault"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}', "</tool_call> is missing"),
        ('<tool_call>{"name": "add", "arguments": {"a": 1]}</tool_call>', "Expecting ',' delimiter"),
        ('<tool_call>{"name": "add"}</tool_call>', "no name or no arguments"),
        ('<tool_call>{"name": "add", "arguments": 3}</tool_call>', "it has no name, or its arguments are no object"),
        (ADD + "<tool_call>{", "Expecting property name"),  # one of two is malformed
    ],
)
def test_a_malformed_call_can_be_a_call_with_an_error(written, fault):
    message = FORMATS["hermes"].message("So. " + written, first_id=2, keep_malformed=True)
    [call] = message["tool_calls"]
    assert (message["content"], call["id"], call["function"]) == ("So.", "call00002", {"name": "", "arguments": "{}"})
    assert call["error"].startswith(fault)
    assert call["text"] == written


def test_only_tags_make_a_malformed_call():
    """Llama's calls begin like any answer in JSON."""
    keep = {"keep_malformed": True}
    assert "tool_calls" not in FORMATS["llama"].message('{"answer": 3}', **keep)
    assert "tool_calls" not in FORMATS["hermes"].message("no call", **keep)
    assert FORMATS["llama"].message('<|python_tag|>{"answer": 3}', **keep)["tool_calls"][0]["error"]
    assert FORMATS["hermes"].message(ADD, **keep) == FORMATS["hermes"].message(ADD)


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


HEAD = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
TAIL = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CALLS = {
    "hermes": '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>',
    "xml": "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
    "glm": "<tool_call>{{ f.name }}\n{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>",
    "mistral": '{% if loop.first %}[TOOL_CALLS] [{% endif %}{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
    "{{ ']' if loop.last else ', ' }}",
    "mistral named": "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}",
    "deepseek": "{% if loop.first %}<｜tool▁calls▁begin｜>{% endif %}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}\n```json\n"
    "{{ f.arguments | tojson }}\n```<｜tool▁call▁end｜>{% if loop.last %}<｜tool▁calls▁end｜>{% endif %}",
    "harmony": "<|channel|>commentary to=functions.{{ f.name }} <|constrain|>json<|message|>{{ f.arguments | tojson }}",
    "gemma": "<|tool_call>call:{{ f.name }}{ {% for k, v in f.arguments.items() %}{{ k }}:"
    "{% if v is string %}<|\"|>{{ v }}<|\"|>{% else %}{{ v | tojson }}{% endif %}{{ '' if loop.last else ',' }}{% endfor %} }<tool_call|>",
    "pythonic": "{{ '[' if loop.first else ', ' }}{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}"
    "{{ '' if loop.last else ', ' }}{% endfor %}){{ ']' if loop.last else '' }}",
    "llama": '{{ "" if loop.first else "; " }}{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}',
}
"""How each format writes one of several calls."""
SPECIAL = (
    "<|im_start|>",
    "<|im_end|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|message|>",
    "<|channel|>",
    "<|constrain|>",
    "<｜tool▁call▁begin｜>",
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {"type": "object", "properties": {"text": {"type": "string"}, "count": {"type": "integer"}}},
        },
    }
    for name in ("look", "find_it")
]
WRITTEN = [("look", {"text": "12", "count": 3}), ("find_it", {"text": 'a "b" \\ é'})]


def encoder_of(name):
    calls = "{% for c in m.tool_calls or [] %}{% set f = c.function %}" + CALLS[name] + "{% endfor %}"
    return PromptEncoder(bpe_tokenizer(HEAD + calls + TAIL, SPECIAL))


def asked(**forced):
    return Dialogue([{"role": "user", "content": "hi"}], TOOLS, **forced)


def said(encoder, calls):
    """What the template writes for an answer with these calls."""
    made = [
        {"id": f"call{i:05d}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for i, (name, arguments) in enumerate(calls)
    ]
    answer = {"role": "assistant", "content": "", "tool_calls": made}
    begun, bridge = encoder._bridge._render(asked()), encoder._bridge
    text = bridge._render(Dialogue([*asked().messages, answer], TOOLS))
    return text[len(begun) : text.index("<|im_end|>", len(begun))]


def answer_to(encoder, dialogue, text):
    """(the prompt, the message) of an answer with this text."""
    tokenizer, prompt = encoder.tokenizer, encoder.encode(dialogue)
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return prompt, encoder.read_answer(prompt, Sampled(TokenTrace.from_arrays(prompt.ids, ids, None, "stop"), True, 0)).message


def calls_of(message):
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls", ())]


@pytest.mark.parametrize("name", CALLS)
def test_the_format_of_a_template_is_found_and_its_calls_are_read(name):
    encoder = encoder_of(name)
    assert encoder.tool_format(TOOLS).name == name
    for calls in (WRITTEN[:1], WRITTEN, [("look", {})]):
        _, message = answer_to(encoder, asked(), said(encoder, calls))
        assert calls_of(message) == calls
        assert not message["content"] or name == "harmony"


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("forced", ["", "find_it"])
def test_a_forced_call_begins_in_the_prompt_as_the_template_writes_it(name, forced):
    encoder = encoder_of(name)
    prompt, _ = answer_to(encoder, asked(forced=forced), "")
    whole = said(encoder, WRITTEN[1:])
    assert prompt.begun
    assert whole.startswith(prompt.begun)
    assert ("find_it" in prompt.begun) == bool(forced)
    free = encoder.encode(asked())
    assert prompt.ids[: len(free.ids)] == free.ids
    assert encoder.tokenizer.decode(prompt.ids[len(free.ids) :]) == prompt.begun
    _, message = answer_to(encoder, asked(forced=forced), whole.removeprefix(prompt.begun))
    assert calls_of(message) == WRITTEN[1:]


@pytest.mark.parametrize("name", CALLS)
@given(st.text(max_size=30), st.integers(0, 40))
@settings(max_examples=30, deadline=None)
def test_any_text_can_be_read_in_every_format(name, noise, place):
    encoder = encoder_of(name)
    text = said(encoder, WRITTEN)
    for odd in (noise, text[:place] + noise + text[place:], text[: len(text) - place], text + noise):
        message = FORMATS[name].message(odd, TOOLS)
        assert message.get("tool_calls") or message["content"] == odd


OPTIONAL = [{"anyOf": [{"type": "string"}, {"type": "null"}]}, {"type": ["string", "null"]}, {"enum": ["12", "true"]}]


@pytest.mark.parametrize("name", ["xml", "glm"])
@pytest.mark.parametrize("schema", [*OPTIONAL, {"type": "integer"}, True, None])
def test_a_text_has_the_type_of_its_schema(name, schema):
    encoder, tools = encoder_of(name), json.loads(json.dumps(TOOLS))
    tools[0]["function"]["parameters"]["properties"]["text"] = schema
    message = FORMATS[name].message(said(encoder, [("look", {"text": "12"})]), tools)
    assert calls_of(message) == [("look", {"text": "12" if schema in OPTIONAL else 12})]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gemma", "<|tool_call>call:f{x:1}<tool_call|><|tool_call>call:g x:1"),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁begin｜>"),
        ("mistral named", "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g"),
        ("pythonic", '[f(**{"x": 1})]'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>'),
    ],
)
def test_one_malformed_call_makes_the_answer_text(name, text):
    assert FORMATS[name].message(text) == {"role": "assistant", "content": text}


@pytest.mark.parametrize("name", ["xml", "glm", "gemma", "hermes"])
def test_repeated_beginnings_are_read_in_linear_time(name):
    begun = {
        "xml": "<tool_call><function=a>",
        "glm": "<tool_call>a<arg_key>",
        "gemma": "<|tool_call>call:a{",
        "hermes": "<tool_call>{",
    }
    text = begun[name] * 50_000
    assert FORMATS[name].read(text) == (len(text), [])


def test_values_of_json_and_of_python_are_read_in_pythonic_calls():
    calls = FORMATS["pythonic"].read("[f(a=true, b=[None, {'c': False}], d=-1.5), g()]")[1]
    assert calls == [("f", {"a": True, "b": [None, {"c": False}], "d": -1.5}), ("g", {})]
    for text in ("[f(__import__('os'))]", "[f(a=open('x'))]", "[f(a=b)]", "f(a=1)", "[1]", "[f(1)]", "[a.b()]"):
        assert FORMATS["pythonic"].read(text)[1] == []


def test_a_forced_call_closes_a_thought_that_the_prompt_opens():
    opened = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    history = (
        "{% for c in m.tool_calls or [] %}{% set f = c.function %}<think>\n\n</think>\n\n" + CALLS["hermes"] + "{% endfor %}"
    )
    template = HEAD + history + TAIL[: TAIL.index("{% if")] + opened
    encoder = PromptEncoder(bpe_tokenizer(template))
    assert encoder.encode(asked(forced="")).begun == '\n</think>\n\n<tool_call>\n{"name": "'


def test_a_format_that_is_not_known_is_refused_before_the_run():
    encoder = PromptEncoder(bpe_tokenizer(HEAD + "{% for c in m.tool_calls or [] %}CALL {{ c.function }}{% endfor %}" + TAIL))
    with pytest.raises(ConfigError, match=r"writes a call as .*CALL"):
        encoder.tool_format(TOOLS)


BROKEN = {
    "hermes": "<tool_call>{",
    "xml": "<tool_call><function",
    "glm": "<tool_call>{}</tool_call>",
    "mistral": "[TOOL_CALLS] [{",
    "mistral named": "[TOOL_CALLS]look",
    "deepseek": "<｜tool▁call▁begin｜>look",
    "harmony": "<|channel|>commentary to=functions.look<|message|>{",
    "gemma": "<|tool_call>look{}",
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_answer_after_a_malformed_call_continues_its_tokens(name):
    """The prompt with the result begins with what was read and sampled."""
    encoder, text = encoder_of(name), "So. " + BROKEN[name]
    dialogue = asked(keep_malformed=True)
    prompt, message = answer_to(encoder, dialogue, text)
    [call] = message["tool_calls"]
    assert call["error"]
    assert message["content"] == "So."
    told = {"role": "tool", "tool_call_id": call["id"], "name": "", "content": "Error: unreadable"}
    later = encoder.encode(replace(dialogue, messages=[*dialogue.messages, message, told]))
    begun = [*prompt.ids, *encoder.tokenizer(text, add_special_tokens=False)["input_ids"]]
    assert (later.reason, later.ids[: len(begun)]) == ("continues", begun)
    assert "Error: unreadable" in encoder.decode(later.ids[len(begun) :])
    assert "tool_calls" not in answer_to(encoder, asked(), text)[1]
