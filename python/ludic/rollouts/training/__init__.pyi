from ludic.rollouts.training.types import (
    RLTrainingConfig as RLTrainingConfig,
    RolloutBatch as RolloutBatch,
    RolloutConfig as RolloutConfig,
    Sample as Sample,
    SampleStatus as SampleStatus,
    SFTTrainingConfig as SFTTrainingConfig,
    TrainFuture as TrainFuture,
)
