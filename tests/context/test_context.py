"""What the model sees of a dialogue."""

import re

import pytest
from hypothesis import given, strategies as st

from ludic.context import ContextStrategy, FullDialog, TruncatedThinkingContext
from ludic.envs import PromptEnv
from ludic.types import ChatResponse


def test_a_dialogue_grows_message_by_message():
    context = FullDialog("Be kind.")
    context.on_env_reset("hello", {})
    context.on_after_act(ChatResponse("hi"))
    context.on_after_step("bye", {})
    expected = [("system", "Be kind."), ("user", "hello"), ("assistant", "hi"), ("user", "bye")]
    assert [(m["role"], m["content"]) for m in context.on_before_act()] == expected
    context.on_before_act().clear()
    context.messages.clear()
    assert len(context.messages) == 4


def test_a_dialogue_starts_with_the_messages_of_the_environment():
    """Regression test: a prompt of four messages was shown as its last message only."""
    prompt = [
        {"role": "system", "content": "add"},
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "1+2="},
    ]
    for make in (FullDialog, TruncatedThinkingContext):
        context = make("my own")
        context.reset()
        context.on_env_reset(*PromptEnv({"prompt": prompt}).env_reset())
        assert context.on_before_act() == prompt
        context.on_before_act()[0]["content"] = "changed"
        context.reset()
        context.on_env_reset(*PromptEnv({"prompt": prompt[1:]}).env_reset())
        assert context.messages == [{"role": "system", "content": "my own"}, *prompt[1:]]
    assert prompt[0]["content"] == "add"


@pytest.mark.parametrize("messages", [3, "two", [], ["text"], [{"content": "no role"}], {"role": "user"}])
def test_other_values_named_messages_are_left_to_the_environment(messages):
    context = FullDialog()
    context.on_env_reset("the first", {"messages": messages})
    assert context.messages == [{"role": "user", "content": "the first"}]


def test_a_reset_clears_the_dialogue_and_sets_the_prompt():
    context = FullDialog("Default.")
    context.on_env_reset("x", {})
    context.reset()
    assert [m["content"] for m in context.messages] == ["Default."]
    context.reset(system_prompt="Other.")
    assert [m["content"] for m in context.messages] == ["Other."]
    context.reset(system_prompt="")
    assert context.messages == []
    assert context.default_system_prompt == "Default."


def test_empty_parts_of_tool_messages_are_left_out():
    context = FullDialog()
    assert context.supports_tools
    context.add_assistant_step("", [{"id": "1"}])
    context.add_assistant_step("text", None)
    context.add_tool_result("1", "add", "3")
    assert context.messages == [
        {"role": "assistant", "tool_calls": [{"id": "1"}]},
        {"role": "assistant", "content": "text"},
        {"role": "tool", "tool_call_id": "1", "name": "add", "content": "3"},
    ]


class Late(FullDialog):
    """Overrides `reset` and uses an attribute that its constructor sets later."""

    def __init__(self):
        super().__init__("S")
        self.resets = 0

    def reset(self, *, system_prompt=None):
        super().reset(system_prompt=system_prompt)
        self.resets += 1


def test_the_constructor_sets_the_prompt_without_calling_overridden_methods():
    context = Late()
    assert context.messages == [{"role": "system", "content": "S"}]
    context.reset()
    assert context.resets == 1


def test_a_context_strategy_must_define_when_messages_are_added():
    with pytest.raises(TypeError, match="on_before_act"):
        ContextStrategy()


def view_of_answer(answer, **settings):
    """What the model sees of its own earlier answer."""
    context = TruncatedThinkingContext(**settings)
    context.on_env_reset("<think>not mine</think> obs", {})
    context.on_after_act(ChatResponse(answer))
    context.on_after_step("go on", {})
    assert [m["content"] for m in context.messages] == [
        "<think>not mine</think> obs",
        answer,
        "go on",
    ]  # the stored history is complete
    first, own, last = context.on_before_act()
    assert (first["content"], last["content"]) == ("<think>not mine</think> obs", "go on")
    return own["content"]


@pytest.mark.parametrize(
    ("answer", "view"),
    [
        ("<think>long</think>A1", "<think>[TRUNCATED]</think>A1"),
        (" \n<Think>a\nb</THINK> \n A1 ", " \n<Think>[TRUNCATED]</THINK> \n A1 "),
        ("<think></think>A1", "<think>[TRUNCATED]</think>A1"),
        ("<think>a</think>b<think>c</think>d", "<think>[TRUNCATED]</think>b<think>c</think>d"),  # only the first block
        (r"<think>\1</think>\g<0>", r"<think>[TRUNCATED]</think>\g<0>"),  # text, not a regex template
    ],
)
def test_earlier_thinking_is_hidden(answer, view):
    assert view_of_answer(answer) == view


@pytest.mark.parametrize(
    "answer",
    [
        "A1",
        "<think>long</think>",
        "<think>long</think> \n",
        "so <think>long</think>A1",
        "<think>long A1",
        "long</think>A1",
        "<thinking>a</thinking>b",
        "",
    ],
)
def test_an_answer_without_thinking_is_shown_unchanged(answer):
    assert view_of_answer(answer) == answer


def test_the_placeholder_can_be_set():
    assert view_of_answer("<think>long</think>A1", placeholder=r"\1...") == r"<think>\1...</think>A1"
    assert TruncatedThinkingContext("S").messages == [{"role": "system", "content": "S"}]


def test_the_view_keeps_the_other_fields_of_a_message():
    context = TruncatedThinkingContext()
    context.add_assistant_step("<think>long</think>A1", [{"id": "1"}])
    assert context.on_before_act() == [
        {"role": "assistant", "content": "<think>[TRUNCATED]</think>A1", "tool_calls": [{"id": "1"}]}
    ]
    assert context.messages[0]["content"] == "<think>long</think>A1"


def test_messages_without_text_are_shown_unchanged():
    context = TruncatedThinkingContext()
    context.add_assistant_step(None, [{"id": "1"}])
    context._messages.append({"role": "assistant", "content": None})
    assert context.on_before_act() == [{"role": "assistant", "tool_calls": [{"id": "1"}]}, {"role": "assistant", "content": None}]


@given(st.lists(st.sampled_from(["<think>", "</think>", "<THINK>", "x", " ", "\n", "<", "think>"]), max_size=10).map("".join))
def test_the_answer_is_never_hidden(answer):
    view = view_of_answer(answer, placeholder="")
    assert view == answer or re.sub(r"(?is)^(\s*<think>).*?(</think>)", r"\1\2", answer, count=1) == view
    assert view.split("</think>")[-1] == answer.split("</think>")[-1]
