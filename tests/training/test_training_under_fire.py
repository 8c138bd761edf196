"""Training continues when three in ten episodes fail: the others are trained on, and every failure
is in the statistics."""

import pytest
import torch
from playing import FOR_RL, Counting, play, protocol, tiny_model, tokenizer
from training_samples import cpu_config

from ludic.distributed.publisher import LocalPublisher
from ludic.inference import LocalChatClient
from ludic.training import (
    EnvSpec,
    GRPORequestStrategy,
    ProtocolSpec,
    RolloutBatchSource,
    RolloutEngine,
    RolloutRequest,
    Trainer,
    make_grpo,
)

GROUPS, MEMBERS, STEPS = 6, 4, 3


class SometimesFailing(Counting):
    """Raises, or returns a reward of NaN, if told to; otherwise rewards the answer, so that there
    is something to learn."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def env_step(self, action):
        if self.fault == "raise":
            raise OSError("gone")
        outcome = super().env_step(action)
        outcome.reward = float("nan") if self.fault == "nan" else float(len(action) % 2)
        return outcome


class Requests:
    """Groups 0 and 3 of each batch have two failing members each: 4 of 24 episodes fail, and 8 are
    unusable."""

    def __call__(self):
        requests = []
        for group in range(GROUPS):
            base = RolloutRequest(EnvSpec("failing", {"fault": None}), ProtocolSpec("single"), inference=FOR_RL)
            members = GRPORequestStrategy(MEMBERS).expand([base])
            if group % 3 == 0:
                members[1].env = EnvSpec("failing", {"fault": "raise"})
                members[2].env = EnvSpec("failing", {"fault": "nan"})
            requests += members
        return requests


@pytest.mark.parametrize("cancel_siblings", [True, False])
def test_training_continues_and_the_statistics_have_every_failure(cancel_siblings):
    torch.manual_seed(0)
    model = tiny_model()
    client = LocalChatClient(model, tokenizer())
    engine = RolloutEngine(
        env_registry={"failing": SometimesFailing},
        protocol_registry={"single": lambda: protocol(client, reject_incomplete_completions=False)},
        max_retries=0,
        cancel_siblings=cancel_siblings,
    )
    algorithm = make_grpo(group_size=MEMBERS)
    trainer = Trainer(
        model=model,
        algo=algorithm,
        batch_source=RolloutBatchSource(engine=engine, request_fn=Requests(), algorithm=algorithm, concurrency=GROUPS * MEMBERS),
        publisher=LocalPublisher(client),
        cfg=cpu_config(),
    )
    logged = []
    trainer.train_sync(STEPS, log_fn=logged.append)
    assert len(logged) == STEPS
    for stats in logged:
        assert stats["train/target_rollouts"] == GROUPS * MEMBERS
        assert stats["train/played_rollouts"] == (GROUPS - 2) * MEMBERS
        assert stats["train/num_dropped_groups"] == 2
        if cancel_siblings:
            assert 2 <= stats["train/num_failed_episodes"] <= 4
        else:
            assert (stats["train/num_failed_episodes"], stats["train/num_cancelled_episodes"]) == (4, 0)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert play(client.get_policy_version()) == STEPS
