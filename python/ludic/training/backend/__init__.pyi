from ludic.event_loop import ImmediateTrainFuture as ImmediateTrainFuture, TrainFuture as TrainFuture, wait_all as wait_all
from ludic.training.backend.protocol import (
    BackendBase as BackendBase,
    BackwardResult as BackwardResult,
    ForwardPasses as ForwardPasses,
    MicroBatches as MicroBatches,
    TrainingBackend as TrainingBackend,
)
from ludic.training.backend.serial_worker import SerialWorker as SerialWorker
from ludic.training.backend.torch import TorchBackend as TorchBackend, build_optimizer as build_optimizer
