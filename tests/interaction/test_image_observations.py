"""Environments that show images: they are stored where the protocol takes them."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st
from image_spans import draw_picture, parts
from PIL import Image
from playing import ScriptedClient, play, protocol, verbatim

from ludic.agents import Agent
from ludic.context import FullDialog
from ludic.envs import LudicEnv, SingleAgentEnv
from ludic.errors import DataError, RolloutError
from ludic.files.json_values import encode_lines
from ludic.images.content import find_digests, is_content, join_contents, show_content
from ludic.images.store import ImageStore, use_store
from ludic.interaction import MultiAgentProtocol
from ludic.interaction.single_agent import store_images
from ludic.training.rollouts.episodes import check_rollouts
from ludic.training.rollouts.log import parse_rollout, rollout_record
from ludic.types import Snapshot, StepOutcome

FIRST, SECOND = draw_picture(1), draw_picture(2)


@pytest.fixture(autouse=True)
def store():
    with use_store(ImageStore()) as used:
        yield used


class Gallery(SingleAgentEnv):
    """Shows each of its pictures, and ends."""

    def __init__(self, *shown, info=None):
        super().__init__()
        self.shown, self.info, self.place = shown, info or {}, 0

    def env_reset(self, *, seed=None):
        return self.shown[0], self.info

    def env_step(self, action):
        self.place += 1
        ends = self.place == len(self.shown)
        return StepOutcome(None if ends else self.shown[self.place], float(ends), False, ends)

    def env_current_obs(self):
        return self.shown[self.place]


class AsyncGallery(Gallery):
    async def env_reset(self, *, seed=None):
        return super().env_reset(seed=seed)

    async def env_step(self, action):
        return super().env_step(action)


@pytest.mark.parametrize("kind", [Gallery, AsyncGallery])
def test_pictures_are_content_for_the_model_and_digests_in_the_steps(store, kind):
    digests = [store.add(picture) for picture in (FIRST, SECOND)]
    client = ScriptedClient("a")
    env = kind([FIRST, "What?"], Image.fromarray(SECOND), "text", [{"type": "text", "text": "only "}, "text"])
    [rollout] = play(protocol(client).run(env=env, max_steps=5))
    shown = [parts(digests[0], "What?"), parts(digests[1]), "text", "only text"]
    assert [step.prev_obs for step in rollout.steps] == shown
    assert [step.next_obs for step in rollout.steps] == [*shown[1:], None]
    asked = [[m["content"] for m in request.messages if m["role"] == "user"] for request in client.requests]
    assert asked == [shown[:count] for count in range(1, 5)]
    assert check_rollouts([rollout]) == [rollout]
    [line] = encode_lines([rollout_record(rollout)])
    again = parse_rollout(json.loads(line), "line 1")
    assert [step.prev_obs for step in again.steps] == shown
    assert Snapshot("e", "1", "r", shown[0], {}).to_json().count(digests[0]) == 1


def test_messages_of_a_reset_are_stored_too(store):
    client = ScriptedClient("a")
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "image", "image": FIRST}, {"type": "text", "text": "?"}]},
    ]
    [rollout] = play(protocol(client).run(env=Gallery("?", info={"messages": messages}), max_steps=1))
    assert client.requests[0].messages == [messages[0], {"role": "user", "content": parts(store.add(FIRST), "?")}]
    assert rollout.steps[0].prev_obs == "?"


@pytest.mark.parametrize(
    ("shown", "error", "match"),
    [
        (3, RolloutError, "observation of int"),
        (None, RolloutError, "observation of NoneType"),
        ({"a": 1}, DataError, "an observation: part 0 has neither bytes"),
        (FIRST.astype(float), DataError, r"float64 \[6, 6, 3\]"),
        ([{"type": "image", "image": "/etc/passwd"}], DataError, "part 0 .*is text; give the bytes"),
        ([{"type": "image"}], DataError, "no more images"),
    ],
)
def test_an_observation_that_cannot_be_shown_ends_the_episode_in_one_line(shown, error, match):
    with pytest.raises(error, match=match) as caught:
        play(protocol(ScriptedClient("a")).run(env=Gallery(shown), max_steps=1))
    assert str(caught.value).isprintable()
    if error is DataError:
        with pytest.raises(error, match=match):
            play(protocol(ScriptedClient("a")).run(env=Gallery("text", shown, "end"), max_steps=3))


def test_what_a_finished_episode_shows_is_not_looked_at():
    ended = StepOutcome(object(), 1.0, False, True)
    assert store_images(ended) is ended
    text = StepOutcome("text", 1.0, False, False)
    assert store_images(text) is text
    for messages in (None, [], ["a"], [{"role": "user", "content": [{"type": "tool_result"}]}], [{"content": {"type": "image"}}]):
        assert store_images(("text", info := {"messages": messages}))[1] is info


class TwoPlayers(LudicEnv[str, str, str]):
    """x sees two pictures, one after o's action."""

    agent_ids = ("x", "o")

    def __init__(self):
        self.turn = 0

    @property
    def active_agents(self):
        return ["o", "x", "x"][self.turn : self.turn + 1]

    def reset(self, *, seed=None):
        return {"x": ([FIRST, "begin"], {}), "o": ("go", {})}

    def step(self, actions):
        self.turn += 1
        shown = {1: {"x": SECOND, "o": "done"}, 2: {"x": "more"}, 3: {"x": None}}[self.turn]
        return {agent: StepOutcome(obs, 0.0, False, self.turn == 3 or agent == "o") for agent, obs in shown.items()}


def test_pending_observations_of_several_agents_are_one_content(store):
    agents = {name: Agent(client=ScriptedClient("a"), model="m", ctx=FullDialog(), parser=verbatim) for name in ("x", "o")}
    rollouts = play(MultiAgentProtocol(agents).run(env=TwoPlayers(), max_steps=3))
    [steps] = [rollout.steps for rollout in rollouts if rollout.meta["agent_id"] == "x"]
    first, second = store.add(FIRST), store.add(SECOND)
    assert steps[0].prev_obs == [*parts(first, "begin", "\n\n"), *parts(second)]
    assert steps[1].prev_obs == "more"
    assert check_rollouts(rollouts)


CONTENTS = st.text(max_size=3) | st.lists(st.sampled_from(["a" * 32, "b" * 32, "text"]), min_size=1, max_size=3).map(
    lambda values: parts(*values)
)


@given(contents=st.lists(CONTENTS, max_size=4))
def test_joined_contents_show_what_each_shows(contents):
    joined = join_contents(contents, "\n\n")
    assert is_content(joined)
    assert show_content(joined) == "\n\n".join(filter(None, map(show_content, contents)))
    assert find_digests(joined) == [digest for content in contents for digest in find_digests(content)]
    assert isinstance(joined, str) == all(isinstance(content, str) for content in contents)


def test_steps_with_other_parts_are_refused(store):
    [rollout] = play(protocol(ScriptedClient("a")).run(env=Gallery([FIRST]), max_steps=1))
    for wrong in ([{"type": "video"}], [FIRST], [{"type": "image", "image": "a.png"}], 3):
        for name in ("prev_obs", "next_obs"):
            broken = replace(rollout, steps=[replace(rollout.steps[0], **{name: wrong})])
            with pytest.raises(RolloutError, match=f"{name} of step 0 is of type"):
                check_rollouts([broken])
