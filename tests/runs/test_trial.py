"""A task is tried before it is trained: a mistake is one line, in seconds."""

import asyncio
import random
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_vision import make_picture, make_tiny_vision

from ludic.envs import PromptEnv, SingleAgentEnv
from ludic.errors import ConfigError
from ludic.images.content import image_part
from ludic.images.store import current_store
from ludic.models.byte_tokenizer import make_byte_tokenizer
from ludic.recipes.compose import compose
from ludic.runs.trial import try_task
from ludic.tasks import EpisodicTask, as_episodic
from ludic.tasks.demonstrations import DemonstrationSource
from ludic.tasks.episodic import Shown, Turn
from ludic.types import StepOutcome

MODEL = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=128))


class Counting(SingleAgentEnv):
    def env_reset(self, *, seed=None):
        random.random(), np.random.rand(), torch.rand(1)  # as environments do
        return "count", {}

    def env_step(self, action):
        return StepOutcome(obs="on", reward=float(len(action)), terminated=action == "stop", truncated=False)

    def env_current_obs(self):
        return "on"


class Count(EpisodicTask):
    max_turns = 3
    max_new_tokens = 6
    reward_sees = "letters"

    def draw(self, rng):
        return {"id": str(rng.randrange(9))}

    def suites(self):
        return {"first": [{"id": "a"}], "second": []}

    def make_env(self, episode):
        return Counting()

    def demonstrations(self, count, rng):
        return [[Turn("count", "one"), Turn("on", "stop")] for _ in range(count)]

    def measure(self, played):
        return {f"letters/{name}": rollout.total_reward for name, episodes in played.items() for _, rollout in episodes}

    def show(self, episode, rollout):
        return Shown("count", " ".join(step.action for step in rollout.steps), "")


class OneTurnTask:
    max_new_tokens, reward_sees, facts = 4, "the answer", {}
    answer = "1"

    def draw(self, rng):
        return {"id": "0", "question": "q", "answer": self.answer}

    def heldout(self):
        return [self.draw(None)]

    def demonstrate(self, problem, rng):
        return self.answer

    def make_env(self, problem):
        return Counting()


class Looking(Count):
    """A picture in each question."""

    def make_env(self, episode):
        shown = {
            "role": "user",
            "content": [image_part(current_store().add(make_picture(16, 16))), {"type": "text", "text": "?"}],
        }
        return PromptEnv({"prompt": [shown]})

    def demonstrations(self, count, rng):
        return [[Turn([make_picture(16, 16), "?"], "one")] for _ in range(count)]


def test_a_task_of_pictures_is_tried_with_a_model_that_sees_them():
    model, processor = make_tiny_vision("qwen2_vl")
    processor._store = current_store()
    task, recipe = type("Mine", (Looking,), {"max_turns": 1})(), compose(["tools"])
    try_task(recipe, as_episodic(task), processor.tokenizer, model)
    with pytest.raises(ConfigError, match="reads text alone"):
        run_trial(task)
    task = type("Mine", (Looking,), {"demonstrations": lambda self, count, rng: [[Turn(5, "one")]]})()
    with pytest.raises(ConfigError, match=r"Mine\.demonstrations returned"):
        try_task(recipe, as_episodic(task), processor.tokenizer, model)


def run_trial(task, *settings):
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}|{% endfor %}"
    try_task(compose(["tools", *settings]), as_episodic(task), tokenizer, MODEL)


def test_a_right_task_is_tried_and_the_generators_stay_where_they_are():
    seen = []

    class Watched(Count):
        def measure(self, played):
            seen.append({name: [(episode["id"], rollout.total_reward) for episode, rollout in of] for name, of in played.items()})
            return super().measure(played)

        def show(self, episode, rollout):
            seen.append([step.action for step in rollout.steps])
            return super().show(episode, rollout)

    before = random.getstate()[1], np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    run_trial(Watched())
    assert before == (random.getstate()[1], np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    taught, untaught = [("a", 7.0)], [("a", 3.0)]  # letters of "one" and "stop", and of three "?"
    assert seen[:2] == [{"first": taught, "second": taught}, ["one", "stop"]]
    assert seen[2:] == [{"first": untaught, "second": untaught}, ["?", "?", "?"]]
    run_trial(OneTurnTask())


def returning(value):
    return lambda self, *arguments: value


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"draw": returning(("a", 1))}, r"Mine\.draw returned \('a', 1\); .*mapping with id"),
        ({"draw": lambda self: {}}, r"Mine\.draw raised TypeError: .*mapping with id"),
        ({"suites": returning([{"id": "a"}])}, r"Mine\.suites returned .*names to lists"),
        ({"suites": returning({"first": [{"name": "a"}]})}, r"Mine\.suites returned .*episode a mapping with id"),
        (
            {"suites": returning({"first": [{"id": "a"}, {"name": "b"}]})},
            r"Mine\.suites returned .*episode a mapping with id",
        ),
        ({"make_env": returning(Counting())}, r"Mine\.make_env returned one environment for two episodes"),
        ({"demonstrations": returning([[("count", "one")]])}, r"Mine\.demonstrations returned .* lists of Turn\("),
        ({"demonstrations": returning([])}, r"Mine\.demonstrations returned \[\]"),
        ({"make_env": returning(None)}, r"Mine\.make_env returned None; .*SingleAgentEnv"),
        (
            {"measure": lambda self, played: {"mean": played["first"][0].total_reward}},
            r"Mine\.measure raised AttributeError: .*test_trial\.py:\d+.* \(episode, rollout\) by suite",
        ),
        ({"measure": returning(0.5)}, r"Mine\.measure returned 0\.5; .*names to numbers"),
        ({"show": returning("text")}, r"Mine\.show returned 'text'; it must return Shown\(question"),
        ({"max_new_tokens": 4}, r"Mine\.demonstrations .*'stop' of 5 tokens .*sample 4"),
        ({"max_turns": 60}, r"turn 26 has 131 tokens .*'\?', .*128"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_method_and_what_it_returned(members, said):
    task = type("Mine", (Count,), members)()
    with pytest.raises(ConfigError, match=said) as caught:
        run_trial(task)
    assert "\n" not in str(caught.value)


def test_a_task_of_one_turn_is_named_by_its_own_methods():
    task = OneTurnTask()
    task.answer = None
    with pytest.raises(ConfigError, match=r"OneTurnTask\.demonstrate returned .*answer as text"):
        run_trial(task)
    task.heldout = lambda: [{"id": "0"}]
    with pytest.raises(ConfigError, match=r"OneTurnTask\.heldout returned .*id, question, answer"):
        run_trial(task)


def test_a_token_limit_of_the_recipe_is_its_users_choice(caplog):
    run_trial(Count(), "rollout.max_new_tokens=4")
    assert re.search(r"'stop' of 5 tokens .*sample 4 \(rollout\.max_new", caplog.text)


def test_without_a_warm_up_the_task_needs_no_teacher():
    task = type("Mine", (Count,), {"demonstrations": returning([])})()
    run_trial(task, "warmup.steps=0")


def test_without_a_teacher_only_answers_that_mean_nothing_are_tried():
    played = []

    class Watched(Counting):
        def env_step(self, action):
            played.append(action)
            return super().env_step(action)

    members = {"make_env": lambda self, episode: Watched(), "demonstrations": EpisodicTask.demonstrations}
    run_trial(type("Mine", (Count,), members)())
    assert played == ["?"] * 6  # two episodes of three turns


def test_each_environment_is_closed_and_a_pool_may_give_it_again():
    class Pooled(Counting):
        def close(self):
            free.append(self)

    free = [Pooled(), Pooled()]
    task = type("Mine", (Count,), {"make_env": lambda self, episode: free.pop()})()
    for settings in ([], ["warmup.steps=0"]):
        run_trial(task, *settings)
        assert len(set(free)) == 2


def test_an_environment_that_fails_is_a_warning_since_training_drops_such_episodes(caplog):
    class Failing(Counting):
        def env_step(self, action):
            raise ValueError("no such move")

    run_trial(type("Mine", (Count,), {"make_env": lambda self, episode: Failing()})())
    assert re.search("episode of Mine .*'one' failed: ValueError: .*move", caplog.text)


@pytest.mark.parametrize("change", [lambda demos: demos[1:], lambda demos: demos * 2, lambda demos: [*demos[1:], []]])
def test_the_teacher_gives_as_many_episodes_as_it_is_asked_for(change):
    """Fewer would make the batches of the warm-up smaller without a word."""

    class Teacher(Count):
        def demonstrations(self, count, rng):
            return change(super().demonstrations(count, rng))

    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}|{% endfor %}"
    source = DemonstrationSource(Teacher(), tokenizer, batch_size=4, seed=0)
    with pytest.raises(ConfigError, match=r"Teacher\.demonstrations returned \d episodes \(\d empty\), not 4"):
        asyncio.run(source.next_batch())
