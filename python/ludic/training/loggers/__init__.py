"""Loggers: they write statistics to the terminal, a file, a tracker, or several of these."""

from ludic.training.loggers.base import TrainingLogger
from ludic.training.loggers.local import AliasLogger, JSONLLogger, PrintLogger, TeeLogger
from ludic.training.loggers.rich_live import RichLiveLogger
from ludic.training.loggers.trackers import MlflowLogger, TensorboardLogger, TrackioLogger, WandbLogger

__all__ = [
    "AliasLogger",
    "JSONLLogger",
    "MlflowLogger",
    "PrintLogger",
    "RichLiveLogger",
    "TeeLogger",
    "TensorboardLogger",
    "TrackioLogger",
    "TrainingLogger",
    "WandbLogger",
]
