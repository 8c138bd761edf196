"""Loggers of metrics: what is in the file, files of limited length, and what others read of it."""

import itertools
import json
import logging
import math
import re

import numpy as np
import pytest

from ludic.errors import ConfigError, ConfigTypeError, DataError
from ludic.rollouts.training import metrics
from ludic.rollouts.training.metrics import CompositeLogger, JSONLLogger, as_training_logger, compute_stats_from_jsonl


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_has_step_time_and_metrics(tmp_path):
    logger = JSONLLogger(str(tmp_path / "logs"))
    logger.log({"loss": math.nan, "step": 7, "run/name": "a", "n": np.float32(0.5)}, step=42)
    logger.finish()
    [line] = lines(tmp_path / "logs" / "metrics.jsonl")
    assert line.pop("timestamp") > 1e9
    assert line == {"step": 42, "loss": None, "run/name": "a", "n": 0.5}


def test_a_file_that_is_full_is_put_aside_also_after_a_restart(tmp_path):
    for step in range(5):
        logger = JSONLLogger(tmp_path, max_lines=2)
        logger.log({"loss": step}, step)
        logger.finish()
    steps = {path.name: [line["step"] for line in lines(path)] for path in tmp_path.iterdir()}
    assert steps == {"metrics.1.jsonl": [0, 1], "metrics.2.jsonl": [2, 3], "metrics.jsonl": [4]}


def write(folder, steps, max_lines):
    logger = JSONLLogger(folder, max_lines=max_lines)
    for step in steps:
        logger.log({"loss": step}, step)
    return logger


def test_a_log_that_is_cut_and_written_again_is_as_if_it_had_not_been(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics.time, "time", lambda: 0.0)
    for case in itertools.product([1, 2, 10], range(5), range(3)):
        cut_and_write_again(tmp_path / "_".join(map(str, case)), *case)


def cut_and_write_again(tmp_path, max_lines, kept, after):
    write(tmp_path / "whole", range(1, 8), max_lines).finish()
    parts = tmp_path / "parts"
    first = write(parts, range(1, kept + 1), max_lines)
    mark = first.mark()
    for step in range(kept + 1, kept + 1 + after):
        first.log({"loss": -1}, step)
    first.finish()
    resumed = JSONLLogger(parts, max_lines=max_lines)
    with resumed.path.open("a") as file:
        file.write('{"st')  # of a line that was being written
    resumed.cut(mark, kept)
    for step in range(kept + 1, 8):
        resumed.log({"loss": step}, step)
    resumed.sync()
    resumed.finish()
    files = [{path.name: path.read_text() for path in folder.iterdir()} for folder in (parts, tmp_path / "whole")]
    assert files[0] == files[1]


def test_another_log_is_not_cut(tmp_path, caplog):
    """As after a resume with another folder: its lines are of step 5 and earlier ones."""
    logger = write(tmp_path, [1, 2, 7], 10)
    logger.cut(0, 5)
    assert re.search("other lines .*at step 5", caplog.text)
    logger.cut(10**6, 5)
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2, 7]


def test_several_loggers_are_each_cut_at_their_mark(tmp_path):
    parts = [JSONLLogger(tmp_path / "a"), Recorder(), JSONLLogger(tmp_path / "b")]
    both = CompositeLogger(parts)
    parts[2].log({}, 0)
    mark = both.mark()
    both.log({}, 1)
    both.sync()
    both.cut(mark, 0)
    both.finish()
    assert mark[:2] == [0, None]
    assert [len(lines(part.path)) for part in (parts[0], parts[2])] == [0, 1]


@pytest.mark.parametrize(
    ("call", "error", "remedy"),
    [
        (lambda logger: logger.log({}, -1), ConfigError, r"step .-1. must be a whole number, at least 0"),
        (lambda logger: logger.log(3, {"loss": 1}), ConfigError, "the call is log.metrics, step."),
        (lambda logger: logger.log({"loss": [1]}, 0), ConfigTypeError, "the metric loss is a list"),
        (lambda logger: logger.log({"loss": np.zeros(2)}, 0), ConfigTypeError, "such as its mean"),
    ],
)
def test_what_is_no_metric_is_an_error(tmp_path, call, error, remedy):
    with pytest.raises(error, match=remedy):
        call(JSONLLogger(tmp_path))


def test_statistics_of_a_file(tmp_path, caplog):
    """1, 2 and 6 have mean 3 and population variance (4 + 1 + 9) / 3."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"loss": 1}\n{"los\n{"loss": 2}\n{"other": 5}\n{"loss": null}\n{"loss": 6}\n')
    with caplog.at_level(logging.WARNING):
        found = compute_stats_from_jsonl(path, "loss")
    assert found == {"mean": 3.0, "min": 1.0, "max": 6.0, "std": pytest.approx(math.sqrt(14 / 3))}
    assert "1 lines that were not written whole" in caplog.text
    assert compute_stats_from_jsonl(path, "none") == {"mean": 0.0, "min": 0.0, "max": 0.0, "std": 0.0}
    with pytest.raises(DataError, match="JSONLLogger"):
        compute_stats_from_jsonl(tmp_path / "nothing", "loss")


class Recorder:
    def __init__(self, fails=False):
        self.fails, self.logged, self.finished = fails, [], 0

    def log(self, metrics, step):
        if self.fails:
            raise OSError("disk full")
        self.logged.append((step, metrics))

    def finish(self):
        self.finished += 1
        if self.fails:
            raise OSError("disk full")


def test_one_logger_that_fails_does_not_keep_others_from_logging(caplog):
    recorder = Recorder()
    both = CompositeLogger([Recorder(fails=True), recorder])
    both.log({"loss": 1.0}, 3)
    both.finish()
    assert (recorder.logged, recorder.finished) == ([(3, {"loss": 1.0})], 1)
    assert "Recorder failed at step 3" in caplog.text


def test_a_metrics_logger_logs_what_the_trainer_does():
    recorder = Recorder()
    training_logger = as_training_logger(recorder)
    training_logger.log(3, {"train/loss": 1.0})
    training_logger.close()
    assert (recorder.logged, recorder.finished) == ([(3, {"train/loss": 1.0})], 1)
    with pytest.raises(ConfigTypeError, match="method log and finish"):
        as_training_logger([])


def test_wandb_gets_the_settings_and_the_metrics(monkeypatch):
    made = []

    class Run:
        def __init__(self, **settings):
            made.append(settings)

        def log(self, step, stats):
            made.append((step, stats))

        def close(self):
            made.append("closed")

    monkeypatch.setattr(metrics, "WandbRun", Run)
    logger = metrics.WandbLogger("p", entity="e", tags=["t"])
    logger.log({"loss": np.float64(1), "step": 0}, 2)
    logger.finish()
    assert made == [
        {"init_kwargs": {"entity": "e"}, "project": "p", "name": None, "tags": ["t"]},
        (2, {"loss": 1.0}),
        "closed",
    ]
