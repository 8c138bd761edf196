"""Supervised fine-tuning, rejection sampling, then reinforcement: one small model, one task, on a
CPU, with no download.

    python examples/sft_then_rl.py

The task is to sort five digits: `52914>` is answered by `12459`. The teacher of the demonstrations
is right in one of four. What each stage adds is measured on held-out problems, four sampled answers
to each:

1. supervised fine-tuning on the demonstrations (`ItemBatchSource`, `make_sft`): the model imitates
   the teacher, mistakes and all;
2. rejection sampling: it plays training problems, the right answers are kept (a JSONL file with
   token traces), and it is trained on the tokens that it sampled (`OfflineBatchSource`);
3. reinforcement with GRPO on the reward (`RolloutBatchSource`), from where that ended.
"""

import argparse
import asyncio
import random
import tempfile
from pathlib import Path

import torch

from ludic.agents import Agent
from ludic.context import FullDialog
from ludic.distributed.publisher import LocalPublisher
from ludic.inference import InferenceSpec, LocalChatClient, ReturnSpec, SamplingParams
from ludic.interaction import SingleAgentProtocol
from ludic.models.byte_tokenizer import make_byte_tokenizer
from ludic.parsers import ParseResult
from ludic.recipes.model import make_small_model
from ludic.recipes.schema import NetworkSection
from ludic.tasks import DigitSort
from ludic.training import (
    ConstantCredit,
    EnvSpec,
    GRPORequestStrategy,
    OfflineBatchSource,
    ProtocolSpec,
    RolloutBatchSource,
    RolloutEngine,
    RolloutRequest,
    Trainer,
    TrainerConfig,
    make_grpo,
    make_sft,
)
from ludic.training.batching.epochs import ItemBatchSource
from ludic.training.rollouts.log import append_rollouts
from ludic.training.rollouts.to_samples import sample_from_step
from ludic.training.samples.sft import SFTItems

TASK = DigitSort(digits=5, right=0.25, backwards=0.5)
NETWORK = NetworkSection(hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=384, max_positions=64)


class Player:
    """The model and everything it needs to answer problems."""

    def __init__(self) -> None:
        self.model, self.tokenizer = make_small_model(NETWORK), make_byte_tokenizer()
        self.client = LocalChatClient(self.model, self.tokenizer, max_batch_size=256)
        self.engine = RolloutEngine(env_registry={"sort": TASK.make_env}, protocol_registry={"answer": self.protocol})

    def protocol(self) -> SingleAgentProtocol:
        whole = lambda text: ParseResult(action=text, reward=0.0, obs=None)  # noqa: E731  the answer is the whole completion
        return SingleAgentProtocol(Agent(client=self.client, model="small", ctx=FullDialog(), parser=whole))

    def ask(self, problem, seed: int) -> RolloutRequest:
        sampling = SamplingParams(temperature=1.0, max_tokens=TASK.max_new_tokens)
        inference = InferenceSpec(sampling=sampling, return_=ReturnSpec.for_rl())
        return RolloutRequest(EnvSpec("sort", {"problem": problem}), ProtocolSpec("answer"), seed, seed, inference)

    def play(self, problems, seed: int = 0):
        requests = [self.ask(problem, seed + number) for number, problem in enumerate(problems)]
        return asyncio.run(self.engine.generate_rollouts(requests, max_steps=1, concurrency=256))

    def accuracy(self) -> float:
        rollouts = self.play(list(TASK.heldout()) * 4, seed=10**6)
        return sum(rollout.total_reward for rollout in rollouts) / len(rollouts)

    def config(self, lr: float, **changes) -> TrainerConfig:
        limits = {
            "max_seq_len": 64,
            "micro_token_budget": 4096,
            "overhead_tokens": 64,
            "pad_token_id": self.tokenizer.pad_token_id,
        }
        return TrainerConfig(
            lr=lr, betas=(0.9, 0.95), lr_scheduler_type="cosine", warmup_steps=10, lr_min_ratio=0.05, **limits, **changes
        )

    def fine_tune(self, source, steps: int, lr: float) -> None:
        Trainer(model=self.model, algo=make_sft(normalizer="tokens"), batch_source=source, cfg=self.config(lr)).train_sync(steps)


def imitate(player: Player, rng: random.Random, steps: int) -> None:
    """Stage 1: rows of prompt and completion, as `ludic sft` reads them from a file."""
    problems = [TASK.draw(rng) for _ in range(8000)]
    rows = [{"prompt": problem["question"], "completion": TASK.demonstrate(problem, rng)} for problem in problems]
    items = SFTItems(player.tokenizer).of((f"demonstration {number}", row) for number, row in enumerate(rows))
    player.fine_tune(ItemBatchSource(items, batch_size=64), steps, lr=3e-3)


def keep_the_right_ones(player: Player, rng: random.Random, path: Path, *, answers: int, steps: int) -> int:
    """Stage 2: rejection sampling. Returns how many answers were kept."""
    good = [rollout for rollout in player.play([TASK.draw(rng) for _ in range(answers)]) if rollout.total_reward > 0]
    append_rollouts(path, good)
    source = OfflineBatchSource(path, sample_from_step, ConstantCredit(1.0), batch_size=64)
    player.fine_tune(source, steps, lr=1e-3)
    return len(good)


def reinforce(player: Player, rng: random.Random, steps: int) -> None:
    """Stage 3: 32 problems a step, 8 answers to each."""
    groups = GRPORequestStrategy(group_size=8)
    algorithm = make_grpo(group_size=8, clip_eps_high=0.28, normalizer="tokens")
    source = RolloutBatchSource(
        engine=player.engine,
        requests_fn=lambda: groups.expand([player.ask(TASK.draw(rng), rng.randrange(2**31)) for _ in range(32)]),
        algorithm=algorithm,
        concurrency=256,
    )
    cfg = player.config(3e-4, minibatches_per_batch=2, weight_decay=0.0)
    publisher = LocalPublisher(player.client)
    Trainer(model=player.model, algo=algorithm, batch_source=source, publisher=publisher, cfg=cfg).train_sync(steps)


def main(
    folder: Path, seed: int = 0, *, sft_steps: int = 300, answers: int = 1500, rejection_steps: int = 20, rl_steps: int = 60
) -> dict[str, float]:
    """The accuracy on held-out problems after each stage."""
    torch.manual_seed(seed)
    rng, player = random.Random(seed), Player()
    imitate(player, rng, sft_steps)
    reached = {"supervised": player.accuracy()}
    kept = keep_the_right_ones(player, rng, folder / "good.jsonl", answers=answers, steps=rejection_steps)
    reached["rejection sampling"] = player.accuracy()
    print(f"kept {kept} of {answers} sampled answers in {folder / 'good.jsonl'}")
    reinforce(player, rng, rl_steps)
    reached["reinforcement"] = player.accuracy()
    for stage, accuracy in reached.items():
        print(f"{stage:<20}{accuracy:.3f} of the sampled answers to held-out problems are right")
    return reached


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the kept answers are written; a temporary folder without it")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # with more threads than free cores a small model is slower
    with tempfile.TemporaryDirectory() as temporary:
        main(arguments.folder or Path(temporary), arguments.seed)
