from ludic.training.backend.protocol import (
    BackendBase as BackendBase,
    BackwardResult as BackwardResult,
    ForwardPasses as ForwardPasses,
    ImmediateTrainFuture as ImmediateTrainFuture,
    MicroBatches as MicroBatches,
    TrainFuture as TrainFuture,
    TrainingBackend as TrainingBackend,
    wait_all as wait_all,
)
from ludic.training.backend.serial_worker import SerialWorker as SerialWorker
from ludic.training.backend.torch import TorchBackend as TorchBackend, build_optimizer as build_optimizer
