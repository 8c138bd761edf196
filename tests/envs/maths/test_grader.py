"""The grader: which answers are equal, and that a failure or a hang is a counted error and never a
grade."""

import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ludic.envs.line_process import LineProcess
from ludic.envs.maths import MathGrader
from ludic.envs.maths.grader import GraderCounts, shared_grader
from ludic.errors import ConfigError, GradingError, MissingExtraError

HANGS = r"\boxed{9^{9^{9^{9}}}}"
"""Parsed immediately; the comparison never ends."""


def script(tmp_path: Path, body: str) -> list[str]:
    """A process that speaks the grader's protocol; `body` handles one `request`."""
    path = tmp_path / "process.py"
    lines = ["import json, os, sys, time", "print('{}', flush=True)", "for line in sys.stdin:", "    request = json.loads(line)"]
    path.write_text("\n".join([*lines, *(f"    {line}" for line in body.splitlines())]))
    return [sys.executable, str(path)]


def children() -> set[int]:
    while True:
        try:
            return {int(pid) for path in Path("/proc/self/task").iterdir() for pid in (path / "children").read_text().split()}
        except FileNotFoundError:  # a thread ended while they were read: another one has its children now
            continue


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# Problems in the style of the two data sets, written for this test: (model's answer, target,
# equal).
COMPARED = [
    ("The total is 18.", "18", True),
    ("so she has 1,042 beads", "1042", True),
    (r"\boxed{\$18}", "18", True),
    (r"\boxed{18.0}", "18", True),
    (" 12", "12", True),
    ("The answer is 17.", "18", False),
    (r"\boxed{0.5}", r"\frac{1}{2}", True),
    (r"\boxed{\dfrac12}", r"\frac{1}{2}", True),
    (r"\boxed{\frac{2}{4}}", r"\frac{1}{2}", True),
    (r"\boxed{(x+1)^2}", "x^2+2x+1", True),
    (r"\boxed{(x+1)^2}", "x^2+2x", False),
    (r"\boxed{2\sqrt{3}}", r"\sqrt{12}", True),
    (r"\boxed{(2, 3)}", "(2,3)", True),
    (r"\boxed{(3, 2)}", "(2,3)", False),
    (r"\boxed{-4, 6}", "6,-4", True),
    (r"\boxed{90}", r"90^\circ", True),
    (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}", True),
    (r"\boxed{B}", r"\text{(B)}", True),
    (r"\boxed{3}", "x=3", True),
    (r"\boxed{\begin{pmatrix}1 \\ 3\end{pmatrix}}", r"\begin{pmatrix}1 \\ 3\end{pmatrix}", True),
    (r"\boxed{\frac{1}{0}}", "3", False),
    (r"\boxed{((((((}", "3", False),
    (r"\int_{}^{ x \frac", "3", False),
    ("I do not know.", "3", False),
    ("\x00 \ud800", "3", False),
    ("", "3", False),
]


def test_equal_answers_are_equal_however_they_are_written(grader):
    before = replace(grader.counts)

    async def all_of_them():
        return await asyncio.gather(*(grader.grade(answer, target) for answer, target, _ in COMPARED))

    verdicts = asyncio.run(all_of_them())
    assert [(c[0], c[1], v) for c, v in zip(COMPARED, verdicts, strict=True)] == COMPARED
    assert grader.counts == replace(before, graded=before.graded + len(COMPARED))


def test_a_target_without_an_answer_is_an_error(grader):
    failed = grader.counts.failed
    with pytest.raises(GradingError, match="compare with in the target ''"):
        asyncio.run(grader.grade("3", ""))
    assert grader.counts.failed == failed + 1


def test_a_hanging_comparison_is_stopped_and_the_next_one_is_graded(grader, monkeypatch):
    assert grader.grade_now("3", "3")
    before, counts = children(), replace(grader.counts)
    with monkeypatch.context() as patch:
        patch.setattr(grader, "timeout_s", 0.5)
        with pytest.raises(GradingError, match=r"longer than 0\.5 s: .*9\^.* against '3'"):
            grader.grade_now(HANGS, "3")
    assert len(children()) == len(before) - 1
    assert grader.grade_now("3", "3")
    assert grader.counts == replace(counts, graded=counts.graded + 1, timed_out=counts.timed_out + 1)


def test_a_comparison_whose_parent_is_gone_ends_itself(tmp_path):
    """The process enforces the deadline of the request itself, even if nobody waits for it."""
    from ludic.envs.maths.grader import WORKER

    process = LineProcess([sys.executable, "-P", str(WORKER), "4096"])
    with pytest.raises(GradingError, match=r"failed \(exit status -14\): EOFError: it ended"):
        process.ask({"target": "3", "answer": HANGS, "limit_s": 0.2}, timeout_s=60)


def test_a_killed_process_is_an_error_and_is_replaced(tmp_path):
    before = children()
    grader = MathGrader(command=script(tmp_path, "print(json.dumps({'correct': True}), flush=True)"), workers=1)
    assert grader.grade_now("3", "3")
    (pid,) = children() - before
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(GradingError, match=r"the grader failed \(exit status -9\)"):
        grader.grade_now("3", "3")
    assert grader.grade_now("3", "3")
    assert grader.counts == GraderCounts(graded=2, failed=1)
    grader.close()
    assert children() == before


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("print(json.dumps({'error': 'ZeroDivisionError: x'}), flush=True)", "ZeroDivisionError: x: grading '3' against '4'"),
        ("print('{\"correct\": 1}', flush=True)", "{'correct': 1}: grading"),
        ("print('not json', flush=True)", "JSONDecodeError"),
        ("print('x' * 2_000_000, flush=True)", "its reply is too long"),
        ("os._exit(3)", r"failed \(exit status (3|-9)\): EOFError: it ended"),
        ("os.close(1)", "EOFError: it ended"),
    ],
)  # fmt: skip
def test_every_malformed_reply_is_an_error(tmp_path, body, message):
    grader = MathGrader(command=script(tmp_path, body), workers=1, timeout_s=20)
    with pytest.raises(GradingError, match=message):
        grader.grade_now("3", "4")
    assert grader.counts == GraderCounts(failed=1)
    grader.close()


def test_a_process_that_is_never_ready_is_an_error(tmp_path):
    path = tmp_path / "slow.py"
    path.write_text("import time\ntime.sleep(60)\n")
    grader = MathGrader(command=[sys.executable, str(path)], start_timeout_s=0.2)
    with pytest.raises(GradingError, match=r"was not ready within 0\.2 s"):
        grader.grade_now("3", "3")
    grader.close()


def test_many_answers_share_few_processes_and_hanging_ones_fail_alone(tmp_path, monkeypatch):
    """40 answers of which every fifth hangs: exact counts, and every other answer gets its own
    grade. Only the hanging ones have a short deadline, so that none of the others misses one."""
    ask = LineProcess.ask

    def ask_within(process, request, *, timeout_s):
        return ask(process, request, timeout_s=0.1 if request["answer"] == "hang" else timeout_s)

    monkeypatch.setattr(LineProcess, "ask", ask_within)
    body = "time.sleep(60 if request['answer'] == 'hang' else 0)\nprint(json.dumps({'correct': request['answer'] == request['target']}), flush=True)"  # noqa: E501
    processes, files = children(), open_files()
    grader = MathGrader(command=script(tmp_path, body), workers=4, timeout_s=60.0)
    answers = ["hang" if n % 5 == 0 else str(n) for n in range(40)]

    async def all_of_them():
        targets = [str(n - n % 2) for n in range(40)]
        grades = (grader.grade(answer, target) for answer, target in zip(answers, targets, strict=True))
        return await asyncio.gather(*grades, return_exceptions=True)

    verdicts = asyncio.run(all_of_them())
    assert [isinstance(v, GradingError) for v in verdicts] == [n % 5 == 0 for n in range(40)]
    assert [v for v in verdicts if isinstance(v, bool)] == [n % 2 == 0 for n in range(40) if n % 5]
    assert grader.counts == GraderCounts(graded=32, timed_out=8)
    grader.close()
    assert (children(), open_files()) == (processes, files)


def test_other_output_of_a_process_is_not_a_reply(tmp_path):
    """Libraries used in the comparison print; the worker's replies use their own channel."""
    from ludic.envs.maths.grader import WORKER

    (tmp_path / "math_verify.py").write_text(
        "print('hello')\n"
        "def parse(text, **_):\n    print('parsing', text)\n    return [text]\n"
        "def verify(*_, **__):\n    print('noise', flush=True)\n    return True\n"
    )
    code = f"import sys, runpy; sys.path.insert(0, {str(tmp_path)!r}); sys.argv = ['w', '4096']; runpy.run_path({str(WORKER)!r}, run_name='__main__')"  # noqa: E501
    grader = MathGrader(command=[sys.executable, "-c", code], workers=1)
    assert grader.grade_now("3", "3") is True
    grader.close()


def test_invalid_settings_and_a_missing_package_are_refused(monkeypatch):
    with pytest.raises(ConfigError, match=r"timeout_s \(0\) must be above 0"):
        MathGrader(timeout_s=0)
    monkeypatch.setattr("ludic.envs.maths.grader.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'ludic-rl\[math\]'"):
        MathGrader()


def test_without_an_explicit_grader_all_share_one():
    assert shared_grader() is shared_grader()
