"""A run of 8 steps that a test can kill: `python killed_run.py FOLDER SHARING ALGORITHM
[OPTIMIZER]`. It resumes from the latest checkpoint in FOLDER. When it ends, it writes the losses of
its own steps and a digest of the weights, and of the critic's. SHARING: `prefix_sharing`; not off,
samples share prompts. ALGORITHM: grpo, ppo (a value head), or ppo-model (a critic of its own)."""

import hashlib
import json
import random
import sys
from pathlib import Path

import torch
from training_samples import DrawingSource, cpu_config, tiny_model

from ludic.training import CheckpointConfig, Trainer, as_value_model, make_grpo, make_ppo

STEPS = 8


def main(folder, sharing, algorithm, optimizer="adamw"):
    torch.set_num_threads(1)
    random.seed(5)
    torch.manual_seed(5)
    model = tiny_model()
    trainer = Trainer(
        model=model,
        algo=make_grpo(group_size=4) if algorithm == "grpo" else make_ppo(lam=0.9),
        critic=as_value_model(tiny_model(seed=1)) if algorithm == "ppo-model" else None,
        batch_source=DrawingSource(share=sharing != "off"),
        cfg=cpu_config(minibatches_per_batch=2, prefix_sharing=sharing, optimizer=optimizer),
        checkpoint_config=CheckpointConfig(folder / "checkpoints", every_n_steps=1),
        resume_from=folder / "checkpoints" / latest["last_checkpoint"] if (latest := read_latest(folder)) else None,
    )
    while trainer.current_step < STEPS:
        stats = trainer.train_step_sync()
        assert (stats["perf/shared_tokens"] > 0) == (sharing != "off")
        print(json.dumps([trainer.current_step, stats["train/loss"]]), flush=True)
    digest = hashlib.sha256()
    critic = [] if trainer.critic is None else trainer.critic.backend.model.parameters()
    for parameter in (*model.parameters(), *critic):
        digest.update(parameter.detach().numpy().tobytes())
    print(json.dumps(digest.hexdigest()), flush=True)


def read_latest(folder):
    path = folder / "checkpoints" / "latest.json"
    return json.loads(path.read_text()) if path.exists() else None


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
