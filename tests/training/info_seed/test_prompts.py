import asyncio

import pytest
from image_spans import draw_picture

from ludic.envs.env import SingleAgentEnv
from ludic.errors import ConfigError, DataError
from ludic.images.content import image_part
from ludic.images.store import ImageStore, use_store
from ludic.training.info_seed import InfoSeed, SeedPrompts, SeedTaggedEnv, seed_of, seed_tagged, without_tags
from ludic.training.types import ActorTokenLogps, EnvSpec, ProtocolSpec, RolloutRequest, SampleAttachments, SAWBatch, SAWItem
from ludic.types import ImageSpan, StepOutcome


def request(**meta):
    return RolloutRequest(EnvSpec("sum", {"digits": 2}), ProtocolSpec("single_agent"), env_seed=7, sampling_seed=100, meta=meta)


def test_each_prompt_has_plain_completions_and_one_of_each_seed_in_one_group():
    members = SeedPrompts(2, InfoSeed(3)).expand([request(problem="a"), request(problem="b")])
    assert len(members) == 10
    for group in (members[:5], members[5:]):
        assert len({member.meta["group_id"] for member in group}) == 1
        assert [member.meta.get("seed_id") for member in group] == [None, None, 1, 2, 3]
        assert [member.env.kwargs for member in group[:2]] == [{"digits": 2}] * 2
        assert [member.env.kwargs["seed_id"] for member in group[2:]] == [1, 2, 3]
        assert [member.sampling_seed for member in group] == [100, 101, 102, 103, 104]
        assert {member.env_seed for member in group} == {7}
    assert members[0].meta["group_id"] != members[5].meta["group_id"]
    assert [member.meta["problem"] for member in members] == ["a"] * 5 + ["b"] * 5


def test_tags_follow_the_prompt_or_replace_it():
    assert InfoSeed(4).tag("2+2=", 3) == "2+2=\n[seed=3]"
    assert InfoSeed(4, template="seed {seed}: {prompt}!").tag("2+2=", 3) == "seed 3: 2+2=!"
    assert InfoSeed(4).tag("{x}", 1) == "{x}\n[seed=1]"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_seeds": 0}, "num_seeds"),
        ({"coeff": -0.1}, "coeff"),
        ({"temperature": 0.0}, "temperature"),
        ({"loss": "mse"}, "loss"),
        ({"pooling": "max"}, "pooling"),
        ({"template": "[seed]"}, r"must contain \{seed\}"),
        ({"template": "{seed} {user}"}, "no other field"),
        ({"template": "{seed"}, "is not a format string"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ConfigError, match=message):
        InfoSeed(**{"num_seeds": 4, **settings})
    with pytest.raises(ConfigError, match="group_size"):
        SeedPrompts(0, InfoSeed(4))


class Sum(SingleAgentEnv):
    def __init__(self, digits, *, ends=True, messages=None):
        super().__init__()
        self.ends, self.messages, self.closed = ends, messages, False

    def env_reset(self, *, seed=None):
        return f"{seed}+1=", {} if self.messages is None else {"messages": self.messages}

    def env_step(self, action):
        return StepOutcome("", float(action == "8"), truncated=False, terminated=self.ends)

    def env_current_obs(self):
        return "7+1="

    def close(self):
        self.closed = True


class AsyncSum(Sum):
    async def env_reset(self, *, seed=None):
        return super().env_reset(seed=seed)

    async def env_step(self, action):
        return super().env_step(action)


@pytest.mark.parametrize("kind", [Sum, AsyncSum])
def test_the_environment_tags_its_first_observation_and_nothing_else(kind):
    env = seed_tagged(kind, InfoSeed(2))(digits=2, seed_id=2)
    assert asyncio.run(env.reset(seed=7)) == {"agent_0": ("7+1=\n[seed=2]", {})}
    assert asyncio.run(env.step({"agent_0": "8"}))["agent_0"].reward == 1.0
    assert env.agent_ids == env.active_agents == ["agent_0"]
    env.close()
    assert env.inner.closed


def test_a_request_without_a_seed_is_played_as_it_is():
    assert type(seed_tagged(Sum, InfoSeed(2))(digits=2)) is Sum


def test_of_a_chat_the_last_message_of_the_user_is_tagged():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    env = SeedTaggedEnv(Sum(2, messages=messages), 1, "\n[seed={seed}]")
    _, info = asyncio.run(env.reset(seed=7))["agent_0"]
    assert [message["content"] for message in info["messages"]] == ["a", "b", "c\n[seed=1]"]
    assert messages[2]["content"] == "c"
    with pytest.raises(ConfigError, match="this prompt has none"):
        asyncio.run(SeedTaggedEnv(Sum(2, messages=[{"role": "system", "content": "x"}]), 1, "{seed}").reset(seed=7))


def test_an_environment_that_goes_on_is_refused():
    env = SeedTaggedEnv(Sum(2, ends=False), 1, "{seed}")
    with pytest.raises(ConfigError, match="environments of one turn; Sum"):
        asyncio.run(env.step({"agent_0": "8"}))


def sample(prompt, completion, *, seed=None, group="g", step=0):
    ids = prompt + completion
    return SAWItem(
        ids,
        [1] * len(ids),
        [0] * len(prompt) + [1] * len(completion),
        1.0,
        {
            "request_meta": {"group_id": group, "seed_id": seed},
            "rollout_id": "r",
            "step_index": step,
            "prompt_length": len(prompt),
        },
        SampleAttachments(ActorTokenLogps([-0.1] * len(completion))),
    )


def test_seeded_samples_get_the_prompt_of_a_plain_one():
    batch = without_tags(SAWBatch([sample([5, 6, 99], [8, 9], seed=1), sample([5, 6], [7]), sample([1], [2], group="h")]))
    assert [item.input_ids for item in batch.items] == [[5, 6, 8, 9], [5, 6, 7], [1, 2]]
    assert batch.items[0].action_mask == [0, 0, 1, 1]
    assert batch.items[0].attention_mask == [1] * 4
    assert batch.items[0].meta["prompt_length"] == 2
    assert batch.items[0].actor_logps.token_logps == [-0.1, -0.1]
    assert [seed_of(item.meta) for item in batch.items] == [1, 0, 0]
    assert batch.meta["seed/without_plain"] == 0


def test_the_prompt_of_a_plain_sample_comes_with_its_images():
    seeded, plain = sample([1, 9, 9, 6, 99], [8], seed=1), sample([9, 9, 6], [7])
    seeded.images, plain.images = (ImageSpan("a", 1, 2),), (ImageSpan("a", 0, 2),)
    [one, other] = without_tags(SAWBatch([seeded, plain])).items
    assert one.input_ids == [9, 9, 6, 8]
    assert one.images == other.images == (ImageSpan("a", 0, 2),)


def test_seeded_samples_without_a_plain_one_are_dropped_and_counted():
    batch = without_tags(SAWBatch([sample([5], [8], seed=1, group="g"), sample([5], [7], group="h")]))
    assert len(batch.items) == 1
    assert batch.meta["seed/without_plain"] == 1
    with pytest.raises(DataError, match="rollouts of one turn"):
        without_tags(SAWBatch([sample([5], [8], step=1)]))


def test_the_text_of_a_prompt_with_images_is_tagged():
    image, text = image_part("a" * 32), {"type": "text", "text": "How many?"}
    assert InfoSeed(4).tag([image, text], 3) == [image, {"type": "text", "text": "How many?\n[seed=3]"}]
    assert InfoSeed(4).tag([text, image], 3) == [text, image, {"type": "text", "text": "\n[seed=3]"}]
    with use_store(ImageStore()) as store:
        messages = [{"role": "user", "content": [image_part(store.add(draw_picture(1))), text]}]
        env = SeedTaggedEnv(Sum(2, messages=messages), 1, "\n[seed={seed}]")
        [(_, info)] = asyncio.run(env.reset(seed=7)).values()
    assert info["messages"][0]["content"][1]["text"] == "How many?\n[seed=1]"
    assert messages[0]["content"][1] == text
