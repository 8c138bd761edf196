"""What `ludic judge eval` says about judges whose faults are known."""

import asyncio
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stub_judges import judge_by, judged_by, read_question, shown_answers, verdict
from stub_openai_server import StubOpenAIServer
from typer.testing import CliRunner

from ludic.cli.app import app
from ludic.errors import ConfigError, DataError
from ludic.eval.judge import ORDERS, JudgeReport, evaluate_judge
from ludic.eval.statistics import Interval
from ludic.training.judge import Judge

PAIRS = [{"prompt": f"p{number}", "chosen": f"good {number}", "rejected": f"bad {number}"} for number in range(200)]
LABELLED = [
    {"prompt": f"p{number}", "completion": f"{'good' if number % 2 else 'bad'} {number}", "label": bool(number % 2)}
    for number in range(400)
]


def chance(*content: Any) -> float:
    """A number in [0, 1) that follows from the content: a coin that falls the same way again."""
    return int.from_bytes(hashlib.sha256(json.dumps(content).encode()).digest()[:6]) / 2**48


def good(data: dict[str, Any], answer: str) -> float:
    return float(answer.startswith("good"))


def wrong_one_time_in_five(data: dict[str, Any], answer: str) -> float:
    """Independent for each question, so also for the two orders of a pair."""
    is_wrong = chance(data["problem"], [text[:3] for text in shown_answers(data)]) < 0.2
    return 1 - good(data, answer) if is_wrong else good(data, answer)


class Direct(Judge):
    """A judge without a server."""

    def answering(self, judge: Callable[[Any, Any], dict[str, Any]]) -> Any:
        self.judge = judge
        return self

    async def ask(self, questions: Any, *, sample: int = 0) -> list[Any]:
        return [{"reason": "", **self.judge(question.data, question.verdict)} for question in questions]


def measure(
    judge: Callable[[Any, Any], dict[str, Any]], rows: list[dict[str, Any]], samples: int = 1, **settings: Any
) -> JudgeReport:
    made = Direct(url="http://127.0.0.1:9/v1", **settings).answering(judge)
    return asyncio.run(evaluate_judge(made, rows, samples=samples))


def measure_server(server: StubOpenAIServer, rows: list[dict[str, Any]], samples: int = 1, **settings: Any) -> JudgeReport:
    return asyncio.run(evaluate_judge(Judge(url=server.base_url, **settings), rows, samples=samples))


def holds(interval: Interval | None, value: float) -> bool:
    assert interval is not None
    assert interval.low is not None
    assert interval.high is not None
    return interval.low <= value <= interval.high


@pytest.mark.parametrize(("rows", "mode"), [(PAIRS, "pairs"), (PAIRS, "ranking"), (LABELLED, "points")])
def test_a_judge_that_is_wrong_one_time_in_five_is_found_to_be_so(rows: list[dict[str, Any]], mode: str) -> None:
    report = measure(judge_by(wrong_one_time_in_five), rows, mode=mode)
    assert holds(report.accuracy, 0.8)
    assert not holds(report.accuracy, 0.9)
    assert not holds(report.accuracy, 0.7)
    assert report.accuracy.value == pytest.approx(right_share(rows), abs=1e-12)
    # It is always sure. Of one answer 0.8 of that comes true; of pairs, both orders of which agree
    # with probability 0.68, 0.64 / 0.68 = 0.94.
    sure = report.calibration.frequency[-1]
    assert sure == pytest.approx(0.8 if mode == "points" else 0.94, abs=0.06)
    if mode != "points":
        assert holds(report.first_preferred, 0.5)
        assert holds(report.swap_agreement, 0.68)
    assert (report.num_rows, report.errors) == (len(rows), {})


def right_share(rows: list[dict[str, Any]]) -> float:
    """The share of right verdicts, counted by asking the stub's coin itself."""
    if "label" in rows[0]:
        return float(np.mean([chance(row["prompt"], [row["completion"][:3]]) >= 0.2 for row in rows]))
    orders = (["goo", "bad"], ["bad", "goo"])
    return float(np.mean([chance(row["prompt"], order) >= 0.2 for row in rows for order in orders]))


@pytest.mark.parametrize("mode", ["pairs", "ranking"])
@pytest.mark.parametrize("bias", [0.0, 0.3, 1.0])
def test_a_bias_for_the_first_position_is_found(mode: str, bias: float) -> None:
    """With probability b the judge takes the first answer, else the better one: the first wins
    (1 + b) / 2 of the comparisons, and the better one 1 - b / 2."""
    judge = judge_by(good, biased=lambda data: chance(data["problem"], [text[:3] for text in shown_answers(data)]) < bias)
    report = measure(judge, PAIRS, mode=mode)
    assert holds(report.first_preferred, (1 + bias) / 2)
    assert holds(report.first_preferred, 0.5) == (bias == 0)
    assert holds(report.accuracy, 1 - bias / 2)
    assert holds(report.swap_agreement, 1 - bias)


@pytest.mark.parametrize("mode", ["points", "pairs"])
def test_a_perfect_judge_has_no_fault(mode: str) -> None:
    report = measure(judge_by(good), PAIRS, mode=mode)
    assert report.accuracy.value == 1.0
    assert (report.ties, report.calibration_error) == (0.0, 0.0)
    assert report.obeyed is not None
    assert report.obeyed.value == 0.0
    assert report.self_agreement is None
    assert (report.first_preferred is None) == (mode == "points")


def test_scores_are_calibrated_if_they_come_true_as_often_as_they_say() -> None:
    """Answers are good with probability q, and the judge knows q."""
    rows = [
        {"prompt": f"p{number}", "completion": f"{number % 11}", "label": chance("true", number) < (number % 11) / 10}
        for number in range(1100)
    ]
    known = measure(judge_by(lambda data, answer: int(re.match(r"\d+", answer)[0]) / 10), rows, scale="0-10")
    assert known.calibration_error < 0.04
    assert known.calibration.counts.sum() == len(rows)
    sure = measure(judge_by(lambda data, answer: 1.0), rows, scale="0-10")
    assert sure.calibration_error == pytest.approx(0.5, abs=0.03)
    assert sure.calibration_error == pytest.approx(1 - np.mean([row["label"] for row in rows]))


def test_ties_count_half() -> None:
    report = measure(judge_by(lambda data, answer: 0.5), PAIRS[:20], mode="pairs")
    assert (report.accuracy.value, report.ties, report.first_preferred.value) == (0.5, 1.0, 0.5)  # type: ignore[union-attr]


def test_agreement_with_itself_at_a_temperature_is_measured() -> None:
    """Each sample is flipped with probability 0.2: two agree with probability 0.64 + 0.04."""

    def answer(body: dict[str, Any]) -> Any:
        data, _ = read_question(body)
        return verdict(item_1=good(data, data["answer"]) == (chance(data, body["seed"]) >= 0.2))

    with StubOpenAIServer(answer, idle_s=2.0) as server:
        report = measure_server(server, LABELLED[:100], samples=4, temperature=0.7)
        assert {body["seed"] for body in server.bodies} == {0, 1, 2, 3}
        assert {body["temperature"] for body in server.bodies} == {0.7}
        with pytest.raises(ConfigError, match=r"samples \(2\)"):
            measure_server(server, LABELLED, samples=2)
    assert holds(report.self_agreement, 0.68)
    assert not holds(report.self_agreement, 0.8)
    assert holds(report.accuracy, 0.8)


@pytest.mark.parametrize("obeys", [0, 1, 2])
@pytest.mark.parametrize(("rows", "mode"), [(PAIRS[:40], "points"), (PAIRS[:40], "pairs"), (LABELLED[:80], "points")])
def test_orders_that_are_obeyed_are_counted(rows: list[dict[str, Any]], mode: str, obeys: int) -> None:
    """A judge that obeys some of the four texts gives the worse answer more by as many quarters."""

    def fooled(data: dict[str, Any], answer: str) -> float:
        return 1.0 if any(order in answer for order in ORDERS[:obeys]) else 0.8 * good(data, answer)

    report = measure(judge_by(fooled), rows, mode=mode, scale="0-10")
    assert report.obeyed is not None
    assert report.obeyed.value == pytest.approx(obeys / 4)
    assert report.accuracy.value == 1.0  # measured without these texts


def test_rows_without_a_verdict_are_counted_and_in_no_number() -> None:
    def answer(body: dict[str, Any]) -> Any:
        data, _ = read_question(body)
        return verdict(better="A" if data["problem"] == "p3" else "tie") if data["problem"] != "p5" else verdict(better=5)

    with StubOpenAIServer(answer, idle_s=2.0) as server:
        report = measure_server(server, PAIRS[:10], mode="pairs")
        assert (report.num_rows, report.ties) == (9, pytest.approx(16 / 18))
        assert list(report.errors.values()) == [1]
        with pytest.raises(DataError, match=r"no row has a verdict.*'A' or|no row"):
            measure_server(server, [PAIRS[5]], mode="pairs")
        with pytest.raises(DataError, match="label"):
            measure_server(server, [{"prompt": "p", "completion": "c"}])


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["judge", "eval", *arguments])


def test_the_command_prints_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS[:20]))
    with judged_by(good, biased=lambda data: True) as server:
        arguments = ["data=pairs.jsonl", f"judge.url={server.base_url}", "judge.mode=pairs"]
        shown, asked = run(*arguments), len(server.bodies)
        report = json.loads(run(*arguments, "--json").stdout)
        assert len(server.bodies) == asked == 4 * 20  # both orders of each pair, and both with an order in it
        assert json.loads(run(*arguments, "--json", "--limit=5").stdout)["num_rows"] == 5
    assert shown.exit_code == 0, shown.output
    assert "Position bias: it prefers the answer that is shown first." in shown.output
    assert (report["num_rows"], report["first_preferred"]["value"], report["accuracy"]["value"]) == (20, 1.0, 0.5)
    for wrong in (arguments[:1], arguments[1:], [*arguments, "judge.rubrik=x"]):
        assert run(*wrong).exit_code != 0
