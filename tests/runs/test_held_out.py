"""Held-out evaluation of `ludic train`: failing episodes are counted, answers stay with their
questions, and `ludic eval` of the run repeats its numbers."""

import json
from dataclasses import asdict
from random import Random

import pytest
from playing import ScriptedClient, play
from tiny_recipe import TINY
from typer.testing import CliRunner

from ludic.cli.app import app
from ludic.envs import SingleAgentEnv
from ludic.recipes.compose import compose
from ludic.runs.held_out import Evaluation, HeldOut
from ludic.runs.rollouts import make_engine
from ludic.tasks import DigitSort, EpisodicTask
from ludic.types import StepOutcome


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
    assert Evaluation.from_dict(asdict(found)) == found
    assert play(held_out.eval())[1]["num_failed_episodes"] == 3.0


class Varied(SingleAgentEnv):
    """Shows random digits. The reward of an action depends on all of its characters."""

    def env_reset(self, *, seed=None):
        self.rng = Random(seed)
        return self.env_current_obs(), {}

    def env_current_obs(self):
        return str(self.rng.randrange(10**6))

    def env_step(self, action):
        reward = sum(map(ord, action)) % 97 / 97
        return StepOutcome(obs=self.env_current_obs(), reward=reward, terminated=False, truncated=False)


class Varying(EpisodicTask):
    max_turns, max_new_tokens, sees_cut_off_answers = 2, 4, True

    def draw(self, rng):
        return {"id": str(rng.randrange(3))}

    def make_env(self, episode):
        return Varied()


@pytest.mark.parametrize("seed", [0, 3])
def test_ludic_eval_of_a_run_repeats_its_held_out_numbers(seed, tmp_path):
    def ludic(*arguments):
        result = CliRunner().invoke(app, [*map(str, arguments), f"output={tmp_path}"])
        assert result.exit_code == 0, result.output
        return result.stdout

    ludic("train", "tools", *TINY, f"task.kind={__name__}:Varying", f"seed={seed}", "name=run")
    run = tmp_path / "run"
    after = json.loads((run / "progress.json").read_text())["after"]
    assert 0.1 < after["sampled_reward"] != after["greedy_reward"]

    def repeat(name, *settings):
        measured = json.loads(ludic("eval", run, f"name={name}", "--json", *settings))
        problems = [json.loads(line) for line in (tmp_path / name / "problems.jsonl").read_text().splitlines()]
        means = [sum(problem["rewards"]) / len(problem["rewards"]) for problem in problems]
        return measured["reward"]["value"], means, [problem["texts"][0] for problem in problems]

    mean, means, texts = repeat("sampled")
    assert (mean, means) == (pytest.approx(after["sampled_reward"]), pytest.approx(after["by_problem"]["sampled_reward"]))
    assert texts == [answer["text"] for answer in after["answers"]]
    mean, means, _ = repeat("greedy", "temperature=0")
    assert (mean, means) == (pytest.approx(after["greedy_reward"]), pytest.approx(after["by_problem"]["greedy_reward"]))
    assert repeat("other", f"seed={seed + 1}")[2] != texts
