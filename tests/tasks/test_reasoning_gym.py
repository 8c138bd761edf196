"""Problems of reasoning-gym, made and judged in processes of their own."""

import asyncio
import json
import subprocess
import sys
from collections import Counter
from random import Random

import pytest

from ludic.errors import ConfigError, GradingError, RolloutError
from ludic.recipes.compose import compose
from ludic.tasks.episodic import as_episodic
from ludic.tasks.reasoning_gym import WORKER, ReasoningGym

pytest.importorskip("reasoning_gym", reason="`pip install 'ludic-rl[reasoning-gym]'` installs it")

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def make(*args, **settings):
    return ReasoningGym(*args, **{"num_heldout": 8, **settings})


def score(task, problem, answer):
    return asyncio.run(task.score(problem, answer))


def test_a_problem_is_the_same_in_every_process_and_draw():
    """`ransom_note` draws from sets, whose order depends on PYTHONHASHSEED."""
    first, again = make("ransom_note"), make("ransom_note")
    assert first.heldout() == again.heldout()
    assert [first.draw(Random(1)) for _ in range(3)] == [again.draw(Random(1)) for _ in range(3)]
    assert make("ransom_note", seed=1).heldout() != first.heldout()


def test_held_out_questions_are_not_drawn():
    task = make("chain_sum", SUMS, num_heldout=40)  # about 200 different questions
    held = {problem["question"] for problem in task.heldout()}
    rng = Random(0)
    assert not held & {task.draw(rng)["question"] for _ in range(300)}


def test_each_question_is_held_out_once():
    task = make("chain_sum", SUMS, num_heldout=100)
    questions = [problem["question"] for problem in task.heldout()]
    assert len(questions) == len({*questions}) < 100  # about 200 different ones exist


def test_a_number_with_commas_is_right():
    task = make("lcm", answer_in="number")
    problem = next(problem for problem in task.heldout() if len(problem["answer"]) > 3)
    assert score(task, problem, task.find_answer(f"It is {int(problem['answer']):,}, as shown.")) == 1.0


def test_a_generator_that_draws_from_the_global_state_makes_the_same_problems_in_any_order():
    first, again = make("list_functions"), make("list_functions")
    assert [first._pool.make(0, n) for n in range(60)] == [again._pool.make(0, n) for n in reversed(range(60))][::-1]
    assert make("list_functions", seed=1).heldout() != first.heldout()


def test_a_problem_that_takes_too_long_to_make_is_not_drawn(monkeypatch):
    """A resumed run would draw it again. What is drawn after it does not change."""
    task, rng = make("chain_sum", SUMS), Random(0)
    drawn, make_problem = [task.draw(rng) for _ in range(3)], task._pool.make
    slow = {drawn[0]["index"]}

    def make_slowly(dataset, index):
        if slow is None or index in slow:
            raise GradingError("it took longer than 5 s: making it")
        return make_problem(dataset, index)

    monkeypatch.setattr(task._pool, "make", make_slowly)
    rng = Random(0)
    again = [task.draw(rng) for _ in range(3)]
    assert again[0] != drawn[0]
    assert again[1:] == drawn[1:]
    slow = None
    with pytest.raises(GradingError, match="took longer"):
        task.draw(Random(0))
    del task.__dict__["_held"]
    with pytest.raises(ConfigError, match=r"took longer.*task.args.timeout_s"):
        task.heldout()


def test_problems_without_an_answer_cannot_be_demonstrated():
    task = make("propositional_logic")
    with pytest.raises(ConfigError, match=r"no reference answer.*warmup.steps=0"):
        task.demonstrate(task.heldout()[0], Random(0))


def test_settings_with_few_questions_are_an_error_where_all_are_held_out():
    task = make("coin_flip", {"min_trials": 3, "max_trials": 3}, num_heldout=300)
    with pytest.raises(ConfigError, match=r"1000 problems of coin_flip .*num_heldout"):
        task.draw(Random(0))


def test_the_verifier_of_the_problem_scores():
    task = make("chain_sum", SUMS, answer_in="text")
    problem = task.heldout()[0]
    assert score(task, problem, problem["answer"]) == 1.0
    assert score(task, problem, f"{problem['answer']}.00") == 1.0  # a number, by its value
    assert score(task, problem, "a hundred") == 0.0
    # A part for a text in which the answer stands: its share of the characters.
    wordy = f"x{problem['answer']}x"
    assert score(task, problem, wordy) == pytest.approx(len(problem["answer"]) / len(wordy))
    strict = make("chain_sum", SUMS, answer_in="text", partial_credit=False)
    assert score(strict, strict.heldout()[0], wordy) == 0.0


@pytest.mark.parametrize(
    ("answer_in", "text", "answer"),
    [
        ("tags", "so <answer>1</answer> or <answer> 42\n</answer>.", "42"),
        ("tags", "42", None),
        ("text", " 42 \n", "42"),
        ("text", " ", None),
        ("number", "6 * 7 = -1,042.5, I think", "-1042.5"),
        ("number", "none", None),
    ],
)
def test_where_the_answer_is(answer_in, text, answer):
    assert make("chain_sum", SUMS, answer_in=answer_in).find_answer(text) == answer


def test_an_episode_is_one_answer():
    task = make("chain_sum", SUMS)
    problem = task.heldout()[0]
    env = task.make_env(problem)
    assert env.env_reset()[0] == problem["question"]
    assert "<answer>" in env.suggested_sysprompt
    outcome = asyncio.run(env.env_step(task.demonstrate(problem, Random(0))))
    assert (outcome.reward, outcome.terminated) == (1.0, True)
    assert outcome.info["answered"]
    with pytest.raises(RolloutError, match="already answered"):
        asyncio.run(env.env_step("1"))
    env.env_reset()
    outcome = asyncio.run(env.env_step("no tags"))
    assert (outcome.reward, outcome.info["answered"]) == (0.0, False)


def test_kinds_are_mixed_by_weight_and_measured_apart():
    task = make(datasets=[{"name": "chain_sum", "weight": 3, "config": SUMS}, {"name": "gcd"}], answer_in="number")
    assert [problem["id"].split("-")[0] for problem in task.heldout()] == ["chain_sum"] * 6 + ["gcd"] * 2
    rng = Random(0)
    drawn = Counter(task.draw(rng)["id"].split("-")[0] for _ in range(200))
    assert drawn["chain_sum"] == pytest.approx(150, abs=25)
    problem = task.heldout()[-1]
    outcome = asyncio.run(task.make_env(problem).env_step(problem["answer"]))
    assert outcome.info["rewards/gcd"] == 1.0
    assert set(as_episodic(task).rates) == {"answered", "rewards/chain_sum", "rewards/gcd"}


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('touch {out}')",
        "open('{out}', 'w')",
        "[].__class__.__base__.__subclasses__()",
        "(lambda: 1)()",
        "[x for x in (1, 2)]",
        'exec(\'open("{out}", "w")\')',
        'sympify(\'open("{out}", "w")\')',
        "preview(x)",
    ],
)
@pytest.mark.parametrize("kind", ["simple_integration", "binary_matrix", "string_insertion", "polynomial_multiplication"])
def test_an_answer_is_no_program(tmp_path, kind, text):
    """These verifiers call `eval` on the answer."""
    task, out = make(kind), tmp_path / "out"
    assert score(task, task.heldout()[0], text.format(out=out)) == 0.0
    assert not out.exists()


def test_sympys_own_answers_are_still_evaluated():
    for kind in ("simple_integration", "intermediate_integration", "polynomial_multiplication", "countdown"):
        task = make(kind, timeout_s=60)
        for problem in task.heldout()[:4]:
            assert score(task, problem, problem["answer"]) == 1.0, problem


def test_a_verifier_that_raises_finds_an_answer_wrong():
    task = make("prime_factorization")
    assert score(task, task.heldout()[0], "hello") == 0.0


def test_an_answer_that_takes_too_long_has_no_score_and_the_next_one_has():
    task = make("countdown", timeout_s=1)
    problem = task.heldout()[0]
    with pytest.raises(GradingError, match="longer than 1 s: judging '9\\*\\*9"):
        score(task, problem, "9**9**9**9")
    assert score(task, problem, "0") < 1.0


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({}, "needs `name`"),
        ({"name": "chain_sum", "datasets": [{"name": "gcd"}]}, "needs `name`"),
        ({"name": "chain_summ"}, "did you mean chain_sum"),
        ({"name": "chain_sum", "config": {"max_term": 2}}, "max_term"),
        ({"name": "chain_sum", "config": {"min_terms": 0}}, "min_terms must be positive"),
        ({"name": "chain_sum", "config": {"seed": 1}}, "without seed and size"),
        ({"datasets": []}, "one or more, each once"),
        ({"datasets": [{"name": "gcd"}, {"name": "gcd"}]}, "one or more, each once"),
        ({"datasets": [{"name": "gcd", "weight": 0}]}, r"weight of gcd \(0\)"),
        ({"datasets": [{"name": "gcd", "share": 1}]}, "a kind of problems"),
        ({"name": "gcd", "answer_in": "box"}, r"answer_in \('box'\)"),
        ({"name": "gcd", "num_heldout": 0}, "num_heldout"),
        ({"name": "gcd", "num_problems": 8}, r"num_problems \(8\)"),
    ],
)
def test_wrong_settings_are_named(settings, error):
    with pytest.raises(ConfigError, match=error):
        make(**settings)


def test_its_recipe_is_for_a_pretrained_model():
    recipe = compose(["task.kind=reasoning_gym", "task.args.name=chain_sum", "model=m"])
    assert (recipe.recipe, recipe.warmup.steps, recipe.trainer.lr) == ("data", 0, 5e-6)


def test_the_worker_ends_when_its_parent_is_gone():
    settings = json.dumps({"datasets": [{"name": "gcd", "config": {}}], "seed": 0, "size": 10})
    command = [sys.executable, "-P", str(WORKER), "4096", settings]
    done = subprocess.run(command, input="", capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == {"ready": True}
