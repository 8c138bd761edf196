"""Loggers: they write statistics to the terminal, a file, a tracker, or several of these."""

from ludic.training.loggers.base import TrainingLogger as TrainingLogger
from ludic.training.loggers.local import (
    AliasLogger as AliasLogger,
    JSONLLogger as JSONLLogger,
    PrintLogger as PrintLogger,
    TeeLogger as TeeLogger,
)
from ludic.training.loggers.rich_live import RichLiveLogger as RichLiveLogger
from ludic.training.loggers.trackers import (
    MlflowLogger as MlflowLogger,
    TensorboardLogger as TensorboardLogger,
    TrackioLogger as TrackioLogger,
    WandbLogger as WandbLogger,
)
