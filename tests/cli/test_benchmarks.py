"""`ludic eval gsm8k` and the other benchmarks as they stand. Only the rows of the hub are replaced,
by rows of the same columns, and the model, by a server with scripted answers."""

import json
import re

import datasets
import pytest
from stub_openai_server import StubOpenAIServer, completion
from typer.testing import CliRunner

from ludic.cli.app import app
from ludic.cli.evaluate import resolve

GSM8K = [
    {"question": "Ann has 48 pens and gives away 12. How many are left?", "answer": "48-12=<<48-12=36>>36 pens.\n#### 36"},
    {"question": "A town of 1,000 grows by 234. How many live there?", "answer": "1000+234=<<1000+234=1234>>1234\n#### 1,234"},
    {"question": "How many legs have 18 dogs?", "answer": "18*4=<<18*4=72>>72 legs.\n#### 72"},
    {"question": "It was 3 degrees and fell by 8. What is it now?", "answer": "3-8=-5\n#### -5"},
]
MATH = [
    {
        "problem": "Compute $\\frac{1}{3}+\\frac{1}{6}$.",
        "solution": "A common denominator is 6, with $\\boxed{6}$ below, so the sum is one half.",
        "answer": "\\frac{1}{2}",
        "subject": "Prealgebra",
        "level": 1,
        "unique_id": "test/prealgebra/1.json",
    },
    {
        "problem": "Give $(0,3)$ in polar coordinates.",
        "solution": "The radius is 3, so it is $\\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}$.",
        "answer": "\\left( 3, \\frac{\\pi}{2} \\right)",
        "subject": "Precalculus",
        "level": 2,
        "unique_id": "test/precalculus/2.json",
    },
]
AIME_2024 = [
    {
        "id": 60,
        "problem": "Find $11 \\cdot 3$.",
        "solution": "Some say 34.",
        "answer": "033",
        "url": "https://a.example",
        "year": "2024",
    },
    {
        "id": 61,
        "problem": "Find $200 + 4$.",
        "solution": "$\\boxed{4}$ more.",
        "answer": "204",
        "url": "https://b.example",
        "year": "2024",
    },
]
AIME_2025 = [
    {"problem": "Find $35 \\cdot 2$.", "answer": "70", "id": "0"},
    {"problem": "Find $500 + 88$.", "answer": "588", "id": "1"},
]
NO_COMMA, TITLE = "punctuation:no_comma", "detectable_format:title"
IFEVAL = [
    {"key": 1000, "prompt": "Greet me without a comma.", "instruction_id_list": [NO_COMMA], "kwargs": [{"num_words": None}]},
    {
        "key": 1001,
        "prompt": "Write a poem with a title in double angular brackets, and no comma.",
        "instruction_id_list": [TITLE, NO_COMMA],
        "kwargs": [{"num_words": None}, {"num_words": None}],
    },
]
HUB = {
    "gsm8k": ("openai/gsm8k", "main", "test", GSM8K),
    "math-500": ("HuggingFaceH4/MATH-500", None, "test", MATH),
    "aime-2024": ("HuggingFaceH4/aime_2024", None, "train", AIME_2024),
    "aime-2025": ("math-ai/aime25", None, "test", AIME_2025),
    "ifeval": ("google/IFEval", None, "train", IFEVAL),
}
"""Benchmark -> id, configuration, split, rows in place of the hub's."""
INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."


def evaluate(*arguments, code=0):
    result = CliRunner().invoke(app, ["eval", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def hub(monkeypatch):
    """The `datasets` library with these rows, and nothing else, on its hub."""
    known = {(source, config, split): rows for source, config, split, rows in HUB.values()}

    def load_dataset(source, config, *, split, streaming):
        assert not streaming
        return datasets.Dataset.from_list(known[source, config, split])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)


def measure(name, answers, tmp_path, *given):
    """The summary of a benchmark, and the requests that the server got. `answers[i]` are those to
    problem i in the order of the requests: texts, or completions."""
    column = {"gsm8k": "question", "ifeval": "prompt"}.get(name, "problem")
    left = {row[column]: list(texts) for row, texts in zip(HUB[name][3], answers, strict=True)}

    def answer(body):
        said = left[body["messages"][-1]["content"]].pop(0)
        return completion(said) if isinstance(said, str) else said

    with StubOpenAIServer(answer) as server:
        arguments = [name, f"base_url={server.base_url}", f"output={tmp_path}", "--json", *given]
        summary = json.loads(evaluate(*arguments).stdout)
    assert not any(left.values())
    return summary, server.bodies


def test_gsm8k_is_greedy_and_counts_every_problem_of_the_test_split(hub, tmp_path):
    answers = [["It is \\boxed{36}."], ["So \\boxed{1234} people."], ["I count 18."], ["\\boxed{-5}"]]
    summary, bodies = measure("gsm8k", answers, tmp_path)
    assert summary["accuracy"]["value"] == 3 / 4  # the third is wrong
    assert (summary["num_problems"], summary["samples_per_problem"], summary["temperature"]) == (4, 1, 0.0)
    # Wilson's interval of 3 of 4 with z = 1.96: the centre is
    # (.75 + z^2/8) / (1 + z^2/4) = 1.2302/1.9604 = .6275, and half of the width is
    # z / 1.9604 * sqrt(.75 * .25 / 4 + z^2 / 64) = .99979 * sqrt(.046875 + .060025) = .3269.
    assert (summary["accuracy"]["low"], summary["accuracy"]["high"]) == pytest.approx((0.3006, 0.9544), abs=5e-4)
    assert [body["messages"][0] for body in bodies] == [{"role": "system", "content": INSTRUCTION}] * 4
    assert {(body["temperature"], body["max_tokens"]) for body in bodies} == {(0.0, 2048)}
    (folder,) = tmp_path.iterdir()
    assert (folder.name, summary["recipe"]) == ("eval-gsm8k-stub-seed0", "eval-gsm8k")
    lines = [json.loads(line) for line in (folder / "problems.jsonl").read_text().splitlines()]
    assert [line["question"] for line in lines] == [row["question"] for row in GSM8K]
    assert [line["right"] for line in lines] == [1, 1, 0, 1]
    assert resolve([str(folder / "config.yaml")])[0] == resolve(["gsm8k", "model=null", f"output={tmp_path}"])[0]


RIGHT = [
    "72",
    "72.0",
    "\\boxed{72}",
    "$72",
    "It is $72.00.",
    "\\boxed{71}, no: \\boxed{72}",
    "#### 72",
    "<think>\\boxed{5}</think>72",
]
WRONG = ["", "I do not know.", "\\boxed{72} or \\boxed{71}", "\\boxed{7", "72 or 73", "<think>\\boxed{72}</think> It is 5."]


def test_forms_of_a_right_number_count_and_the_last_box_decides(hub, tmp_path):
    """14 answers to each of two problems: 8 of 14 are right, and of 1,234 4 of 14."""
    given = ["k=14", "temperature=1", "concurrency=1"]
    thousands = ["1,234", "1234", "\\boxed{1,234}", "\\boxed{\\$1{,}234}", *["1.234"] * 10]
    other = [["no"] * 14] * 2
    summary, _ = measure("gsm8k", [other[0], thousands, [*RIGHT, *WRONG], other[1]], tmp_path, *given)
    (problems,) = tmp_path.glob("*/problems.jsonl")
    lines = [json.loads(line) for line in problems.read_text().splitlines()]
    judged = [dict(zip(line["texts"], line["rewards"], strict=True)) for line in lines]
    assert judged[1] == dict.fromkeys(thousands, 1.0) | {"1.234": 0.0}
    assert judged[2] == dict.fromkeys(RIGHT, 1.0) | dict.fromkeys(WRONG, 0.0)
    assert summary["accuracy"]["value"] == pytest.approx((0 + 4 + 8 + 0) / 56)
    # pass@2 = 1 - C(n - c, 2) / C(n, 2) with n = 14: 1 - 45/91 for c = 4, 1 - 15/91 for c = 8
    assert summary["pass_at_k"]["2"]["value"] == pytest.approx((46 / 91 + 76 / 91) / 4)
    assert summary["num_failed_episodes"] == 0


def test_an_answer_that_the_token_limit_cuts_off_is_wrong_and_counted(hub, tmp_path):
    cut = completion("We add 1000 and 23", "length")
    answers = [["\\boxed{36}"], [cut], ["\\boxed{72}"], ["\\boxed{-5}"]]
    summary, _ = measure("gsm8k", answers, tmp_path)
    assert (summary["accuracy"]["value"], summary["also"]["cut_off"]["value"]) == (3 / 4, 1 / 4)


def test_math_500_takes_the_target_from_the_column_answer(hub, tmp_path):
    """The first row's `solution` has a box around another number."""
    summary, bodies = measure("math-500", [["\\boxed{0.5}"], ["$\\boxed{(3,\\pi/2)}$"]], tmp_path)
    assert summary["accuracy"]["value"] == 1.0
    assert {(body["temperature"], body["max_tokens"]) for body in bodies} == {(0.0, 2048)}
    wrong, _ = measure("math-500", [["\\boxed{6}"], ["\\boxed{(3,\\pi)}"]], tmp_path)
    assert wrong["accuracy"]["value"] == 0.0


def test_aime_is_the_mean_of_64_sampled_answers(hub, tmp_path):
    """16 of 64 answers to the first problem are right, and none to the second: avg@64 is 16/128,
    and pass@64 is 1/2."""
    answers = [["\\boxed{33}"] * 8 + ["\\boxed{033}"] * 8 + ["\\boxed{34}"] * 48, ["\\boxed{4}"] * 64]
    summary, bodies = measure("aime-2024", answers, tmp_path)
    assert (summary["samples_per_problem"], summary["accuracy"]["value"]) == (64, 16 / 128)
    assert summary["pass_at_k"]["64"]["value"] == 0.5
    assert {(body["temperature"], body["top_p"], body["max_tokens"]) for body in bodies} == {(0.6, 0.95, 30000)}


def test_aime_2025_has_the_settings_of_aime_2024(hub, tmp_path):
    summary, _ = measure("aime-2025", [["\\boxed{70}", "\\boxed{7}"], ["588", "\\boxed{588}"]], tmp_path, "k=2")
    assert summary["accuracy"]["value"] == 3 / 4
    first, second = (resolve([name])[0] for name in ("aime-2024", "aime-2025"))
    assert (first.rollout, first.evaluation, first.reward) == (second.rollout, second.evaluation, second.reward)


class Checker:
    """In place of the processes of lm-evaluation-harness."""

    async def check_answer(self, answer, row):
        followed = {NO_COMMA: "," not in answer, TITLE: "<<" in answer}
        return [followed[name] for name in row["instruction_id_list"]]


def test_ifeval_is_strict_by_prompt_and_reports_the_share_of_instructions(hub, tmp_path, monkeypatch):
    """Of the second prompt one of two instructions is followed: 1/2 of the prompts, and a share of
    (1 + 1/2) / 2."""
    monkeypatch.setattr("ludic.envs.ifeval.shared_checker", Checker)
    summary, bodies = measure("ifeval", [["Hello there"], ["No title and no comma"]], tmp_path)
    assert summary["accuracy"]["value"] == 1 / 2
    assert summary["also"]["rewards/ifeval_instructions"]["value"] == 3 / 4
    assert summary["reward"]["value"] == 1 / 2
    assert [[message["role"] for message in body["messages"]] for body in bodies] == [["user"]] * 2
    assert {(body["temperature"], body["max_tokens"]) for body in bodies} == {(0.0, 1280)}


ALL = [("gsm8k", 1319), ("math-500", 500), ("aime-2024", 30), ("aime-2025", 30), ("ifeval", 541)]


@pytest.mark.parametrize(("name", "problems"), ALL)
def test_a_benchmark_measures_all_its_problems(name, problems):
    recipe, _ = resolve([name])
    assert (recipe.recipe, recipe.evaluation.prompts, recipe.data) == (f"eval-{name}", problems, None)


def test_fewer_problems_or_a_file_of_your_own_can_be_measured(hub, tmp_path):
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in GSM8K[2:]))
    with StubOpenAIServer(lambda body: completion("72")) as server:
        given = ["gsm8k", f"base_url={server.base_url}", f"output={tmp_path / 'runs'}", "--json"]
        first = json.loads(evaluate(*given, "problems=1").stdout)
        mine = json.loads(evaluate(*given, f"task.args.heldout_data={tmp_path / 'mine.jsonl'}").stdout)
    assert (first["num_problems"], first["accuracy"]["value"]) == (1, 0.0)
    assert (mine["num_problems"], mine["accuracy"]["value"]) == (2, 0.5)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["gsm8k"], "there is no model to evaluate; give model=FOLDER or a hub id"),
        (["gsm8k", "model=/nowhere/at/all"], "give a folder with config.json, or a hub id"),
        (["gsm8kk"], "there is no recipe 'gsm8kk'; did you mean gsm8k or eval-gsm8k?"),
        (["math500"], "did you mean math or eval-math-500?"),
        (["gsm8k", "k=4"], "k (4) needs a temperature above 0"),
    ],
)
def test_what_is_missing_is_said_before_the_hub_is_asked(given, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("the hub was asked"))
    assert said in re.sub(r"\s+", " ", evaluate(*given, code=2).output)
    assert list(tmp_path.iterdir()) == []


def test_without_a_connection_the_error_names_the_data_and_a_way_out(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    shown = re.sub(r"\s+", " ", evaluate("gsm8k", "base_url=http://127.0.0.1:9/v1", f"output={tmp_path}", code=2).output)
    assert "cannot load openai/gsm8k (config main, split test): ConnectionError" in shown
    assert "without a connection, name a file or a folder that has the rows" in shown


def test_a_benchmark_is_not_trained_on_but_can_measure_a_run_on_other_rows(tmp_path):
    train = ["train", "eval-gsm8k", f"output={tmp_path}", "name=it"]
    refused = CliRunner().invoke(app, train)
    assert refused.exit_code == 2
    assert "the recipe eval-gsm8k has no rows to train on: task.args.heldout_data (openai/gsm8k) is only measured" in (
        re.sub(r"\s+", " ", refused.output)
    )
    assert list(tmp_path.iterdir()) == []
    for name, rows in (("train", GSM8K[:2]), ("test", GSM8K[1:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tiny = ["hidden_size=16", "num_heads=2", "num_kv_heads=1", "intermediate_size=16", "max_positions=512"]
    made = ["train", "warmup.steps=0", "steps=0", "evaluation.prompts=1", "threads=1", *(f"network.{each}" for each in tiny)]
    assert CliRunner().invoke(app, [*made, f"output={tmp_path}", "name=made"]).exit_code == 0
    model = [f"model={tmp_path / 'made' / 'model'}", "threads=1", "dtype=float32"]
    given = [f"data={tmp_path / 'train.jsonl'}", f"task.args.heldout_data={tmp_path / 'test.jsonl'}"]
    small = ["steps=1", "rollout.prompts=1", "rollout.group_size=2", "rollout.temperature=1", "rollout.max_new_tokens=4"]
    result = CliRunner().invoke(app, [*train, *model, *given, *small, "rollout.log_every=1"])
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in (tmp_path / "it" / "rollouts.jsonl").read_text().splitlines()]
    trained = {line["steps"][0]["info"]["row"]["question"] for line in lines}
    assert trained == {GSM8K[0]["question"]}  # the second is a problem of the test split, too
