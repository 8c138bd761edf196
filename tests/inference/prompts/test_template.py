"""Prompts rendered by a chat template with tools, and a client that parses tool calls."""

import pytest
from chat_families import FAMILIES, gemma_that_begins_texts
from playing import play, tiny_model, tokenizer
from tool_playing import TEMPLATE, call

from ludic.errors import ConfigError
from ludic.inference import ChatCompletionRequest, LocalChatClient, ReturnSpec, SamplingParams, ToolRequest
from ludic.inference.local.decode import Completion
from ludic.inference.prompts.encoder import PromptEncoder
from ludic.inference.prompts.template import ChatTemplate, Dialogue
from ludic.models.byte_tokenizer import EOS_ID, make_byte_tokenizer
from ludic.tasks.demonstrations import DemonstrationSource
from ludic.tasks.digits import Addition
from ludic.training.samples.conversations import tokenize_prompt_completion
from ludic.training.samples.preference import PreferenceItems

TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
DEAF = "{% for message in messages %}{{ message.content }};{% endfor %}"


def make_template(template=TEMPLATE):
    made = make_byte_tokenizer()
    made.chat_template = template
    return made


def user(text="hi"):
    return {"role": "user", "content": text}


def test_without_a_template_a_prompt_is_its_text_after_the_system_message():
    template, system = ChatTemplate(tokenizer()), {"role": "system", "content": "Add."}
    assert template.render([user("1+1=")]) == "1+1="
    assert template.render([system, user("1+1=")]) == "Add.\n\n1+1="
    assert template.render([]) == ""


@pytest.mark.parametrize("roles", [("user", "assistant"), ("system", "user", "assistant", "user"), ("user", "user")])
def test_a_conversation_without_a_template_is_refused(roles):
    messages = [{"role": role, "content": "1+1="} for role in roles]
    for render in (ChatTemplate(tokenizer()).render, lambda one: ChatTemplate(tokenizer()).render_all([one])):
        with pytest.raises(ConfigError, match=rf"{len(roles)} messages \({', '.join(roles)}\), .*no chat template"):
            render(messages)


@pytest.mark.parametrize("made", [tokenizer(), make_template()], ids=["no template", "template"])
def test_prompts_are_rendered_the_same_alone_and_together(made):
    template = ChatTemplate(made)
    dialogues = [[user("a")], [{"role": "system", "content": "b"}, user("c")], [user("a")]]
    assert template.render_all(dialogues) == [template.render(messages) for messages in dialogues]
    assert template.render_all([]) == []


def test_tools_are_rendered_by_the_template():
    template = ChatTemplate(make_template())
    assert template.render([user()]) == "<|user|>\nhi<eos>\n<|assistant|>\n"
    shown = template.render([user()], [TOOL])
    assert shown.startswith('<|system|>\n{"type": "function", "function": {"name": "add", "description": "Add."')
    assert shown.endswith("<|user|>\nhi<eos>\n<|assistant|>\n")


def test_tool_calls_are_rendered_as_the_model_wrote_them():
    """Templates convert arguments to JSON, so arguments that are JSON text already would be quoted
    twice."""
    messages = [
        user(),
        {"role": "assistant", "content": "So.", "tool_calls": [call("add", '{"a": 1, "b": "x"}')]},
        {"role": "tool", "tool_call_id": "id0", "name": "add", "content": "3"},
    ]
    before = [message.copy() for message in messages]
    wrote = 'So.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x"}}\n</tool_call>'
    assert f"<|assistant|>\n{wrote}<eos>\n<|tool|>\n3<eos>" in ChatTemplate(make_template()).render(messages, [TOOL])
    assert messages == before
    odd = [{"role": "assistant", "tool_calls": [call("add", "not json"), {"id": "x"}][:1]}]
    assert '"arguments": "not json"' in ChatTemplate(make_template()).render(odd)


def test_messages_without_content_are_rendered_as_empty():
    """A context omits the content of an empty answer; templates fail when they concatenate a
    missing value."""
    adding = make_template("{% for message in messages %}{{ message.role + ':' + message.content + ';' }}{% endfor %}")
    assert ChatTemplate(adding).render([user(), {"role": "assistant"}, {"role": "assistant", "content": None}]) == (
        "user:hi;assistant:;assistant:;"
    )


def test_a_template_that_ignores_tools_is_refused_when_tools_are_used():
    deaf = ChatTemplate(make_template(DEAF))
    assert deaf.render([user("add")]) == "add;"
    for _ in range(2):
        with pytest.raises(ConfigError, match="chat template ignores tools"):
            deaf.render([user("add")], [TOOL])
    with pytest.raises(ConfigError, match="no chat template"):
        ChatTemplate(tokenizer()).render([user()], [TOOL])


def dialogue_of(tools):
    return Dialogue.of(ChatCompletionRequest("m", [user()], tools=tools))


def test_a_tool_choice_decides_which_tools_are_shown_and_forced():
    assert dialogue_of(None).tools == dialogue_of(ToolRequest([TOOL], "none")).tools == ()
    for choice in ("auto", None):
        shown = dialogue_of(ToolRequest([TOOL], choice))
        assert (shown.tools, shown.forced) == ([TOOL], None)
    assert dialogue_of(ToolRequest([TOOL], "required")).forced == ""
    assert dialogue_of(ToolRequest([], "required")).forced is None
    named = {"type": "function", "function": {"name": "add"}}
    assert dialogue_of(ToolRequest([TOOL], named)).forced == "add"
    with pytest.raises(ConfigError, match=r"function of tool_choice \('sub'\) must be"):
        dialogue_of(ToolRequest([TOOL], {"type": "function", "function": {"name": "sub"}}))
    with pytest.raises(ConfigError, match=r"tool_choice \('any'\) .* auto, none, required"):
        dialogue_of(ToolRequest([TOOL], "any"))


def client_that_says(text, monkeypatch, template=TEMPLATE, finish="stop"):
    """A real client whose sampling is replaced: it returns the tokens of `text`, then the end
    token."""
    made = LocalChatClient(tiny_model(max_position_embeddings=1024), make_template(template))

    def decode(model, requests, *, eos_ids, pad_id, prefixes, routers):
        ids = [*made.tokenizer(text, add_special_tokens=False)["input_ids"], *([EOS_ID] if finish == "stop" else [])]
        return [Completion(ids, [-0.1] * len(ids), [-0.1] * len(ids), finish) for _ in requests]

    monkeypatch.setattr("ludic.inference.local.client.decode", decode)
    return made


def ask(client, messages=None, tools=None):
    request = ChatCompletionRequest(
        model="m",
        messages=messages or [user()],
        sampling=SamplingParams(max_tokens=4),
        return_=ReturnSpec.for_rl(),
        seed=0,
        tools=ToolRequest([TOOL]) if tools is None else tools,
    )
    return play(client.complete(request))


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def test_tool_calls_are_returned_in_openais_format_with_the_sampled_tokens(monkeypatch):
    client = client_that_says(f"So.\n{CALL}", monkeypatch)
    response, info = ask(client)
    (choice,) = info["raw_response"]["choices"]
    assert choice == {
        "index": 0,
        "finish_reason": "tool_calls",
        "message": {
            "role": "assistant",
            "content": "So.",
            "tool_calls": [{"id": "call00000", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
        },
    }
    assert (response.text, response.finish_reason) == (f"So.\n{CALL}", "tool_calls")
    assert client.tokenizer.decode(response.completion_token_ids[:-1]) == response.text
    assert client.tokenizer.decode(response.prompt_token_ids) == client._prompts._template.render([user()], [TOOL])
    assert info["policy_version"] == 0
    # The next prompt continues from these tokens; nothing is re-tokenised.
    told = [user(), choice["message"], {"role": "tool", "tool_call_id": "call00000", "name": "add", "content": "2"}]
    second, second_info = ask(client, told)
    sampled = response.prompt_token_ids + response.completion_token_ids[:-1]
    assert second.prompt_token_ids[: len(sampled)] == sampled
    assert second_info["raw_response"]["choices"][0]["message"]["tool_calls"][0]["id"] == "call00001"


def test_a_malformed_call_is_returned_as_text(monkeypatch):
    response, info = ask(client_that_says("<tool_call>oops</tool_call>", monkeypatch))
    (choice,) = info["raw_response"]["choices"]
    assert choice["message"] == {"role": "assistant", "content": "<tool_call>oops</tool_call>"}
    assert (choice["finish_reason"], response.finish_reason) == ("stop", "stop")


def test_a_call_at_the_token_limit_keeps_its_finish_reason(monkeypatch):
    response, info = ask(client_that_says(CALL, monkeypatch, finish="length"))
    assert response.finish_reason == info["raw_response"]["choices"][0]["finish_reason"] == "length"


def test_without_tools_text_that_looks_like_a_call_stays_text(monkeypatch):
    for tools in (ToolRequest([]), ToolRequest([TOOL], "none")):
        response, info = ask(client_that_says(CALL, monkeypatch), tools=tools)
        assert (response.text, response.finish_reason) == (CALL, "stop")
        assert "raw_response" not in info


def test_the_same_messages_with_other_tools_give_another_prompt():
    client = LocalChatClient(tiny_model(max_position_embeddings=1024), make_template())
    other = {"type": "function", "function": {**TOOL["function"], "name": "subtract"}}
    prompts = [ask(client, tools=ToolRequest(tools))[0].prompt_token_ids for tools in ([TOOL], [other], [], [TOOL])]
    assert prompts[0] == prompts[3]
    assert len({tuple(p) for p in prompts}) == 3


def test_tools_that_the_template_ignores_fail_only_their_request():
    client = LocalChatClient(tiny_model(), tokenizer())
    with pytest.raises(ConfigError, match="no chat template"):
        ask(client)
    assert ask(client, tools=ToolRequest([]))[0].completion_token_ids
    with pytest.raises(ConfigError, match="no chat template"):
        ask(client, tools=ToolRequest([TOOL], "required"))


def test_a_text_without_a_template_begins_as_the_tokenizer_begins_texts():
    """As with Gemma: its model was trained with `<bos>` before every text."""
    beginning = gemma_that_begins_texts()
    encoder = PromptEncoder(beginning)
    beginning.chat_template = FAMILIES["gemma"].template
    assert encoder.encode(Dialogue([user("It is 4.")])).ids.count(beginning.bos_token_id) == 1
    beginning.chat_template = None
    plain, written = (PromptEncoder(beginning).encode(Dialogue([user(text)])).ids for text in ("It is 4.", "<bos>It is 4."))
    assert plain == beginning("It is 4.")["input_ids"]
    assert written.count(beginning.bos_token_id) == 1
    trained = tokenize_prompt_completion(beginning, "It is", " 4.", "row 1").input_ids
    assert trained[0] == beginning.bos_token_id
    pair = PreferenceItems(beginning).of_row({"chosen": "It is 4.", "rejected": "It is 5."}, "row 1", pair_id=0)
    assert [item.input_ids[0] for item in pair] == [beginning.bos_token_id] * 2


def test_demonstrations_without_a_template_begin_as_the_tokenizer_begins_texts():
    beginning = gemma_that_begins_texts()
    beginning.chat_template = None
    source = DemonstrationSource(Addition(), beginning, batch_size=2, seed=0)
    assert {item.input_ids[0] for item in play(source.next_batch()).items} == {beginning.bos_token_id}
