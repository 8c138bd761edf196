"""What loggers display and write, and that a failing logger does not stop the run."""

import io
import json
import sys
import types

import pytest
from rich.console import Console

from ludic.errors import MissingExtraError
from ludic.training.loggers import JSONLLogger, PrintLogger, RichLiveLogger, TeeLogger, WandbLogger
from ludic.training.loggers.base import Percent
from ludic.training.loggers.rich_live import sparkline

STATS = {"train/loss": 0.12345, "train/avg_total_reward": 0.5, "eval/accuracy": 0.75, "eval/step": 4.0, "perf/step_s": 0.25}


# --- print


def test_print_sorts_the_keys_and_wraps_long_lines(capsys):
    PrintLogger(max_items_per_line=2, precision=2).log(3, {"b": 2.0, "a": 1.0, "c": 7})
    assert capsys.readouterr().out == "[trainer] step=3 a=1.00 b=2.00\n          c=7\n"


def test_print_keeps_the_order_of_explicit_keys_and_finds_them_with_any_prefix(capsys):
    PrintLogger(prefix="[x]", keys=["avg_total_reward", "train/loss", "absent"], precision=3).log(1, STATS)
    assert capsys.readouterr().out == "[x] step=1 train/avg_total_reward=0.500 train/loss=0.123\n"


def test_a_key_that_is_named_twice_is_shown_once(capsys):
    """Regression test: the dashboard had a row for `entropy` and one for `train/entropy`."""
    PrintLogger(prefix="[x]", keys=["train/loss", "loss", "train/loss"], precision=3).log(1, STATS)
    assert capsys.readouterr().out == "[x] step=1 train/loss=0.123\n"


def test_print_without_statistics_prints_the_step(capsys):
    PrintLogger().log(2, {})
    assert capsys.readouterr().out == "[trainer] step=2\n"


# --- rich


def render(logger, step=7, stats=STATS):
    console = Console(width=100, file=io.StringIO(), color_system=None)
    console.print(logger.render(step, stats))
    return console.file.getvalue()


def test_the_dashboard_has_three_columns_with_steps_and_a_sparkline_panel():
    text = render(RichLiveLogger())
    title, first = text.splitlines()[:2]
    assert title.index("train · step 7") < title.index("eval · step 4") < title.index("perf")
    assert first.index("loss") < first.index("accuracy") < first.index("step_s")
    assert "0.1235" in first  # the value, to four decimals
    assert "avg_total_reward" in text.splitlines()[-3]
    assert "waiting for the first value" in text


def test_the_dashboard_names_the_run_and_the_last_step():
    text = render(RichLiveLogger(run_name="mine[1]", last_step=60))
    assert "train · step 7 of 60" in text
    assert "mine[1] · avg_total_reward" in text
    assert "eval · step 4 of" not in text


def test_the_dashboard_hides_step_counters_and_filters_with_or_without_prefix():
    text = render(RichLiveLogger(keys=["loss", "eval/accuracy"]), stats={**STATS, "train/step": 7.0})
    assert "accuracy" in text
    assert "step_s" not in text
    assert "nothing yet" in text  # the perf column
    assert not any(line.strip("│ ").startswith("step ") for line in text.splitlines())


def test_the_sparkline_shows_its_key_with_or_without_prefix_over_its_window():
    console = Console(file=io.StringIO(), color_system=None, width=100)
    with RichLiveLogger(spark_key="avg_total_reward", history=3, spark_window=2, console=console) as logger:
        for step, reward in enumerate([0.0, 0.25, 0.5, 1.0]):
            logger.log(step, {"train/avg_total_reward": reward})
        assert list(logger.history_vals) == [0.25, 0.5, 1.0]
        logger.log(5, {"avg_total_reward": 0.75})
        logger.log(6, {"avg_total_reward": float("nan"), "train/loss": 1.0})
        assert list(logger.history_vals) == [0.5, 1.0, 0.75]
        text = render(logger)
    assert "█▁  0.7500" in text  # the window of two values: 1.0 and 0.75
    assert "low 0.7500   high 1   last 2 of 3 values" in text


def test_a_sparkline_spans_the_range_of_its_values():
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([2.0, 2.0]) == "▄▄"


def test_the_first_log_starts_the_display_and_close_ends_it():
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    logger = RichLiveLogger(console=console)
    logger.log(1, STATS)
    assert "train · step 1" in console.file.getvalue()
    logger.close()
    logger.close()


def test_a_live_display_of_the_caller_is_left_running():
    from rich.live import Live

    console = Console(file=io.StringIO(), width=80)
    with Live(console=console, auto_refresh=False) as live:
        with RichLiveLogger(live=live) as logger:
            logger.log(1, STATS)
        assert live.is_started


def test_a_narrow_terminal_stacks_the_panels_and_shows_full_names():
    logger = RichLiveLogger(console=Console(width=50, file=io.StringIO(), color_system=None))
    logger.console.print(logger.render(7, {"train/avg_completion_length": 5.0, "eval/greedy_accuracy": 0.5, "perf/step_s": 1.5}))
    text = logger.console.file.getvalue()
    for name in ("avg_completion_length", "greedy_accuracy", "step_s"):
        assert name in text
    assert "…" not in text
    assert max(map(len, text.splitlines())) == 50


def test_training_and_evaluation_do_not_overwrite_each_others_numbers():
    console = Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)
    with RichLiveLogger(console=console) as logger:
        logger.log(3, {"train/loss": 0.25, "perf/step_s": 1.5})
        logger.log(4, {"eval/accuracy": 0.75, "eval/step": 4.0})
        evaluated = console.file.getvalue().rpartition("train · step 3")[2]
        assert {"0.2500", "1.5000", "0.7500", "eval · step 4"} <= {word for word in EXPECTED if word in evaluated}
        logger.log(5, {"train/loss": 0.125, "perf/step_s": 2.5})
        trained = console.file.getvalue().rpartition("train · step 5")[2]
        assert {"0.1250", "2.5000", "0.7500", "eval · step 4"} <= {word for word in EXPECTED if word in trained}
    assert "nothing yet" not in evaluated + trained


EXPECTED = {"0.2500", "1.5000", "0.7500", "eval · step 4", "0.1250", "2.5000"}


def test_progress_bars_of_transformers_are_off_while_the_dashboard_runs():
    from transformers.utils import logging as bars

    was = bars.is_progress_bar_enabled()
    bars.enable_progress_bar()
    try:
        with RichLiveLogger(console=Console(file=io.StringIO(), force_terminal=True, width=80)):
            assert not bars.is_progress_bar_enabled()
        assert bars.is_progress_bar_enabled()
        bars.disable_progress_bar()
        with RichLiveLogger(console=Console(file=io.StringIO(), width=80)):
            pass
        assert not bars.is_progress_bar_enabled()  # they were off before, and stay off
    finally:
        (bars.enable_progress_bar if was else bars.disable_progress_bar)()


def test_percentages_are_displayed_in_percent_and_written_as_fractions(capsys, tmp_path):
    stats = {"train/cut_rate": Percent(0.125)}
    PrintLogger(precision=3).log(1, stats)
    assert capsys.readouterr().out == "[trainer] step=1 train/cut_rate=12.5%\n"
    assert "12.50%" in render(RichLiveLogger(precision=4), stats=stats)
    with JSONLLogger(tmp_path / "metrics.jsonl") as logger:
        logger.log(1, stats)
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "train/cut_rate": 0.125}


def test_numbers_are_formatted_for_reading():
    logger = RichLiveLogger(precision=4)
    numbers = [0.5, 1234567.0, 1.2e-5, 0.0, float("inf"), 12345.678, 3]
    assert [logger._number(number) for number in numbers] == [
        "0.5000",
        "1,234,567",
        "1.20e-05",
        "0.0000",
        "inf",
        "12,345.6780",
        "3",
    ]


# --- jsonl


def test_jsonl_appends_one_object_per_line_and_null_for_values_that_are_not_finite(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    with JSONLLogger(path) as logger:
        logger.log(1, {"train/loss": 0.5, "train/x": float("nan")})
        assert path.read_text().count("\n") == 1  # flushed at once
    with JSONLLogger(path) as logger:
        logger.log(2, {"train/loss": 0.25})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"step": 1, "train/loss": 0.5, "train/x": None}, {"step": 2, "train/loss": 0.25}]


# --- tee


class Collecting:
    def __init__(self):
        self.logged, self.entered, self.left = [], False, False

    def log(self, step, stats):
        self.logged.append((step, stats))

    def __enter__(self):
        self.entered = True
        return self

    def __exit__(self, *_):
        self.left = True


class Failing:
    def log(self, step, stats):
        raise ConnectionError("down")


def test_tee_skips_none_and_a_failing_logger_does_not_stop_the_others(caplog):
    last = Collecting()
    tee = TeeLogger(None, Failing(), last)
    assert len(tee.loggers) == 2
    tee.log(1, STATS)
    assert last.logged == [(1, STATS)]
    assert "Failing failed at step 1" in caplog.text


def test_tee_enters_and_exits_its_context_manager_loggers():
    inner = Collecting()
    with TeeLogger(inner, Failing()) as tee:
        assert inner.entered
        assert isinstance(tee, TeeLogger)
    assert inner.left


# --- wandb


@pytest.fixture
def wandb(monkeypatch):
    """A fake of the used part of wandb that records its calls."""
    module = types.ModuleType("wandb")
    module.calls = []
    module.init = lambda **kwargs: module.calls.append(("init", kwargs)) or object()
    module.log = lambda stats, step: module.calls.append(("log", stats, step))
    module.finish = lambda: module.calls.append(("finish",))
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return module


def test_wandb_starts_with_the_first_log_and_finishes(wandb):
    with WandbLogger(name="a", tags=("x",), config={"lr": 1}) as logger:
        assert wandb.calls == []
        logger.log(3, STATS)
        logger.log(4, STATS)
    assert wandb.calls == [
        ("init", {"name": "a", "tags": ["x"], "config": {"lr": 1}, "project": "Ludic"}),
        ("log", STATS, 3),
        ("log", STATS, 4),
        ("finish",),
    ]


class OpenRun:
    """A run that the user opened."""

    def __init__(self):
        self.logged, self.finished = [], False

    def log(self, stats, step):
        self.logged.append((step, stats))

    def finish(self):
        self.finished = True


def test_wandb_logs_to_an_open_run_and_leaves_it_open(wandb, caplog):
    wandb.run = OpenRun()
    with WandbLogger() as logger:
        logger.log(3, {"train/loss": 0.5, "train/cut_rate": Percent(0.5)})
    assert wandb.calls == []  # neither opened nor finished by the logger
    assert wandb.run.logged == [(3, {"train/loss": 0.5, "train/cut_rate": 0.5})]
    assert type(wandb.run.logged[0][1]["train/cut_rate"]) is float
    assert not wandb.run.finished
    assert not caplog.text
    WandbLogger(name="mine", project="p").log(4, {})
    assert "a run is open already" in caplog.text


def test_wandb_can_open_its_own_run_beside_an_open_one_and_finishes_only_its_own(wandb):
    wandb.run, own = OpenRun(), OpenRun()
    wandb.init = lambda **kwargs: own
    with WandbLogger(init_kwargs={"reinit": "create_new"}) as logger:
        logger.log(3, STATS)
    assert (own.logged, own.finished) == ([(3, STATS)], True)
    assert (wandb.run.logged, wandb.run.finished) == ([], False)


def test_wandb_leaves_a_run_open_that_init_gave_back(wandb):
    wandb.run = OpenRun()
    wandb.init = lambda **kwargs: wandb.run  # as reinit=False and "return_previous" do
    with WandbLogger(init_kwargs={"reinit": False}) as logger:
        logger.log(3, STATS)
    assert (wandb.run.logged, wandb.run.finished) == ([(3, STATS)], False)


def test_wandb_arguments_override_init_kwargs_and_the_environment_overrides_the_default_project(wandb, monkeypatch):
    assert WandbLogger(init_kwargs={"project": "a", "reinit": False}, project="b").init_kwargs == {
        "project": "b",
        "reinit": False,
    }
    monkeypatch.setenv("WANDB_PROJECT", "c")
    assert "project" not in WandbLogger().init_kwargs


def test_without_wandb_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match=r"ludic-rl\[wandb\]"):
        WandbLogger()


def test_a_record_after_a_torn_line_starts_on_a_new_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "train/lo')
    with JSONLLogger(path) as logger:
        logger.log(2, {"train/loss": 0.5})
    assert path.read_text().splitlines() == ['{"step": 1}', '{"step": 2, "train/lo', '{"step": 2, "train/loss": 0.5}']
