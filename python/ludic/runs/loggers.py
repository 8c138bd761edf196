"""Where the statistics of a run go: its screen, a live dashboard on a terminal and plain lines
elsewhere; metrics.jsonl; and the trackers that `report_to` names. `run_header` says where the code
and the recipe come from."""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from ludic.errors import ConfigError, check_value
from ludic.files.atomic import write_text
from ludic.recipes.schema import Recipe
from ludic.runs.directory import RunDirectory
from ludic.training.loggers import (
    AliasLogger,
    JSONLLogger,
    MlflowLogger,
    PrintLogger,
    RichLiveLogger,
    TeeLogger,
    TensorboardLogger,
    TrackioLogger,
    TrainingLogger,
    WandbLogger,
)

PROGRESS_KEYS = ["perf/tokens_per_s", "perf/time_left_s"]
"""Shown of each phase, in plain lines too."""
DASHBOARD_KEYS = [
    *("lr", "nll_mean", "entropy", "kl_actor_policy", "reward_std", "frac_reward_zero_std", "avg_completion_length"),
    *("min_completion_length", "max_completion_length", "completion_truncated_rate", "zero_weight_skipped"),
    *("rollout_s", "batching_s", "forward_backward_s", "optimizer_s", "publish_s", "step_s", "real_tokens", "padded_tokens"),
]
MEASURED_KEYS = [
    *("eval/sampled_reward", "eval/greedy_accuracy", "eval/loss", "eval/perplexity", "eval/pairwise_accuracy"),
    *("eval/mean_margin", "eval/rewards/accuracies", "eval/rewards/margins", "eval/roc_auc", "eval/ece"),
]
"""The metrics of an evaluation that are shown, in addition to the facts of the task. metrics.jsonl
has all of them."""


class Screen:
    """Notes between phases, and a logger for each phase."""

    def __init__(self, console: Console, *, every: int) -> None:
        self.console = console
        self._every = every
        self._live: RichLiveLogger | None = None

    def note(self, text: str) -> None:
        """Print one line."""
        self.console.print(text, markup=False)

    def show_rates(self, rates: Mapping[str, float]) -> None:
        """Show earlier held-out rates on the dashboard until there are newer ones. Plain lines
        have printed them already."""
        if self._live is not None and rates:
            self._live.log(int(rates.get("eval/step", 0)), rates)

    @contextmanager
    def logger(
        self, title: str, *, keys: list[str], spark_key: str, last_step: int, run_name: str = ""
    ) -> Iterator[TrainingLogger]:
        """`keys` are shown in plain lines; the dashboard shows more, and draws `spark_key`."""
        keys = [*keys, *PROGRESS_KEYS]
        measured = list(dict.fromkeys([*MEASURED_KEYS, *(f"eval/{key.removeprefix('train/')}" for key in keys)]))
        if self.console.is_terminal:
            shown = [*keys, *measured, *DASHBOARD_KEYS]
            dashboard = RichLiveLogger(
                keys=shown, spark_key=spark_key, console=self.console, run_name=run_name, last_step=last_step
            )
            with dashboard as live:
                self._live = live
                try:
                    yield live
                finally:
                    self._live = None
        else:
            lines = PrintLogger(prefix=f"[{title}]", keys=[*keys, *measured], precision=3)
            yield ThinnedLogger(lines, self._every, last_step)


class ThinnedLogger:
    """Passes on every `every`-th step, the last step, and every evaluation."""

    def __init__(self, inner: TrainingLogger, every: int, last: int) -> None:
        self._inner, self._every, self._last = inner, every, last

    def log(self, step: int, stats: Mapping[str, Any]) -> None:
        if step == self._last or step % self._every == 0 or "eval/step" in stats:
            self._inner.log(step, stats)


Tracker = MlflowLogger | TensorboardLogger | TrackioLogger | WandbLogger
NONE = "none"
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrackerRun:
    """The run of an experiment tracker that the statistics of one phase go to."""

    recipe: Any
    directory: RunDirectory
    phase: str
    run_id: str
    is_resumed: bool
    """An earlier process has reported to it."""

    @property
    def name(self) -> str:
        """The folder's name; for the warm-up with the phase appended."""
        folder = self.directory.path.name
        return f"{folder}-warm-up" if self.phase == "warm_up" else folder

    @property
    def common(self) -> dict[str, Any]:
        return {"name": self.name, "group": self.directory.path.name, "config": asdict(self.recipe)}


def _make_mlflow(run: TrackerRun) -> Tracker:
    """Unless the user names a server, the data is in a database next to the runs."""
    place = None if os.environ.get("MLFLOW_TRACKING_URI") else f"sqlite:///{run.directory.path.resolve().parent / 'mlflow.db'}"
    known = run.directory.path / f"mlflow_run_{run.phase}"
    logger = MlflowLogger(
        tracking_uri=place,
        name=run.name,
        config=asdict(run.recipe),
        tags={"group": run.directory.path.name},
        run_id=known.read_text(encoding="utf-8").strip() if known.is_file() else None,
    )
    logger.start()
    write_text(known, f"{logger.run_id}\n")
    return logger


def _make_wandb(run: TrackerRun) -> Tracker:
    where = {"id": f"{run.run_id}-{run.phase}", "resume": "allow", "dir": str(run.directory.path)}
    own = getattr(run.recipe, "report_args", {})  # the other commands have none
    return WandbLogger(init_kwargs={**run.common, **own, **where})


TRACKERS: dict[str, Callable[[TrackerRun], Tracker]] = {
    "mlflow": _make_mlflow,
    "tensorboard": lambda run: TensorboardLogger(run.directory.path / "tensorboard" / run.phase),
    "trackio": lambda run: TrackioLogger(**run.common, resume="allow" if run.is_resumed else "never"),
    "wandb": _make_wandb,
}


def parse_trackers(report_to: Any) -> list[str]:
    """`report_to` as a list; it is a name, a list of names, null or `none`. Raises ConfigError
    for an unknown name."""
    listed = [report_to] if isinstance(report_to, str) else list(report_to or [])
    names = [str(name) for name in listed if name != NONE]
    for name in names:
        check_value("report_to", name, choices=(*TRACKERS, NONE))
    return list(dict.fromkeys(names))


def check_trackers(report_to: Any) -> None:
    """Raise ConfigError for an unknown tracker, MissingExtraError for one that is not installed."""
    makers: dict[str, Callable[[], Tracker]] = {
        "mlflow": MlflowLogger,
        "tensorboard": lambda: TensorboardLogger("."),
        "trackio": TrackioLogger,
        "wandb": WandbLogger,
    }
    for name in parse_trackers(report_to):
        makers[name]()


@contextmanager
def run_logger(
    recipe: Any, directory: RunDirectory, screen: Screen, phase: str, *, keys: list[str], spark_key: str, last_step: int
) -> Iterator[TrainingLogger]:
    """The logger of one phase. Every line of metrics.jsonl names the phase; a tracker gets a run
    for each phase, since the steps of each start at 1."""
    names = parse_trackers(recipe.report_to)
    with ExitStack() as opened:
        trackers = []
        if names:  # a resumed run continues the tracker's run of its id
            known = directory.path / "tracking_id"
            is_resumed = known.is_file()
            if not is_resumed:
                write_text(known, secrets.token_hex(8) + "\n")
            run = TrackerRun(recipe, directory, phase, known.read_text(encoding="utf-8").strip(), is_resumed)
            trackers = [_start_tracker(opened, name, run, screen) for name in names]
        written = opened.enter_context(JSONLLogger(directory.metrics))
        name = directory.path.name
        shown = opened.enter_context(screen.logger(phase, keys=keys, spark_key=spark_key, last_step=last_step, run_name=name))
        header: Mapping[str, Any] = {}
        if isinstance(recipe, Recipe) and recipe.report_header:
            named = os.environ.get("GRPO_RECIPE_USED") or os.environ.get("GRPO_RECIPE")
            header = run_header(None if named else str(directory.config))  # the settings as they were resolved
        for key, value in header.items():
            screen.note(f"{key}: {value}")
        outside = TeeLogger(PhaseLogger(written, phase, header), *trackers)
        aliased = AliasLogger(outside) if isinstance(recipe, Recipe) and recipe.report_aliases else outside
        yield TeeLogger(aliased, shown)


def _start_tracker(opened: ExitStack, name: str, run: TrackerRun, screen: Screen) -> Tracker:
    """Start a tracker before the first step, so that a missing login is found now. Whatever it
    raises becomes a ConfigError."""
    try:
        tracker = TRACKERS[name](run)
        tracker.start()
    except Exception as error:
        raise ConfigError(f"report_to: {name} cannot start ({type(error).__name__}: {error}); log in to it") from error
    opened.callback(_close, tracker, name)
    screen.note(f"Reporting to {name}: {_describe_place(tracker, run)}")
    return tracker


def _close(tracker: Tracker, name: str) -> None:
    """A service that is away when a run ends does not cost the trained model."""
    try:
        tracker.close()
    except Exception:
        logger.exception("report_to: %s did not end its run; what it has received stays there", name)


def _describe_place(tracker: Tracker, run: TrackerRun) -> str:
    """How to look at it."""
    if isinstance(tracker, TensorboardLogger):
        return f"tensorboard --logdir {tracker.log_dir.parent}"
    if isinstance(tracker, MlflowLogger) and tracker.tracking_uri is not None:
        return f"mlflow ui --backend-store-uri {tracker.tracking_uri}"
    return f"run {run.name}"


class PhaseLogger:
    """Adds the phase of the run, and its `header`, to every record of the `JSONLLogger` that it
    wraps."""

    def __init__(self, inner: Any, phase: str, header: Mapping[str, Any] | None = None) -> None:
        self._inner, self._added = inner, {"phase": phase, **(header or {})}

    def log(self, step: int, stats: Mapping[str, Any]) -> None:
        self._inner.log(step, {**self._added, **stats})

    def sync(self) -> None:
        self._inner.sync()


UNKNOWN = "unknown"
GIT_S = 10.0
"""The deadline of a question to git."""
_SHA, _DIRTY, _RECIPE = "run/git_sha", "run/git_dirty", "run/recipe_path"


def run_header(
    recipe_path: str | Path | None = None, *, folder: Path | None = None, environment: Mapping[str, str] | None = None
) -> dict[str, str | bool]:
    """`run/git_sha`, `run/git_dirty` and `run/recipe_path`.

    The commit is `MAXENT_GIT_SHA` of `environment` (this process's if None), else the commit of the
    repository of `folder` (the current one if None); `git_dirty` says whether files that git knows
    were changed since, and is only there if the commit comes from git. The recipe is `recipe_path`,
    else `GRPO_RECIPE_USED` or `GRPO_RECIPE`. An entry that is not known is `unknown`.
    """
    env = os.environ if environment is None else environment
    where, given = folder or Path.cwd(), env.get("MAXENT_GIT_SHA")
    commit = given or _ask_git(where, "rev-parse", "--short", "HEAD")
    header: dict[str, str | bool] = {_SHA: commit or UNKNOWN}
    changed = None if given or not commit else _ask_git(where, "status", "--porcelain", "--untracked-files=no")
    if changed is not None:
        header[_DIRTY] = bool(changed)
    header[_RECIPE] = str(recipe_path or env.get("GRPO_RECIPE_USED") or env.get("GRPO_RECIPE") or UNKNOWN)
    return header


def _ask_git(folder: Path, *arguments: str) -> str | None:
    """None if git is not there, or not a repository."""
    command = ["git", "-C", str(folder), "--no-optional-locks", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_S, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
