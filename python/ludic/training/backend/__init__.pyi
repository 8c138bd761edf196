from ludic.training.backend.futures import TrainFuture as TrainFuture
from ludic.training.backend.protocol import (
    BackwardResult as BackwardResult,
    ForwardPasses as ForwardPasses,
    MicroBatches as MicroBatches,
    TrainingBackend as TrainingBackend,
)
from ludic.training.backend.torch import TorchBackend as TorchBackend, build_optimizer as build_optimizer
