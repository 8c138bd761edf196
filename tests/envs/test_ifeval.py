"""IFEval: rewards by the verdicts of the checker, what is refused, and the checks of
lm-evaluation-harness where it is installed."""

import sys
from importlib.util import find_spec

import pytest

from ludic.envs.ifeval import WORKER, IFEvalReward, InstructionChecker
from ludic.errors import DataError, GradingError, MissingExtraError

NO_COMMA, WORDS = "punctuation:no_comma", "length_constraints:number_words"
ROW = {
    "key": 7,
    "prompt": "Greet me in three words or more, without commas.",
    "instruction_id_list": [NO_COMMA, WORDS],
    "kwargs": [{"num_words": None, "relation": None}, {"num_words": 3, "relation": "at least"}],
}
HARNESS = """
def process_results(doc, results):
    [answer] = results
    print("noise")
    if answer == "boom":
        raise LookupError("no punkt_tab")
    followed = ["," not in answer, len(answer.split()) >= doc["kwargs"][1]["num_words"]]
    return {"inst_level_strict_acc": followed, "inst_level_loose_acc": [True, True]}
"""
"""In place of `lm_eval.tasks.ifeval.utils`."""


@pytest.fixture
def checker(tmp_path):
    """The worker, with a harness that knows two instructions."""
    for package in ("lm_eval", "lm_eval/tasks", "lm_eval/tasks/ifeval"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "lm_eval/tasks/ifeval/utils.py").write_text(HARNESS)
    (tmp_path / "langdetect.py").write_text("class DetectorFactory:\n    seed = None\n")
    code = f"import sys, runpy; sys.path.insert(0, {str(tmp_path)!r}); runpy.run_path({str(WORKER)!r}, run_name='__main__')"
    checker = InstructionChecker(command=[sys.executable, "-c", code], workers=1, timeout_s=60)
    yield checker
    checker.close()


def reward(function, *answers):
    columns = {name: [ROW[name]] * len(answers) for name in ("instruction_id_list", "kwargs")}
    return function(prompts=[ROW["prompt"]] * len(answers), completions=list(answers), **columns)


async def test_an_answer_is_right_if_it_follows_every_instruction(checker):
    answers = ["Good morning to you", "Hello", "Hello, you", "<think>Well, so,</think>Good morning to you"]
    assert await reward(IFEvalReward(checker=checker), *answers) == [1.0, 0.0, 0.0, 1.0]
    shares = IFEvalReward(by_instruction=True, checker=checker)
    assert await reward(shares, *answers) == [1.0, 0.5, 0.0, 1.0]
    chat = [{"role": "assistant", "content": "Hello"}]
    assert await reward(shares, chat) == [0.5]


async def test_a_check_that_fails_is_an_error_and_not_a_wrong_answer(checker):
    [error, right] = await reward(IFEvalReward(checker=checker), "boom", "Good morning to you")
    assert isinstance(error, GradingError)
    assert "LookupError: no punkt_tab: checking an answer by punctuation:no_comma" in str(error)
    assert right == 1.0


def test_a_row_without_arguments_for_each_instruction_is_refused(checker):
    function = IFEvalReward(checker=checker)
    function.check_row(ROW)
    for fault in ({"kwargs": [{}]}, {"kwargs": None}, {"instruction_id_list": []}):
        with pytest.raises(DataError, match="IFEval needs instructions and arguments"):
            function.check_row({**ROW, **fault})


def test_without_the_library_the_error_names_the_extra(monkeypatch):
    monkeypatch.setattr("ludic.envs.ifeval.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"lm-eval\[ifeval\] is not installed; .*ludic-rl\[ifeval\]"):
        InstructionChecker()


@pytest.mark.skipif(find_spec("lm_eval") is None or find_spec("langdetect") is None, reason="needs lm-eval[ifeval]")
async def test_the_checks_of_the_harness_agree_with_verdicts_by_hand():
    checker = InstructionChecker(workers=1)
    assert await checker.check_answer("Good morning to you", ROW) == [True, True]
    assert await checker.check_answer("Hello, you", ROW) == [False, False]
    assert await checker.check_answer("", ROW) == [False, False]
    checker.close()
