"""Loggers: they write statistics to the terminal, a file, a tracker, or several of these."""

from ludic.training.loggers.alias import AliasLogger
from ludic.training.loggers.base import TrainingLogger
from ludic.training.loggers.jsonl import JSONLLogger
from ludic.training.loggers.mlflow import MlflowLogger
from ludic.training.loggers.print import PrintLogger
from ludic.training.loggers.rich_live import RichLiveLogger
from ludic.training.loggers.tee import TeeLogger
from ludic.training.loggers.tensorboard import TensorboardLogger
from ludic.training.loggers.trackio import TrackioLogger
from ludic.training.loggers.wandb import WandbLogger

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
