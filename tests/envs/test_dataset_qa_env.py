"""One question per episode, and the dictionaries that a single-agent environment returns."""

import pytest

from ludic.envs import DatasetQAEnv, LudicEnv, SingleAgentEnv
from ludic.types import StepOutcome

SAMPLE = {"id": 7, "question": "2+2?", "answer": " Four "}


def test_the_prompt_is_the_question_at_every_reset():
    env = DatasetQAEnv(SAMPLE, system_prompt="S")
    assert env.env_reset(seed=1) == env.env_reset(seed=2) == ("2+2?", {"question_id": "7"})
    assert env.suggested_sysprompt == "S"
    assert env.reset() == {"agent_0": ("2+2?", {"question_id": "7"})}
    assert DatasetQAEnv({"question": "q", "answer": "a"}).env_reset()[1] == {"question_id": "0"}
    assert DatasetQAEnv({"uid": "u", "question": "q", "answer": "a"}).env_reset()[1] == {"question_id": "u"}


@pytest.mark.parametrize(("action", "correct"), [("four", True), (" FOUR\n", True), ("4", False), ("", False)])
def test_an_answer_is_graded_and_ends_the_episode(action, correct):
    env = DatasetQAEnv(SAMPLE, correct_reward=2.0, incorrect_reward=-1.0)
    env.env_reset()
    outcome = env.env_step(action)
    assert (outcome.reward, outcome.terminated, outcome.truncated) == (2.0 if correct else -1.0, True, False)
    assert outcome.info == {
        "question_id": "7",
        "raw_action": action,
        "parsed_answer": action,
        "target_answer": "Four",
        "correct": correct,
    }
    assert "Four" in outcome.obs
    assert env.env_current_obs() == outcome.obs


def test_a_second_answer_is_an_error_until_the_next_reset():
    env = DatasetQAEnv(SAMPLE)
    env.env_reset()
    env.env_step("four")
    with pytest.raises(RuntimeError, match="already answered"):
        env.env_step("four")
    env.env_reset()
    assert env.step({})["agent_0"].reward == 0.0  # no action counts as an empty answer


def test_keys_builders_parsers_and_verifiers_can_be_set():
    env = DatasetQAEnv(
        {"q": 3, "a": "x=9"},
        prompt_key="q",
        answer_key="a",
        prompt_builder=lambda sample: f"square of {sample['q']}",
        target_parser=lambda text: text.removeprefix("x="),
        verifier=lambda action, target: int(action) == int(target),
    )
    assert env.env_reset()[0] == "square of 3"
    assert env.env_step("09").reward == 1.0


def test_the_error_of_a_missing_key_names_it():
    with pytest.raises(KeyError, match="'question'"):
        DatasetQAEnv({"answer": "a"}).env_reset()


class Echo(SingleAgentEnv):
    def env_reset(self, *, seed=None):
        self.seen = f"seed {seed}"
        return self.seen, {"i": 1}

    def env_step(self, action):
        self.seen = action
        return StepOutcome(action, 0.0, False, False)

    def env_current_obs(self):
        return self.seen


def test_a_single_agent_environment_uses_its_agent_id_as_key():
    assert Echo().agent_ids == Echo().active_agents == ["agent_0"]
    env = Echo("me")
    assert env.suggested_sysprompt is None
    assert env.reset(seed=4) == {"me": ("seed 4", {"i": 1})}
    assert env.step({"me": "go", "you": "stay"}) == {"me": StepOutcome("go", 0.0, False, False)}
    assert env.current_obs() == {"me": "go"}
    assert env.step({})["me"].obs == ""


def test_the_current_observation_is_optional_and_its_error_names_the_method():
    class Blind(LudicEnv[str, str, str]):
        agent_ids = active_agents = ("a",)

        def reset(self, *, seed=None):
            return {}

        def step(self, actions):
            return {}

    with pytest.raises(NotImplementedError, match="Blind"):
        Blind().current_obs()
