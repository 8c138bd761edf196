"""What a run calls while it trains, and ready-made callbacks."""

from ludic.training.callbacks.base import Callback, TrainingEvent
from ludic.training.callbacks.by_metric import KeepBest, OffPolicyGuard, StopOnMetric
from ludic.training.callbacks.completion_table import CompletionTable
from ludic.training.callbacks.hub import PushToHub

__all__ = ["Callback", "CompletionTable", "KeepBest", "OffPolicyGuard", "PushToHub", "StopOnMetric", "TrainingEvent"]
