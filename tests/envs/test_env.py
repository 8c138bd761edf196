"""A single-agent environment as a user writes it."""

from playing import FOR_RL, ScriptedClient, play, protocol

from ludic.envs import SingleAgentEnv
from ludic.types import StepOutcome


class WithoutInit(SingleAgentEnv):
    """Has its own constructor, which does not call that of its base class."""

    def __init__(self, word):
        self.word = word

    def env_reset(self, *, seed=None):
        return self.word, {}

    def env_step(self, action):
        return StepOutcome("", float(action == self.word), False, True)

    def env_current_obs(self):
        return self.word


def test_a_subclass_that_does_not_call_super_init_can_be_played():
    env = WithoutInit("a")
    assert (env.agent_ids, env.active_agents) == (["agent_0"], ["agent_0"])
    (rollout,) = play(protocol(ScriptedClient("a")).run(env=env, max_steps=1, inference=FOR_RL))
    assert rollout.total_reward == 1.0
