"""The data of the page of `ludic view`, and how it is put into the file."""

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files

import numpy as np
import pytest
from hypothesis import given, strategies as st
from run_folders import log_rollouts, make_rollout, make_run

from ludic.runs.reading import read_run
from ludic.runs.report.scores import decode_scores, describe_preferences, encode_scores
from ludic.runs.view.episodes import BLOCK, EpisodeTable
from ludic.runs.view.page import MAX_POINTS, SCRIPTS, build_page, encode_data, read_series
from ludic.training.classification_metrics import PreferenceMetrics
from ludic.training.rollouts.episodes import EpisodeFailure
from ludic.training.rollouts.log import append_failures

HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>{{SCRIPT}}\u2028]]>"


class Elements(HTMLParser):
    """Collects (name, attributes, text) of script, style, title and meta elements."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.found, self._open = [], None

    def handle_starttag(self, tag, attributes):
        if tag in ("script", "style", "title", "meta"):
            self._open = [tag, dict(attributes), ""]
            self.found.append(self._open)

    def handle_data(self, text):
        if self._open is not None:
            self._open[2] += text

    def handle_endtag(self, tag):
        self._open = None

    def of(self, tag):
        return [(attributes, text) for name, attributes, text in self.found if name == tag]


def parse(page):
    parser = Elements()
    parser.feed(page)
    return parser


TEXTS = st.text(st.characters(codec="utf-8"))


@given(st.recursive(TEXTS | st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner)))
def test_data_in_a_script_element_is_read_back_and_cannot_end_it(value):
    text = encode_data(value)
    assert json.loads(text) == value
    assert not re.search("[<\u2028\u2029]", text)


def test_half_of_a_surrogate_pair_does_not_break_the_page():
    assert json.loads(encode_data(["a\ud800b"])) == ["a?b"]


def read_data(run):
    return json.loads(parse(build_page([read_run(run)], episodes=10)).of("script")[0][1], parse_constant=pytest.fail)


def test_numbers_that_are_not_finite_or_too_large_do_not_prevent_a_page(tmp_path):
    """A diverged run has a held-out loss of nan, and `trainer.max_grad_norm=inf` is a setting."""
    run = make_run(tmp_path / "run")
    with (run / "config.yaml").open("a") as config:
        config.write("  max_grad_norm: .inf\n")
    nan = float("nan")
    summary = {"before": {"loss": 2.5}, "after": {"loss": nan}, "intervals": {"after": {"loss": [nan, 1.0]}}}
    (run / "summary.json").write_text(json.dumps(summary))
    (run / "metrics.jsonl").write_text(f'{{"step": 1, "a": {10**400}, "b": 1e999, "c": 2}}\n{"[" * 100_000}\n')
    (run / "rollouts.jsonl").write_text(
        f'{{"meta": {{"policy_version": NaN}}, "steps": [{{"action": "x", "reward": {10**400}}}]}}\n'
    )
    data = read_data(run)
    shown = data["runs"][0]
    assert data["settings"]["trainer.max_grad_norm"] == ["inf"]
    assert (shown["before"], shown["after"], shown["intervals"]["after"]) == (
        {"loss": 2.5},
        {"loss": None},
        {"loss": [None, 1.0]},
    )
    assert shown["series"] == {"train": {"steps": [1], "values": {"c": [2.0]}}}
    assert (data["episodes"][0][1], data["episodes"][0][4]) == (None, 0.0)


def test_the_page_has_one_script_that_its_policy_names_and_no_other_source(tmp_path):
    run = make_run(tmp_path / "run")
    log_rollouts(run, [make_rollout(0, prompt=HOSTILE, answer=HOSTILE)])
    page = parse(build_page([read_run(run)], episodes=10))
    (data_attributes, data), (attributes, script) = page.of("script")
    assert (data_attributes["type"], attributes) == ("application/json", {})
    assert json.loads(data)["episodes"][0][6][0][1] == HOSTILE
    policy = next(found["content"] for found, _ in page.of("meta") if found.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    style = page.of("style")[0][1]
    hashes = [f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in (script, style)]
    assert (rules["default-src"], rules["script-src"], rules["style-src"]) == ("'none'", *hashes)
    assert "unsafe" not in policy


def test_the_name_of_a_run_is_text(tmp_path):
    run = make_run(tmp_path / "<img src=x onerror=alert(1)>")
    page = build_page([read_run(run)], episodes=10)
    assert "<img" not in page
    assert parse(page).of("title")[0][1] == "<img src=x onerror=alert(1)> - ludic"


def test_the_script_never_parses_html_and_never_evaluates_text():
    assets = files("ludic.runs.view") / "assets"
    for name in SCRIPTS:
        script = (assets / name).read_text()
        assert len(script.splitlines()) < 200
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(|srcdoc|javascript:|fetch\(|XMLHttp", script
        )


def test_a_metric_has_a_value_for_each_step_and_evaluations_only_where_they_were_made(tmp_path):
    run = make_run(tmp_path / "run")
    lines = [
        {"step": 1, "phase": "warm_up", "train/loss": 3.0},
        {"step": 1, "phase": "reinforce", "train/loss": 2.0},
        {"step": 2, "phase": "reinforce", "train/loss": 9.0},  # repeated below, after a kill
        {"step": 2, "phase": "reinforce", "train/loss": 1.0, "name": "text", "bad": None, "flag": True},
        {"step": 2, "phase": "reinforce", "eval/step": 2, "eval/reward": 0.5},
        {"step": 3, "phase": "reinforce", "train/loss": 0.123456789, "eval/step": 2, "eval/reward": 0.5},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "pha')
    assert read_series(run) == {
        "warm_up": {"steps": [1], "values": {"train/loss": [3.0]}},
        "reinforce": {"steps": [1, 2, 3], "values": {"train/loss": [2.0, 1.0, 0.123457], "eval/reward": [None, 0.5, None]}},
    }


def test_long_runs_are_thinned_but_keep_their_end_and_every_evaluation(tmp_path):
    run, count = make_run(tmp_path / "run"), 3 * MAX_POINTS
    lines = [
        {"step": step, "phase": "reinforce", "a": step, **({"eval/x": 1.0} if step % 1000 == 999 else {})}
        for step in range(count)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    series = read_series(run)["reinforce"]
    assert len(series["steps"]) <= MAX_POINTS + 1 + count // 1000
    assert series["steps"][-1] == count - 1
    assert sum(value is not None for value in series["values"]["eval/x"]) == count // 1000
    assert series["values"]["a"] == series["steps"]


def make_table(run, limit=100, decode=chr):
    table = EpisodeTable(limit)
    table.add(0, run / "rollouts.jsonl", decode)
    return table


def test_an_episode_is_a_row_with_its_turns_tokens_and_flags(tmp_path):
    run = make_run(tmp_path / "run")
    log_rollouts(
        run, [make_rollout(0, answer="44", group="g"), make_rollout(1, answer="45", reward=0.0, finish="length", group="g")]
    )
    table = make_table(run)
    assert table.pieces == ["4", "5"]
    assert table.rows == [
        [0, 0, "p0", 0, 1.0, "", [["2+2=", "44", None, 1.0, 0.5, "", [0, 0], [50, 50], [], []]]],
        [0, 1, "p1", 0, 0.0, "c", [["2+2=", "45", None, 0.0, -0.5, "c", [0, 1], [50, 50], [], []]]],
    ]
    assert make_table(run, decode=None).rows[0][6][0][6] == []


def test_a_turn_has_the_right_answer_and_the_reward_of_each_function(tmp_path):
    run = make_run(tmp_path / "run")
    rollout = make_rollout(0)
    row = {"prompt": "2+2=", "answer": None, "solution": 4}
    rollout.steps[0].info.update({"row": row, "rewards/exact": 1.0, "rewards/short": 0.25, "rewards/none": None})
    log_rollouts(run, [rollout])
    assert make_table(run).rows[0][6][0][9] == ["right answer 4", "exact 1.0", "short 0.25"]


def test_a_turn_of_an_agent_says_where_its_call_stands(tmp_path):
    run = make_run(tmp_path / "run")
    rollouts = [make_rollout(number) for number in range(3)]
    for rollout, parent in zip(rollouts, (None, 0, "0"), strict=True):
        rollout.steps[0].info.update({"call": 1, "parent": parent, "branch": 2, "reason": "changed:1:content"})
    rollouts[2].steps[0].info["branch"] = "2"
    log_rollouts(run, rollouts)
    facts = [row[6][0][9] for row in make_table(run).rows]
    assert facts == [["call 1, branch 2, continues none: changed:1:content"], ["call 1, branch 2, continues call 0"], []]


def test_a_log_of_any_content_is_read_as_far_as_it_goes(tmp_path):
    run = make_run(tmp_path / "run")
    odd = ['{"steps": 3}', '{"meta": [], "steps": [{"reward": "x", "trace": 5, "info": null}]}', "[]", "{"]
    (run / "rollouts.jsonl").write_text("\n".join(odd[1:]) + "\n")
    rows = make_table(run).rows
    assert [len(row[6]) for row in rows] == [1]
    assert rows[0][6][0] == ["", "", None, 0.0, None, "", [], [], [], []]


def test_log_probabilities_that_are_not_finite_are_none_and_not_certainty(tmp_path):
    """The log has null for them: 0 would be shown as a probability of 100 %."""
    run, rollout = make_run(tmp_path / "run"), make_rollout(0, answer="abc")
    rollout.steps[0].trace.completion_logprobs[:] = [-0.5, float("-inf"), float("nan")]
    log_rollouts(run, [rollout])
    assert make_table(run).rows[0][6][0][7] == [50, None, None]


def write_token_log(run, lines):
    (run / "token_logps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"id": "r')


def test_the_mismatch_of_a_token_is_the_trainers_log_probability_minus_the_samplers(tmp_path):
    """The sampler gave each token -0.5. Of r0 the trainer's values are -0.5, -0.625 and -0.25: 0,
    -125 and 250 thousandths. r1 begins with an action token, which has no prediction; its last one
    was cut off. The later of two lines counts, as after a resume. r2 was not logged."""
    run = make_run(tmp_path / "run")
    log_rollouts(run, [make_rollout(number, answer="abc") for number in range(3)])
    line = {"step": 0, "skipped": 0}
    write_token_log(
        run,
        [
            {"id": "r0", **line, "logps": [-9.0, -9.0, -9.0]},
            {"id": "r0", **line, "logps": [-0.5, -0.625, -0.25]},
            {"id": "r1", **line, "skipped": 1, "logps": [-0.501]},
            {"id": "r0", **line, "step": 1, "logps": [-9.0]},
            {"id": "r0", **line, "step": [], "logps": [-9.0]},
        ],
    )
    table = EpisodeTable(100)
    table.add(0, run / "rollouts.jsonl", chr, run / "token_logps.jsonl")
    assert [row[6][0][8] for row in table.rows] == [[0, -125, 250], [None, -1], []]
    assert read_data(run)["episodes"][0][6][0][8] == [0, -125, 250]


def test_failed_episodes_are_rows_with_their_error_and_what_was_answered(tmp_path):
    """The line of an episode that was played again after a resume and failed again counts once."""
    run = make_run(tmp_path / "run")
    log_rollouts(run, [make_rollout(0)])
    first, again = ({"problem_id": "p3", "group_id": drawn} for drawn in ("a1", "b2"))
    failed = EpisodeFailure(3, "task", None, "KeyError: 'boom'", 2, first, "2+2=", "5")
    append_failures(run / "failed_episodes.jsonl", [failed, replace(failed, meta=again)])
    append_failures(run / "failed_episodes.jsonl", [EpisodeFailure(4, "task", None, "TimeoutError", 2, {})])
    data = read_data(run)
    turn = ["2+2=", "5", None, 0.0, None, "", [], [], [], []]
    assert data["episodes"][1:] == [
        [0, None, "p3", None, None, "", [turn], "KeyError: 'boom'"],
        [0, None, "", None, None, "", [], "TimeoutError"],
    ]
    assert data["runs"][0]["logged"] == 3


def test_of_failed_episodes_the_last_that_fit_are_rows(tmp_path, monkeypatch):
    """Each line has the same length but for its number; two of them fit, or what the limit is."""
    run = make_run(tmp_path / "run")
    log = run / "failed_episodes.jsonl"
    append_failures(log, [EpisodeFailure(number, "task", None, f"error {number}", 2, {}) for number in range(6)])
    size = log.stat().st_size // 6
    for bytes_, limit, shown in [(2 * size, 100, [4, 5]), (100 * size, 3, [3, 4, 5]), (size - 1, 100, [])]:
        monkeypatch.setattr("ludic.runs.view.episodes.MAX_BYTES", bytes_)
        table = EpisodeTable(limit)
        table.add_failed(0, log)
        assert [row[-1] for row in table.rows] == [f"error {number}" for number in shown]
        assert table.counts == {0: 6}


def test_of_a_long_log_whole_blocks_are_kept_and_the_number_of_all_is_known(tmp_path):
    run = make_run(tmp_path / "run")
    log_rollouts(run, [make_rollout(number) for number in range(6 * BLOCK)])
    table = make_table(run, limit=2 * BLOCK)
    assert [row[1] for row in table.rows] == [*range(BLOCK), *range(3 * BLOCK, 4 * BLOCK)]
    assert table.counts == {0: 6 * BLOCK}


SCORES = st.lists(st.tuples(*(st.floats(-20, 20),) * 2, st.sampled_from([0.0, 0.25, 0.75, 1.0])), min_size=1, max_size=40)


@given(SCORES, st.booleans())
def test_scores_are_read_back_and_every_pair_is_in_the_pictures(pairs, both_orders):
    metrics = PreferenceMetrics(both_orders=both_orders)
    metrics.update(*(np.round(column, 6) for column in zip(*pairs, strict=True)))
    again = decode_scores(json.loads(encode_scores(metrics)))
    assert again.compute() == metrics.compute()
    found = describe_preferences(again)
    assert sum(found["margins"]["counts"]) == pytest.approx(len(pairs))
    assert found["margins"]["negative"] == pytest.approx(metrics.compute()["negative_margin_rate"])
    assert sum(found["calibration"]["counts"]) == len(pairs) * (2 if both_orders else 1)
    assert found["calibration"]["error"] == metrics.compute()["ece"]


def test_margins_are_counted_by_hand():
    """Margins 2, -1 and 1 reach to 2, in 40 bins of 0.1 from -2. Bin k has [-2 + k / 10, its end):
    -1 is in bin 10, 1 in bin 30, and 2 in the last, which has its upper end."""
    metrics = PreferenceMetrics()
    metrics.update([2.0, 0.0, 1.0], [0.0, 1.0, 0.0], [1.0, 1.0, 1.0])
    margins = describe_preferences(metrics)["margins"]
    assert len(margins["edges"]) == 41
    assert {place: count for place, count in enumerate(margins["counts"]) if count} in ({10: 1, 30: 1, 39: 1},)
    assert (margins["median"], margins["negative"]) == (1.0, pytest.approx(1 / 3))
