"""A run of MaxEnt-GRPO whose coefficients are controlled."""

from maxent_batches import GROUP_SIZE, episodes
from training_samples import cpu_config, tiny_model

from ludic.training import CheckpointConfig, FrozenModel, Trainer
from ludic.training.coefficients import Coefficient
from ludic.training.controllers import EntropyController, KLController, MetaController
from ludic.training.presets import make_maxent_grpo
from ludic.training.types import SAWBatch

KINDS = ("laws", "analytic", "truncated_backprop")


class Batches:
    """Another batch at each call; the position is its state. `seed`: of this rank's samples."""

    def __init__(self, seed=0):
        self.position, self.seed = 0, seed

    async def next_batch(self):
        items = episodes((1,) * 8, seed=1000 * self.seed + self.position)
        self.position += 1
        return SAWBatch(items, {"target_rollouts": len(items)})

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def controllers_of(kind, tau, beta):
    if kind == "laws":
        return [KLController(beta, target=0.01, horizon=5), EntropyController(tau, target=1.2, lr=0.3, warmup_steps=0)]
    settings = {"method": kind, "lr": 0.05, "optimizer": "adam", "truncation_steps": 2, "use_hessian": True}
    return [MetaController(tau, beta, entropy_target=1.2, kl_target=0.01, **settings)]


def controlled_trainer(kind, folder=None, *, source=None, model_seed=0, config=None, train_logger=None, resume_from=None):
    """Each step is two optimizer steps; the reference is another model, so that the KL is not 0."""
    tau, beta = Coefficient(0.3), Coefficient(0.1)
    cfg = cpu_config(**{"max_seq_len": 120, "micro_token_budget": 200, "minibatches_per_batch": 2, "lr": 1e-2, **(config or {})})
    return Trainer(
        model=tiny_model(seed=model_seed),
        algo=make_maxent_grpo(group_size=GROUP_SIZE, tau=tau, beta=beta),
        batch_source=Batches() if source is None else source,
        cfg=cfg,
        reference=FrozenModel(tiny_model(seed=1), cfg),
        controllers=controllers_of(kind, tau, beta),
        checkpoint_config=None if folder is None else CheckpointConfig(folder, every_n_steps=1, max_to_keep=9),
        total_training_steps=9,
        train_logger=train_logger,
        resume_from=resume_from,
    )
