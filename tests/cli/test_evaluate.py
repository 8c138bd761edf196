"""`ludic eval` on a run, a model directory and a server: what it writes, counts and refuses."""

import json
import re
from types import SimpleNamespace

import pytest
from rich.console import Console
from stub_openai_server import HANG, StubOpenAIServer, completion
from typer.testing import CliRunner

from ludic.cli.app import app
from ludic.cli.evaluate import EvalSettings, _choose_problems, resolve
from ludic.errors import ConfigError
from ludic.eval.picture import draw_measurements
from ludic.eval.tally import measure
from ludic.recipes.compose import compose
from ludic.tasks import DigitSort
from ludic.types import Rollout, Step

PROBLEMS = [problem["question"] for problem in DigitSort().heldout()]
TINY = [f"network.{name}" for name in ("hidden_size=16", "num_heads=2", "num_kv_heads=1", "intermediate_size=16")]


def evaluate(*arguments, code=0):
    result = CliRunner().invoke(app, ["eval", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def right(question):
    return "".join(sorted(question.rstrip(">")))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of zero steps: a recipe and an untrained model."""
    folder = tmp_path_factory.mktemp("runs")
    given = [*TINY, "threads=1", "warmup.steps=0", "steps=0", "evaluation.prompts=2", "evaluation.samples_per_prompt=1"]
    result = CliRunner().invoke(app, ["train", *given, f"output={folder}", "name=base"])
    assert result.exit_code == 0, result.output
    return folder / "base"


def test_the_model_of_a_run_is_evaluated_on_the_task_of_the_run(run):
    shown = evaluate(run, "k=2", "problems=3").output
    (folder,) = run.parent.glob("eval-*")
    assert folder.name == "eval-sort-base-seed0"
    for said in ("Held-out problems: 3 problems x 2", "accuracy (avg@2)", "pass@2", "95% interval", "the reward sees"):
        assert said in shown, said
    assert (folder / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["num_problems"], summary["samples_per_problem"], summary["num_failed_episodes"]) == (3, 2, 0)
    assert summary["accuracy"]["low"] == 0.0 <= summary["accuracy"]["value"] < summary["accuracy"]["high"]
    rollouts = lines(folder / "rollouts.jsonl")
    assert [(r["meta"]["problem_id"], r["meta"]["sample_index"]) for r in rollouts] == [
        (question.rstrip(">"), j) for question in PROBLEMS[:3] for j in (0, 1)
    ]
    assert rollouts[0]["steps"][0]["trace"]["completion_token_ids"]
    problems = lines(folder / "problems.jsonl")
    assert [(line["question"], line["reference"], line["answers"]) for line in problems] == [
        (question, right(question), 2) for question in PROBLEMS[:3]
    ]
    assert [text for line in problems for text in line["texts"]] == [r["steps"][0]["action"] for r in rollouts]
    assert resolve([str(folder / "config.yaml")])[0].evaluation.prompts == 3


def test_answers_of_a_model_directory_depend_only_on_the_seed(run, tmp_path):
    def answers(seed):
        shared = ["sort", f"model={run / 'model'}", "threads=1", "k=4", "problems=2", f"output={tmp_path}"]
        summary = json.loads(evaluate(*shared, f"seed={seed}", "--json").stdout)
        assert summary["seed"] == seed
        newest = max(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        return [rollout["steps"][0]["action"] for rollout in lines(newest / "rollouts.jsonl")]

    assert answers(0) == answers(0) != answers(1)


def test_greedy_evaluation_has_one_answer_per_problem(run, tmp_path):
    given = ["sort", f"model={run / 'model'}", "threads=1", "problems=3", f"output={tmp_path}"]
    summary = json.loads(evaluate(*given, "temperature=0", "--json").stdout)
    assert (summary["temperature"], summary["samples_per_problem"], list(summary["pass_at_k"])) == (0.0, 1, ["1"])
    assert "k (4) needs a temperature above 0" in evaluate(*given, "temperature=0", "k=4", code=2).output


class Pupil:
    """Answers as `says` decides from the number of the problem and how often it was asked
    before."""

    def __init__(self, says):
        self.says, self.asked = says, {}

    def __call__(self, body):
        question = body["messages"][-1]["content"]
        self.asked[question] = self.asked.get(question, 0) + 1
        return self.says(PROBLEMS.index(question), self.asked[question] - 1, question)


def on_server(pupil, tmp_path, *given, code=0):
    with StubOpenAIServer(pupil) as server:
        shared = ["sort", f"base_url={server.base_url}", f"output={tmp_path}", "name=it", "concurrency=8"]
        return evaluate(*shared, *given, code=code), server


def test_metrics_of_a_server_follow_from_its_answers(tmp_path):
    """i of the 4 answers to problem i of 4 are right: accuracy (0 + 1 + 2 + 3) / 16; pass@2 (0 +
    1/2 + 5/6 + 1) / 4; pass@4 3/4."""
    pupil = Pupil(lambda i, j, question: completion(right(question) if j < i else "no"))
    given = ["k=4", "problems=4", "temperature=0.7", "top_p=0.9", "max_tokens=9", "system_prompt='Sort.'", "--json"]
    result, server = on_server(pupil, tmp_path, *given)
    summary = json.loads(result.stdout)
    assert summary["accuracy"]["value"] == pytest.approx(6 / 16)
    assert summary["pass_at_k"]["2"]["value"] == pytest.approx((0.5 + 5 / 6 + 1) / 4)
    assert summary["pass_at_k"]["4"]["value"] == 0.75
    assert summary["also"]["answer_tokens"]["value"] == pytest.approx((6 * 6 + 10 * 2) / 16)  # token counts of the server
    assert (summary["model"], summary["base_url"]) == ("stub", server.base_url)
    body = server.bodies[0]
    assert (body["model"], body["temperature"], body["top_p"], body["max_tokens"]) == ("stub", 0.7, 0.9, 9)
    assert body["messages"][0] == {"role": "system", "content": "Sort."}
    assert len({body["seed"] for body in server.bodies}) == 16


def test_failures_are_counted_and_are_not_wrong_answers(tmp_path):
    """Two of 6 problems are refused. All answers to the other 4 are right, and nothing is known
    about the two."""
    refused = (400, {"error": {"message": "the prompt is too long"}})
    pupil = Pupil(lambda i, j, question: refused if i in (1, 4) else completion(right(question)))
    result, _ = on_server(pupil, tmp_path, "k=1", "problems=6")
    assert re.search("2 of 6 episodes failed .*excluded", result.output)
    assert re.search(r"accuracy would be 0\.667, .*1\.000", re.sub(r"\s+", " ", result.output))
    assert "too long" in result.output
    summary = json.loads((tmp_path / "it" / "summary.json").read_text())
    assert (summary["accuracy"]["value"], summary["accuracy"]["num_problems"]) == (1.0, 4)
    assert (summary["num_episodes"], summary["num_failed_episodes"], summary["num_unanswered_problems"]) == (6, 2, 2)
    assert summary["accuracy_bounds"] == pytest.approx([4 / 6, 1.0])
    assert sum(summary["errors"].values()) == 2
    assert len(lines(tmp_path / "it" / "rollouts.jsonl")) == 4


def test_with_three_in_ten_faulty_requests_failures_are_counted_exactly(tmp_path):
    """Permanently refused, cut off at a deadline, or garbage; the rest is measured."""
    troubles = [(400, {}), HANG, "<html>", {"choices": []}, completion("12", "abort"), completion({"not": "text"})]
    faulty = {i: troubles[i % len(troubles)] for i in range(40) if i % 10 in (1, 4, 8)}
    pupil = Pupil(lambda i, j, question: faulty.get(i) or completion(right(question)))
    given = ["k=1", "problems=40", "timeout_s=3", "episode_retries=0", "concurrency=40", "--json"]
    result, _ = on_server(pupil, tmp_path, *given)
    summary = json.loads(result.stdout)
    assert (summary["num_failed_episodes"], summary["num_episodes"]) == (len(faulty), 40) == (12, 40)
    assert summary["accuracy"]["value"] == 1.0
    failed = [line["problem_id"] for line in lines(tmp_path / "it" / "problems.jsonl") if line["failed"]]
    assert sorted(failed) == sorted(PROBLEMS[i].rstrip(">") for i in faulty)


def test_a_request_that_succeeds_on_retry_is_not_a_failure(tmp_path):
    pupil = Pupil(lambda i, j, question: (503, {}) if j == 0 else completion(right(question)))
    result, _ = on_server(pupil, tmp_path, "k=1", "problems=2", "--json")
    assert json.loads(result.stdout)["num_failed_episodes"] == 0


def test_if_everything_fails_the_command_fails(tmp_path):
    result, _ = on_server(lambda body: (401, {"error": {"message": "who are you"}}), tmp_path, "problems=2", code=1)
    assert "8 of 8 episodes failed" in result.output
    assert "who are you" in result.output
    assert not (tmp_path / "it" / "summary.json").exists()


def test_a_reward_function_that_forgets_answers_is_an_error_and_no_accuracy(tmp_path, monkeypatch):
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": i + 1}) + "\n" for i in range(8)))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "forgetful_rewards.py").write_text("def all_right(completions, **columns):\n    return [1.0]\n")
    given = [f"data={tmp_path / 'sums.jsonl'}", "reward=forgetful_rewards:all_right", "temperature=1"]
    with StubOpenAIServer(lambda body: completion("7")) as server:
        shown = evaluate(*given, f"base_url={server.base_url}", "k=2", "problems=1", f"output={tmp_path / 'out'}", code=2)
    assert "all_right returned 1 rewards for 2 completions" in " ".join(shown.output.split())
    assert not list((tmp_path / "out").rglob("summary.json"))


def test_an_api_key_comes_from_the_named_variable_and_is_written_nowhere(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret-123")
    pupil = Pupil(lambda i, j, question: completion(right(question)))
    result, server = on_server(pupil, tmp_path, "k=1", "problems=1", "api_key_env=MY_KEY")
    assert server.headers[0]["authorization"] == "Bearer secret-123"
    written = b"".join(path.read_bytes() for path in (tmp_path / "it").iterdir())
    assert b"secret-123" not in written
    assert "secret-123" not in result.output
    assert "NO_KEY" in on_server(pupil, tmp_path, "api_key_env=NO_KEY", code=2)[0].output


def test_if_a_server_has_several_models_one_must_be_named(tmp_path):
    with StubOpenAIServer(Pupil(lambda i, j, question: completion("1")), models=("a", "b")) as server:
        given = [f"base_url={server.base_url}", f"output={tmp_path}", "problems=1", "k=1"]
        assert "has 2 models (a, b); choose with model=NAME" in evaluate(*given, code=2).output
        evaluate(*given, "model=b")
    assert server.bodies[-1]["model"] == "b"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["sort"], "no model to evaluate; give model=FOLDER"),
        (["sort", "model=/nowhere/at/all"], "give a folder with config.json"),
        (["temprature=1"], "of an evaluation: temperature"),
        (["trainer.learning=1"], "there is no setting 'trainer.learning'"),
        (["timeout_s=0"], "timeout_s (0.0) must be above 0"),
        (["timeout_s=soon"], "timeout_s=soon"),
        (["confidence=95"], "confidence (95.0) must be above 0 and below 1"),
        (["episode_timeout_s=0"], "episode_timeout_s (0.0) must be above 0"),
        (["episode_retries=-1"], "episode_retries (-1) must be at least 0"),
        (["solved_at=nan", "base_url=http://127.0.0.1:9/v1"], "solved_at (nan) must be a finite reward"),
        (["base_url=localhost:1"], "must begin with http"),
        (["problems=0"], "evaluation.prompts (0) must be at least 1"),
    ],
)
def test_invalid_arguments_are_refused_before_anything_is_written(given, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert said in re.sub(r"\s+", " ", evaluate(*given, code=2).output)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_number_of_problems_is_reported(run, tmp_path):
    given = ["sort", f"model={run / 'model'}", "threads=1", "k=1", f"output={tmp_path}", "task.args.digits=3"]
    shown = evaluate(*given, "problems=100000").output
    (summary,) = tmp_path.glob("*/summary.json")
    there = json.loads(summary.read_text())["num_problems"]
    assert there < 100000
    assert f"only {there} held-out problems, not 100000" in shown


def test_of_your_own_problems_more_can_be_held_out():
    recipe = compose(["data=problems.jsonl", "reward=math", "evaluation.prompts=200"])
    task = SimpleNamespace(suites=lambda: {"heldout": [{"id": "1"}, {"id": "2"}]})
    console = Console(record=True, width=200)
    assert len(_choose_problems(recipe, EvalSettings(), task, console)) == 2
    expected = "has only 2 held-out problems, not 200; task.args.num_heldout=N holds out more of your own"
    assert expected in console.export_text()


def test_an_existing_output_name_is_an_error(run, tmp_path):
    given = ["sort", f"model={run / 'model'}", "threads=1", "problems=1", "k=1", f"output={tmp_path}", "name=x"]
    evaluate(*given)
    assert "choose another name=" in evaluate(*given, code=1).output


def test_print_config_shows_settings_with_resolved_short_names():
    shown = evaluate("addition", "k=3", "temperature=0.5", "confidence=0.9", "--print-config").output
    for line in ("  samples_per_prompt: 3", "  temperature: 0.5", "confidence: 0.9", "kind: addition", "base_url: null"):
        assert line in shown, line


def test_short_names_equal_the_settings_they_stand_for():
    recipe, _ = resolve(["k=3", "problems=7", "top_p=0.5", "max_tokens=9", "concurrency=2", "device=cpu", "solved_at=0.5"])
    assert (recipe.evaluation.samples_per_prompt, recipe.evaluation.prompts) == (3, 7)
    assert (recipe.rollout.top_p, recipe.rollout.max_new_tokens, recipe.rollout.concurrency) == (0.5, 9, 2)
    assert recipe.trainer.model_device == "cpu"
    assert recipe.evaluation.solved_at == 0.5
    with pytest.raises(ConfigError, match="confidence"):
        resolve(["confidence=high"])


def test_several_evaluations_are_drawn_in_one_plot(tmp_path):
    def found(rewards):
        steps = [[Step(0, "q", "a", None, reward, False, True)] for reward in rewards]
        return measure([Rollout(steps=s, meta={"problem_id": i % 2}) for i, s in enumerate(steps)], also={"even": lambda r: True})

    path = tmp_path / "both.png"
    draw_measurements(path, {"before": found([0.0, 1.0, 0.0, 0.0]), "after": found([1.0] * 8)}, title="two")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_run_of_games_is_evaluated_with_its_own_metrics_and_each_game_counts(tmp_path):
    """Games start alike and differ only by seed. Counted as one problem per side, they would give
    an interval from two numbers."""
    given = [
        *TINY,
        "network.hidden_size=16",
        "network.num_heads=2",
        "threads=1",
        "warmup.steps=0",
        "steps=0",
        "evaluation.prompts=2",
    ]
    trained = CliRunner().invoke(app, ["train", "tictactoe", *given, f"output={tmp_path}", "name=games"])
    assert trained.exit_code == 0, trained.output
    summary = json.loads(evaluate(tmp_path / "games", "problems=6", "k=2", "suite=perfect", "--json").stdout)
    assert (summary["num_problems"], summary["num_failed_episodes"], summary["solved_at"]) == (6, 0, 0.5)
    (rollouts,) = tmp_path.glob("eval-*/rollouts.jsonl")
    opened = {line["steps"][0]["prev_obs"][0] for line in lines(rollouts)}
    assert opened == {"X", "O"}
    assert "suite ('mixed') must be one of random, perfect" in evaluate(tmp_path / "games", "suite=mixed", code=2).output
