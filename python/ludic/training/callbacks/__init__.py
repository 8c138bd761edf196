"""What a run calls while it trains, and ready-made callbacks."""

from ludic.training.callbacks.completion_table import CompletionTable
from ludic.training.callbacks.hub import PushToHub
from ludic.training.callbacks.keep_best import KeepBest
from ludic.training.callbacks.protocol import Callback, TrainingEvent
from ludic.training.callbacks.stop_on_metric import StopOnMetric

__all__ = ["Callback", "CompletionTable", "KeepBest", "PushToHub", "StopOnMetric", "TrainingEvent"]
