"""Held-out evaluation of `ludic train` with failing episodes: they are counted, and answers stay
with their questions."""

from playing import ScriptedClient, play

from ludic.recipes.compose import compose
from ludic.runs.held_out import Evaluation, HeldOut
from ludic.runs.rollouts import make_engine
from ludic.tasks import DigitSort


class Breaks(DigitSort):
    """The first problem cannot be scored."""

    def make_env(self, problem):
        if problem["id"] == self.heldout()[0]["id"]:
            raise OSError("the grader is gone")
        return super().make_env(problem)


def test_a_failing_problem_is_not_a_wrong_answer_and_does_not_shift_the_others():
    task = Breaks()
    first, second, third = task.heldout()[:3]
    client = ScriptedClient(second["answer"])
    recipe = compose(["sort", "evaluation.prompts=3", "evaluation.samples_per_prompt=2"])
    engine = make_engine(task, client, model_name="m", system_prompt=None, max_retries=0)
    held_out = HeldOut(engine, task, recipe.evaluation, recipe.rollout)
    found = play(held_out.measure())
    assert found.sampled_reward == found.greedy_accuracy == 0.5
    assert found.failed == 3
    assert [(answer.question, answer.expected, answer.reward) for answer in found.answers] == [
        (first["question"], first["answer"], None),
        (second["question"], second["answer"], 1.0),
        (third["question"], third["answer"], 0.0),
    ]
    assert Evaluation.from_dict(found.to_dict()) == found
    assert play(held_out.eval())[1]["num_failed_episodes"] == 3.0
