"""What the model is shown."""

from ludic.context import FullDialog
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


def test_a_reset_forgets_and_chooses_the_prompt():
    context = FullDialog("Default.")
    context.on_env_reset("x", {})
    context.reset()
    assert [m["content"] for m in context.messages] == ["Default."]
    context.reset(system_prompt="Other.")
    assert [m["content"] for m in context.messages] == ["Other."]
    context.reset(system_prompt="")
    assert context.messages == []
    assert context.default_system_prompt == "Default."


def test_steps_with_tools_leave_empty_parts_out():
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
