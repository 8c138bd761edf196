"""Loggers of experiment trackers: MLflow, TensorBoard, Trackio, and Weights & Biases."""

from __future__ import annotations

import logging
import os
import re
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ludic.errors import import_optional
from ludic.files.json_values import flatten_settings
from ludic.training.loggers.base import ClosingLogger, plain_values

logger = logging.getLogger(__name__)

DEFAULT_PROJECT = "Ludic"
"""The project of Trackio and of Weights & Biases, and the experiment of MLflow."""
NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_\-. :/]")
"""What MLflow refuses in the name of a metric; `_` stands for it."""
ENVIRONMENT = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""Variables of MLflow that are set unless they are. Its own values, 7 retries with growing pauses
and 120 s, halt a run for minutes at every logged step while the server is away."""
MOST_METRICS = 1000
"""Metrics in one call, at most."""
MOST_PARAMS = 100
"""Parameters in one call, at most."""
LONGEST_PARAM = 6000
"""Characters of a parameter's value, at most."""


def merge_arguments(init_kwargs: Mapping[str, Any] | None, config: Mapping[str, Any] | None, **named: Any) -> dict[str, Any]:
    """The arguments that start a run; named ones that are not None take precedence."""
    named["config"] = None if config is None else dict(config)
    return {**(init_kwargs or {}), **{key: value for key, value in named.items() if value is not None}}


class MlflowLogger(ClosingLogger):
    """Logs to a run of its own, which the first `log` starts; the active run of `mlflow` is left
    alone. Nothing is sent but to the tracking server: MLflow's telemetry is off unless
    `MLFLOW_DISABLE_TELEMETRY` is set. A server that is away delays a step by seconds:
    `MLFLOW_HTTP_REQUEST_MAX_RETRIES` is 2 and `MLFLOW_HTTP_REQUEST_TIMEOUT` 10 s unless they are
    set.

    >>> with MlflowLogger(name="first", tracking_uri="sqlite:///mlflow.db") as logger:
    ...     logger.log(1, {"train/loss": 0.5})
    """

    def __init__(
        self,
        *,
        tracking_uri: str | None = None,
        experiment: str | None = None,
        name: str | None = None,
        run_id: str | None = None,
        config: Mapping[str, Any] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Raises MissingExtraError without the package mlflow. `tracking_uri`: a database or a
        server. None means `MLFLOW_TRACKING_URI`, else MLflow's default, `mlflow.db` in the current
        folder. `experiment`: None for `MLFLOW_EXPERIMENT_NAME`, else `Ludic`. `run_id`: continue
        this run. `config` becomes the parameters of a new run, nested keys joined with dots."""
        for variable, value in ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
        self._mlflow = import_optional("mlflow", "mlflow")
        self.tracking_uri, self.run_id = tracking_uri, run_id
        self.experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or DEFAULT_PROJECT
        self._name, self._config, self._tags = name, dict(config or {}), dict(tags or {})
        self._client: Any = None

    def start(self) -> None:
        """Start the run, or continue `run_id`, if the first `log` has not done so."""
        if self._client is not None:
            return
        with warnings.catch_warnings():  # of its own use of SQLAlchemy
            warnings.simplefilter("ignore")
            client = self._mlflow.MlflowClient(tracking_uri=self.tracking_uri)
        if self.run_id is None:
            found = client.get_experiment_by_name(self.experiment)
            experiment = client.create_experiment(self.experiment) if found is None else found.experiment_id
            run_id = client.create_run(experiment, run_name=self._name, tags=self._tags).info.run_id
            texts = {NOT_IN_NAMES.sub("_", path): str(value)[:LONGEST_PARAM] for path, value in flatten_settings(self._config)}
            params = [self._mlflow.entities.Param(key, text) for key, text in texts.items()]
            for at in range(0, len(params), MOST_PARAMS):
                client.log_batch(run_id, params=params[at : at + MOST_PARAMS])
            self.run_id = str(run_id)
        else:
            client.update_run(self.run_id, status="RUNNING")
        self._client = client

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        self.start()
        now = int(time.time() * 1000)
        metrics = [
            self._mlflow.entities.Metric(NOT_IN_NAMES.sub("_", key), float(value), now, step)
            for key, value in plain_values(stats).items()
            if not isinstance(value, str)
        ]
        for at in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self.run_id, metrics=metrics[at : at + MOST_METRICS])

    def close(self) -> None:
        """End the run."""
        if self._client is not None:
            self._client.set_terminated(self.run_id)
            self._client = None


class TensorboardLogger(ClosingLogger):
    """Writes each statistic as a scalar to `log_dir`, for `tensorboard --logdir`. The first `log`
    creates the file; values are flushed within `flush_secs` seconds and at `close`.

    >>> with TensorboardLogger("runs/a/tensorboard") as logger:
    ...     logger.log(1, {"train/loss": 0.5})
    """

    def __init__(self, log_dir: str | Path, *, flush_secs: int = 10) -> None:
        """Raises MissingExtraError without the package tensorboard."""
        import_optional("tensorboard", "tensorboard")
        self.log_dir, self.flush_secs = Path(log_dir), flush_secs
        self._writer: Any = None

    def start(self) -> None:
        """Create the file, if the first `log` has not done so."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.log_dir), flush_secs=self.flush_secs)

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        self.start()
        for key, value in plain_values(stats).items():
            if not isinstance(value, str):
                self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class TrackioLogger(ClosingLogger):
    """Logs to a new run, which the first `log` starts. Without `space_id` and `server_url` the data
    stays on this machine; `trackio show` displays it.

    Named arguments take precedence over `init_kwargs`, the other arguments of `trackio.init`. The
    project is `Ludic` unless it is passed or `TRACKIO_PROJECT` is set.
    """

    def __init__(
        self,
        *,
        init_kwargs: Mapping[str, Any] | None = None,
        project: str | None = None,
        name: str | None = None,
        group: str | None = None,
        config: Mapping[str, Any] | None = None,
        space_id: str | None = None,
        server_url: str | None = None,
        resume: str | None = None,
    ) -> None:
        """Raises MissingExtraError without the package trackio. `resume`: whether to continue a run
        with this name: never (the default), allow or must."""
        self._trackio = import_optional("trackio", "trackio")
        own = {"space_id": space_id, "server_url": server_url, "resume": resume}
        explicit = merge_arguments(init_kwargs, project=project, name=name, group=group, config=config, **own)
        self.init_kwargs = {"project": os.environ.get("TRACKIO_PROJECT") or DEFAULT_PROJECT, **explicit}
        self._run: Any = None

    def start(self) -> None:
        """Start the run, if the first `log` has not done so."""
        if self._run is None:
            self._run = self._trackio.init(**self.init_kwargs)

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        self.start()
        self._run.log(plain_values(stats), step=step)

    def close(self) -> None:
        """End the run. All values are in the database afterwards."""
        if self._run is not None:
            self._run.finish()
            self._run = None


class WandbLogger(ClosingLogger):
    """Logs to the run that is open at the first `log` (`wandb.run`) and leaves it open. If no run
    is open, it starts a run, which `close` ends.

    The arguments are used for a run that it starts; named ones take precedence over `init_kwargs`.
    The project is `Ludic` unless it is passed or `WANDB_PROJECT` is set. With
    `init_kwargs={"reinit": ...}` it always calls `wandb.init`, and ends the run that this returns
    unless it is the one that was open.
    """

    def __init__(
        self,
        *,
        init_kwargs: Mapping[str, Any] | None = None,
        project: str | None = None,
        name: str | None = None,
        group: str | None = None,
        tags: Sequence[str] | None = None,
        notes: str | None = None,
        config: Mapping[str, Any] | None = None,
        dir: str | None = None,
        mode: str | None = None,
    ) -> None:
        self._wandb = import_optional("wandb", "wandb")
        own = {"tags": None if tags is None else list(tags), "notes": notes, "dir": dir, "mode": mode}
        self.init_kwargs = merge_arguments(init_kwargs, project=project, name=name, group=group, config=config, **own)
        if "project" not in self.init_kwargs and not os.environ.get("WANDB_PROJECT"):
            self.init_kwargs["project"] = DEFAULT_PROJECT
        self._run: Any = None
        self._owns_run = False

    def start(self) -> None:
        """Use the open run, or start one, if the first `log` has not done so."""
        if self._run is not None:
            return
        open_run = getattr(self._wandb, "run", None)
        if open_run is None or "reinit" in self.init_kwargs:
            self._run = self._wandb.init(**self.init_kwargs)
            self._owns_run = self._run is not open_run  # some values of `reinit` return the open run
            return
        self._run, self._owns_run = open_run, False
        if set(self.init_kwargs) - {"project"}:
            logger.warning("wandb: a run is open already and gets the values; %s have no effect on it", sorted(self.init_kwargs))

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        self.start()
        log = getattr(self._run, "log", self._wandb.log)  # the run's own method: another run may be started later
        log(plain_values(stats), step=step)

    def close(self) -> None:
        if self._run is not None and self._owns_run:
            getattr(self._run, "finish", self._wandb.finish)()
        self._run, self._owns_run = None, False
