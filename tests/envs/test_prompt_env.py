"""An environment that only shows a prompt, and a dialogue that starts with its messages."""

import pytest

from ludic.context import GivenDialog
from ludic.envs import PromptEnv
from ludic.types import ChatResponse

MESSAGES = [
    {"role": "user", "content": "Name a color."},
    {"role": "assistant", "content": "Blue."},
    {"role": "user", "content": "Another."},
]


def test_a_text_prompt_is_the_observation_and_its_row_is_in_the_info():
    row = {"prompt": "2+2=", "answer": 4}
    env = PromptEnv(row, system_prompt="S")
    assert env.env_reset(seed=1) == env.env_reset(seed=2) == ("2+2=", {})
    assert env.suggested_sysprompt == "S"
    outcome = env.env_step("5")
    assert (outcome.reward, outcome.terminated, outcome.truncated, outcome.info) == (0.0, True, False, {"row": row})
    with pytest.raises(RuntimeError, match="already answered"):
        env.env_step("5")


def test_a_prompt_of_messages_is_shown_completely():
    obs, info = PromptEnv({"prompt": MESSAGES}).env_reset()
    assert (obs, info) == ("Another.", {"messages": MESSAGES})
    context = GivenDialog("Be brief.")
    context.reset()
    context.on_env_reset(obs, info)
    assert context.on_before_act() == [{"role": "system", "content": "Be brief."}, *MESSAGES]
    context.on_after_act(ChatResponse("Red."))
    context.on_after_step("And?", {})
    assert context.messages[-2:] == [{"role": "assistant", "content": "Red."}, {"role": "user", "content": "And?"}]
    assert len(MESSAGES) == 3  # the row is unchanged


def test_a_system_message_in_the_prompt_replaces_that_of_the_context():
    context = GivenDialog("Be brief.")
    context.reset(system_prompt="Be long.")
    own = {"role": "system", "content": "Rhyme."}
    context.on_env_reset("x", {"messages": [own, MESSAGES[0]]})
    assert context.messages == [own, MESSAGES[0]]


def test_without_prompt_messages_the_context_is_a_full_dialogue():
    context = GivenDialog("Be brief.")
    context.on_env_reset("2+2=", {"messages": []})
    assert context.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2="}]
