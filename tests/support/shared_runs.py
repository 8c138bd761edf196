"""Runs that several ranks train on shared batches, and one process too, for comparison."""

import torch
from preference_samples import reward_model, rm_config, sorted_pairs
from training_samples import cpu_config, sorting_items, tiny_model

from ludic.training import (
    CheckpointConfig,
    Reducer,
    RLAlgorithm,
    RMTrainer,
    Trainer,
    make_bradley_terry,
    make_sft,
)
from ludic.training.batching.epochs import ItemBatchSource
from ludic.training.batching.pair_batches import preference_batches
from ludic.training.batching.source import BatchSourceBase
from ludic.training.credit_assignment import ConstantCredit
from ludic.training.loss import CISPOLoss
from ludic.training.loss.correction import TruncatedImportanceSampling
from ludic.training.types import SAWBatch

REDUCERS = {
    "tokens": Reducer("sum", "completion_length"),
    "right": Reducer("count_true", "total_reward", normalize_by="rollouts"),
}


class PromptSource(BatchSourceBase):
    """9 new samples a batch, the same for the same position. Notes which it has given."""

    shards_across_ranks = False

    def __init__(self):
        self.position, self.given, self.saved = 0, [], 0

    async def next_batch(self):
        self.position += 1
        self.given.append(self.position)
        return SAWBatch(sorting_items(9, seed=self.position), {"target_rollouts": 9, "played_rollouts": 9})

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]

    async def checkpoint_saved(self):
        self.saved += 1


class Descent:
    def initialize_optimizer(self):
        return torch.optim.SGD([p for p in self.model.parameters() if p.requires_grad], lr=0.1)


class DescentTrainer(Descent, Trainer):
    pass


class DescentRMTrainer(Descent, RMTrainer):
    pass


def policy_trainer(folder, wrap, source=None, **options):
    """Two optimizer steps a training step and a correction, so that log-probabilities at the start
    of the step are exchanged; samples without weight are skipped."""
    return DescentTrainer(
        model=tiny_model(),
        algo=RLAlgorithm("cispo", ConstantCredit(1.0), CISPOLoss(), correction=TruncatedImportanceSampling()),
        batch_source=wrap(PromptSource() if source is None else source),
        cfg=cpu_config(
            micro_token_budget=60, max_grad_norm=None, minibatches_per_batch=2, epochs_per_batch=2, skip_zero_weight=True
        ),
        reducers=REDUCERS,
        checkpoint_config=CheckpointConfig(folder, every_n_steps=5, max_to_keep=9),
        **options,
    )


def sft_trainer(folder, wrap, **options):
    source = ItemBatchSource(sorting_items(23, seed=2), batch_size=5)
    return DescentTrainer(
        model=tiny_model(),
        algo=make_sft(),
        batch_source=wrap(source),
        cfg=cpu_config(micro_token_budget=60, max_grad_norm=None, packing="padding_free"),
        checkpoint_config=CheckpointConfig(folder, every_n_steps=5, max_to_keep=9),
        **options,
    )


def reward_trainer(folder, wrap, **options):
    return DescentRMTrainer(
        model=reward_model(),
        algo=make_bradley_terry(beta=1.5, label_smoothing=0.1, lambda_regularization=0.1),
        batch_source=wrap(preference_batches(sorted_pairs(11, seed=3), batch_size=5)),
        cfg=rm_config(micro_token_budget=70, max_grad_norm=None),
        checkpoint_config=CheckpointConfig(folder, every_n_steps=5, max_to_keep=9),
        **options,
    )


TRAINERS = {"policy": policy_trainer, "sft": sft_trainer, "reward": reward_trainer}
