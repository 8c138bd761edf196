from ludic.rollouts.training.agent_integration import (
    agent_rollout_to_sample as agent_rollout_to_sample,
    generate_rollout_batch as generate_rollout_batch,
    trajectory_to_sample as trajectory_to_sample,
)
from ludic.rollouts.training.backends.fsdp import FSDPConfig as FSDPConfig, FSDPTrainingBackend as FSDPTrainingBackend
from ludic.rollouts.training.backends.protocol import TrainingBackend as TrainingBackend
from ludic.rollouts.training.backends.pytorch import PyTorchTrainingBackend as PyTorchTrainingBackend
from ludic.rollouts.training.backends.pytorch_factory import create_pytorch_backend as create_pytorch_backend
from ludic.rollouts.training.datasets.data_buffer import DataBuffer as DataBuffer
from ludic.rollouts.training.datasets.dataset_loaders import load_sft_dataset as load_sft_dataset
from ludic.rollouts.training.loops.rl_loop import run_rl_training as run_rl_training
from ludic.rollouts.training.loops.sft_loop import run_sft_training as run_sft_training
from ludic.rollouts.training.metrics import JSONLLogger as JSONLLogger, MetricsLogger as MetricsLogger
from ludic.rollouts.training.rollout_gen.async_rollout_manager import (
    AsyncRolloutManager as AsyncRolloutManager,
    RolloutAborted as RolloutAborted,
)
from ludic.rollouts.training.rollout_gen.rollout_generation import generate_rollout_batches as generate_rollout_batches
from ludic.rollouts.training.types import (
    ImmediateTrainFuture as ImmediateTrainFuture,
    RLTrainingConfig as RLTrainingConfig,
    RolloutBatch as RolloutBatch,
    RolloutConfig as RolloutConfig,
    Sample as Sample,
    SampleStatus as SampleStatus,
    SFTTrainingConfig as SFTTrainingConfig,
    TrainFuture as TrainFuture,
)
from ludic.training.rollouts.group_filters import (
    check_any_success as check_any_success,
    check_min_reward as check_min_reward,
    check_quality_and_diversity as check_quality_and_diversity,
    check_reasonable_length as check_reasonable_length,
    check_response_diversity as check_response_diversity,
    check_reward_nonzero_std as check_reward_nonzero_std,
    make_length_filter as make_length_filter,
    make_threshold_filter as make_threshold_filter,
)
