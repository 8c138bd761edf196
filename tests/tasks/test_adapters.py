"""Objects that users can pass as a task, and how runs see them."""

from random import Random
from types import MappingProxyType, SimpleNamespace

import pytest

from ludic.envs import DatasetQAEnv
from ludic.parsers import ParseResult
from ludic.tasks import DigitSort, EpisodicTask, Tools, as_episodic
from ludic.tasks.episodic import Shown, WrappedTask, logged_names, task_reducers
from ludic.tasks.rewards import Success, success_of
from ludic.types import Rollout, Step


class OwnEpisodes:
    """Has the required and the optional members of `EpisodicTask` and does not subclass it."""

    max_turns = 2
    max_new_tokens = 8
    system_prompt = "Count."
    cut_off_reward = -0.5
    success_reward = 3.0
    reward_sees = "the count"
    facts = rates = MappingProxyType({"counted": "it counted"})

    def parser(self, text):
        return ParseResult(text.strip(), 0.0, None)

    def draw(self, rng):
        return {"id": str(rng.randrange(5))}

    def demonstrations(self, count, rng):
        return []

    def make_env(self, episode):
        return DatasetQAEnv({"question": episode["id"], "answer": "1"})

    def suites(self):
        return {"all": [{"id": "0"}]}

    def measure(self, played):
        return {"counted": 1.0}

    def show(self, episode, rollout):
        return ("0", "1", "1")


class OwnProblems:
    """Has only the members that `Task` requires."""

    max_new_tokens = 4
    reward_sees = "the number"
    facts = MappingProxyType({})

    def draw(self, rng):
        return {"id": "1", "question": "1+", "answer": "2"}

    def heldout(self):
        return [{"id": "2", "question": "2+", "answer": "3"}]

    def demonstrate(self, problem, rng):
        return problem["answer"]

    def make_env(self, problem):
        return DatasetQAEnv(problem)


def test_a_class_with_the_documented_members_is_an_episodic_task_without_subclassing():
    own = OwnEpisodes()
    task = as_episodic(own)
    assert isinstance(task, EpisodicTask)
    names = ("max_turns", "max_new_tokens", "system_prompt", "cut_off_reward", "success_reward", "reward_sees", "facts", "rates")
    assert [getattr(task, name) for name in names] == [getattr(own, name) for name in names]
    assert task.parser(" 3 ").action == "3"
    assert (task.draw(Random(1)), task.suites(), task.measure({})) == (own.draw(Random(1)), own.suites(), {"counted": 1.0})
    assert task.show({"id": "0"}, SimpleNamespace()) == ("0", "1", "1")


@pytest.mark.parametrize("own", [OwnEpisodes(), OwnProblems()])
def test_optional_members_have_defaults(own):
    task = as_episodic(own)
    assert (task.measures, task.scorer, task.training_scorer, task.problem_list) == ({}, None, None, None)
    assert (task.sees_cut_off_answers, task.reward_is_score) == (False, False)
    assert logged_names(task) == list(own.facts) == list(task_reducers(task))


def test_a_users_problem_counts_as_solved_at_reward_one():
    task = as_episodic(OwnProblems())
    assert (task.system_prompt, task.parser("x").action, task.cut_off_reward) == (None, "x", 0.0)
    assert success_of(task, None) == Success(1.0)


def test_optional_members_are_used_if_present():
    own, scorer = OwnEpisodes(), object()
    own.measures, own.scorer = {"length": "its length"}, scorer
    task = as_episodic(own)
    assert (task.measures, task.scorer, task.training_scorer) == ({"length": "its length"}, scorer, scorer)
    assert task.sees_cut_off_answers


@pytest.mark.parametrize("own", [OwnEpisodes(), OwnProblems()])
def test_members_that_are_set_or_changed_later_count_from_then_on(own):
    task, scorer = as_episodic(own), object()
    own.measures, own.scorer, own.problem_list = {"length": "its length"}, scorer, [1]
    own.system_prompt, own.success_reward, own.cut_off_reward = "Think.", 7.0, -2.0
    own.measure = lambda played: {"of": len(played)}
    assert (task.measures, task.scorer, task.training_scorer) == ({"length": "its length"}, scorer, scorer)
    assert (task.problem_list, task.system_prompt, task.success_reward) == ([1], "Think.", 7.0)
    assert (task.cut_off_reward, task.measure({})) == (-2.0, {"of": 0})
    assert task.sees_cut_off_answers
    own.scorer = None
    assert (task.scorer, task.sees_cut_off_answers) == (None, False)


THREE = ("max_turns", "draw", "make_env")


@pytest.mark.parametrize("bases", [(), (EpisodicTask,)])
def test_three_members_make_a_task_of_episodes(bases):
    assert set(THREE) == EpisodicTask.__abstractmethods__
    own = type("Three", bases, {name: getattr(OwnEpisodes, name) for name in THREE})()
    task = as_episodic(own)
    assert (task is own) == bool(bases)
    assert (task.max_turns, task.draw(Random(1)), task.max_new_tokens) == (2, own.draw(Random(1)), 256)
    assert (task.system_prompt, task.cut_off_reward, task.success_reward, task.facts, task.rates) == (None, 0.0, None, {}, {})
    assert task.parser(" 3 ").action == " 3 "
    assert (task.demonstrations(4, Random(1)), task.reward_sees) == (None, "what the environment rewards")
    [(name, heldout)] = task.suites().items()
    assert (name, len(heldout), {episode["id"] for episode in heldout}) == ("held out", 500, set("01234"))
    assert task.suites() == as_episodic(own).suites()


def dialogue(*steps, **episode):
    """(episode, rollout) with a step for each (observation, action, info)."""
    following = [observation for observation, _, _ in steps[1:]] + ["end"]
    played = [
        Step(i, observation, action, following[i], 0.5, False, i == len(steps) - 1, info)
        for i, (observation, action, info) in enumerate(steps)
    ]
    return {"id": "1", **episode}, Rollout(steps=played)


def test_by_default_facts_are_shares_of_episodes_and_measures_means_of_steps():
    class Counted(EpisodicTask):
        max_turns, draw, make_env = 2, OwnEpisodes.draw, OwnEpisodes.make_env
        facts, measures = MappingProxyType({"right": "it is right"}), MappingProxyType({"length": "its length"})

    first = dialogue(("a", "x", {"right": True, "length": 1}), ("b", "y", {"length": 3}))
    second, third = dialogue(("a", "x", {"length": 8})), dialogue(("a", "x", {}))
    task = Counted()
    assert task.measure({"one": [first, second], "two": [third]}) == {"right": 1 / 3, "length": 4.0}
    assert task.measure({"one": []}) == {"right": 0.0, "length": 0.0}


def test_by_default_the_dialogue_is_shown():
    task = as_episodic(type("Three", (), {name: getattr(OwnEpisodes, name) for name in THREE})())
    steps = ("up?", "u p\n", {}), ("again?", "down", {})
    assert task.show(*dialogue(*steps)) == Shown("up?", "u p again? down", "")
    assert task.show(*dialogue(*steps, question="where", answer=7)) == Shown("where", "u p again? down", "7")


def test_a_task_of_one_turn_needs_neither_teacher_nor_words():
    own = type("Bare", (), {name: getattr(OwnProblems, name) for name in ("draw", "heldout", "make_env")})()
    task = as_episodic(own)
    assert (task.max_turns, task.suites(), task.demonstrations(2, Random(1))) == (1, {"held out": own.heldout()}, None)
    assert (task.facts, task.reward_sees) == ({}, "what the environment rewards")
    own.max_turns = 3  # no member of a task of one turn
    assert as_episodic(own).max_turns == 1


def test_a_task_of_one_turn_may_measure_all_its_answers_together():
    class Counting(OwnProblems):
        facts, rates = MappingProxyType({"right": "it is right"}), MappingProxyType({"right": "", "different": ""})

        def measure_answers(self, played):
            return {"different": len({rollout.steps[0].action for _, rollout in played})}

    played = [dialogue(("1+", action, {"right": action == "2"})) for action in ("2", "3", "2", "2")]
    assert as_episodic(Counting()).measure({"held out": played}) == {"right": 0.75, "different": 2}


def test_a_scorer_of_its_own_for_training_is_read():
    own, scorer = OwnEpisodes(), object()
    own.training_scorer, own.reward_is_score, own.sees_cut_off_answers = scorer, True, True
    task = as_episodic(own)
    assert (task.scorer, task.training_scorer, task.reward_is_score, task.sees_cut_off_answers) == (None, scorer, True, True)


def judged_like():
    """A task whose optional members all differ from their defaults."""
    own = OwnEpisodes()
    own.training_scorer, own.reward_is_score, own.sees_cut_off_answers = object(), True, True
    own.measures, own.problem_list = {"length": "its length"}, [1]
    return as_episodic(own)


@pytest.mark.parametrize("task", [Tools(), as_episodic(DigitSort()), as_episodic(OwnEpisodes()), judged_like()])
def test_a_wrapped_task_forwards_every_member(task):
    wrapped = WrappedTask(task)
    methods = {"draw", "demonstrations", "make_env", "suites", "measure", "show"}
    for name in {name for name in dir(EpisodicTask) if not name.startswith("_")} - methods:
        assert getattr(wrapped, name) == getattr(task, name), name
    assert wrapped.draw(Random(2)) == task.draw(Random(2))
