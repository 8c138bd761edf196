"""The task of small programs: what is asked, what the teacher shows, how programs are judged."""

import asyncio
import json
from collections import Counter
from random import Random

import pytest
from fake_sandboxes import VALID, FakePool, Scripted

from ludic.envs.code_exec.types import ExecutionResult, RunStatus
from ludic.errors import ConfigError
from ludic.recipes.compose import compose
from ludic.tasks import Code, as_episodic
from ludic.tasks.code import Wanted

TASK = Code(pool=FakePool(1))


class Judge(Scripted):
    """Knows right programs, and those that are right but for a list without such numbers."""

    async def execute(self, code, *, stdin="", **limits):
        wanted = next(
            one for one in WANTED if repr(one.program())[1:-1] in code or repr(one.program(of_none=False))[1:-1] in code
        )
        answers = []
        for call in json.loads(stdin):
            value = wanted.of(json.loads(call[2:-1]))
            raises = "or[0]" not in code and value == 0
            answers.append({"raised": "ValueError"} if raises else {"value": value})
        return ExecutionResult(
            VALID, RunStatus.SUCCESS, stdout="".join(f"{json.dumps(one)}\n" for one in answers), run_duration_ms=4.0
        )


class JudgePool(FakePool):
    async def _start_sandbox(self):
        return Judge()


WANTED = [Wanted(*problem["id"].split("/")) for problem in [*TASK._split[0], *TASK.heldout()]]


@pytest.mark.parametrize(
    ("wanted", "words", "program", "value"),
    [
        (Wanted("max", "square", "over 3"), "max square over 3", "f=lambda a:max([x*x for x in a if x>3]or[0])", 25),
        (Wanted("last", "", "odd"), "last odd", "f=lambda a:([x for x in a if x%2]or[0])[-1]", 5),
        (Wanted("first", "negate", "not 1"), "first negate not 1", "f=lambda a:([-x for x in a if x!=1]or[0])[0]", -4),
        (Wanted("min", "double", "under 2"), "min double under 2", "f=lambda a:min([x+x for x in a if x<2]or[0])", 2),
        (Wanted("max", "", "even"), "max even", "f=lambda a:max([x for x in a if x%2<1]or[0])", 4),
    ],
)
def test_what_is_asked_for(wanted, words, program, value):
    assert (wanted.words, wanted.program(), wanted.of([1, 4, 5]), wanted.of([])) == (words, program, value, 0)


def test_no_problem_is_both_trained_on_and_held_out():
    training, heldout = ({problem["id"] for problem in part} for part in (TASK._split[0], TASK.heldout()))
    assert (len(training), len(heldout), training & heldout) == (220, 100, set())
    assert Code(pool=FakePool(1)).heldout() == TASK.heldout()


def test_the_tests_tell_right_programs_from_the_teachers_mistakes():
    """Without thinking of no numbers, the shown test passes and a hidden one asks for 0."""
    for problem in [*TASK._split[0], *TASK.heldout()]:
        wanted = Wanted(*problem["id"].split("/"))
        (shown, expected), *hidden = problem["tests"]
        assert len(hidden) == 5
        assert all(wanted.of(numbers) == value for numbers, value in problem["tests"])
        assert problem["question"] == f"{wanted.words} [{','.join(map(str, shown))}]={expected}>"
        selected = [[x for x in numbers if Wanted("max", "", wanted.selection).of([x]) == x and x] for numbers, _ in hidden]
        assert not any(selected[-1])


def test_the_teacher_is_right_as_often_as_it_should_be():
    rng, problem = Random(0), TASK.heldout()[0]
    wanted = Wanted(*problem["id"].split("/"))
    shown = Counter(TASK.demonstrate(problem, rng) for _ in range(4000))
    assert abs(shown[wanted.program()] / 4000 - 0.25) < 0.03
    assert abs(shown[wanted.program(of_none=False)] / 4000 - 0.5) < 0.03
    assert all(len(program) + 1 < TASK.max_new_tokens for program in shown)


def play(program, task, problem):
    async def main():
        env = task.make_env(problem)
        observation, _ = await env.env_reset()
        assert observation == problem["question"]
        return await env.env_step(program)

    return asyncio.run(main())


def test_a_program_is_rewarded_if_the_hidden_tests_pass_too():
    task = Code(pool=JudgePool(1))
    problem = next(one for one in task.heldout() if one["tests"][0][1] != 0)
    wanted = Wanted(*problem["id"].split("/"))
    for program, reward, shown, ms in ((wanted.program(), 1.0, True, 4.0), (wanted.program(of_none=False), 0.0, True, None)):
        outcome = play(program, task, problem)
        assert (outcome.reward, outcome.info["shown_passed"], outcome.terminated) == (reward, shown, True)
        assert ms is None or outcome.info["program_ms"] == pytest.approx(ms)
        assert play(program, task, problem).info["program_ms"] == 0.0  # it is known
    assert play("", task, problem).reward == 0.0
    assert as_episodic(task).execution_s == task.execution_s > 0


@pytest.mark.parametrize("arguments", [{"right": 2}, {"right": 0.7}, {"num_heldout": 0}, {"num_heldout": 161}])
def test_wrong_arguments(arguments):
    with pytest.raises(ConfigError):
        Code(pool=FakePool(1), **arguments)


def test_the_recipe_is_of_this_task():
    recipe = compose(["code"])
    assert recipe.task.kind == "code"
    assert Code(pool=FakePool(1), **recipe.task.args) == Code(pool=FakePool(1))
