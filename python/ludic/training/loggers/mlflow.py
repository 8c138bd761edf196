"""Logs to MLflow: a local database, or a tracking server."""

from __future__ import annotations

import importlib
import os
import re
import time
import warnings
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from ludic.errors import MissingExtraError
from ludic.training.loggers.base import plain_values

DEFAULT_EXPERIMENT = "Ludic"
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


class MlflowLogger:
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
        try:
            self._mlflow = importlib.import_module("mlflow")
        except ImportError as error:
            raise MissingExtraError.for_extra("mlflow", "mlflow") from error
        self.tracking_uri, self.run_id = tracking_uri, run_id
        self.experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or DEFAULT_EXPERIMENT
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
            params = [self._mlflow.entities.Param(key, value) for key, value in flatten(self._config).items()]
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

    def __enter__(self) -> MlflowLogger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as text by path: `{"trainer": {"lr": 0.1}}` is `{"trainer.lr": "0.1"}`."""
    flat: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[NOT_IN_NAMES.sub("_", f"{prefix}{key}")] = str(value)[:LONGEST_PARAM]
    return flat
