"""Reinforcement against a learnt reward model, and what it is worth by the true reward: on a CPU, with no download.

    python examples/rl_with_reward_model.py

The task is to sort five digits: `52914>` is answered by `12459`. Nothing in the last two stages asks the task's verifier what to train on:

1. a small policy imitates a teacher who is right in one of four demonstrations;
2. it answers training problems; of two answers to a problem, a right and a wrong one, the right one is preferred. A reward model, begun
   from the policy's weights, is trained on these pairs, token by token as they were sampled (`RMTrainer`, `make_bradley_terry`);
3. GRPO trains the policy on the reward model's score (`LocalRewardModel`, `RewardModelScorer`, `RewardModelReward`).

After every part of stage 3 two numbers are measured on held-out problems: the score, which is trained on, and the share of right
answers, which is wanted. Where the first rises and the second falls, the reward model is over-optimised, and the end says so.
"""

import argparse
import asyncio
import random
from dataclasses import dataclass, replace

import torch
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from ludic.agents import Agent
from ludic.context import FullDialog
from ludic.distributed.adapters.local import LocalPublisher
from ludic.envs.tasks import DigitSort
from ludic.inference import InferenceSpec, LocalRewardModel, ReturnSpec, SamplingParams
from ludic.inference.local import LocalChatClient
from ludic.interaction import SingleAgentProtocol
from ludic.parsers import ParseResult
from ludic.recipes.model import make_small_model
from ludic.recipes.schema import NetworkSection
from ludic.recipes.tokenizer import make_byte_tokenizer
from ludic.training import (
    EnvSpec,
    GRPORequestStrategy,
    ProtocolSpec,
    RewardModelReward,
    RewardModelScorer,
    RMTrainer,
    RMTrainerConfig,
    RolloutBatchSource,
    RolloutEngine,
    RolloutRequest,
    Trainer,
    TrainerConfig,
    make_bradley_terry,
    make_grpo,
    make_sft,
)
from ludic.training.batching.epochs import ItemBatchSource
from ludic.training.batching.pair_batches import preference_batches
from ludic.training.batching.samples import sample_from_step
from ludic.training.batching.sft_items import SFTItems

TASK = DigitSort(digits=5, right=0.25, backwards=0.5)
NETWORK = NetworkSection(hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=384, max_positions=64)
FALL = 0.02
"""Less than this is taken for noise where the true reward falls."""


@dataclass(frozen=True)
class Measured:
    """Means over sampled answers to held-out problems."""

    stage: str
    score: float
    """What the reward model says, and the policy is trained on."""
    right: float
    """What is wanted: the share of right answers."""


class Player:
    """The policy, and what it needs to answer problems."""

    def __init__(self) -> None:
        self.model, self.tokenizer = make_small_model(NETWORK), make_byte_tokenizer()
        self.client = LocalChatClient(self.model, self.tokenizer, max_batch_size=256)
        self.asked = 0

    def engine(self, scorer=None) -> RolloutEngine:
        return RolloutEngine(env_registry={"sort": TASK.make_env}, protocol_registry={"answer": self.protocol}, scorer=scorer)

    def protocol(self) -> SingleAgentProtocol:
        whole = lambda text: ParseResult(action=text, reward=0.0, obs=None)  # noqa: E731  the answer is the whole completion
        return SingleAgentProtocol(Agent(client=self.client, model="small", ctx=FullDialog(), parser=whole))

    def ask(self, problem, seed: int, **meta) -> RolloutRequest:
        sampling = SamplingParams(temperature=1.0, max_tokens=TASK.max_new_tokens)
        inference = InferenceSpec(sampling=sampling, return_=ReturnSpec.for_rl())
        return RolloutRequest(EnvSpec("sort", {"problem": problem}), ProtocolSpec("answer"), seed, seed, inference, meta=meta)

    def play(self, problems, scorer=None, seed: int = 0):
        requests = [self.ask(problem, seed + number, problem_id=problem["id"]) for number, problem in enumerate(problems)]
        return asyncio.run(self.engine(scorer).generate_rollouts(requests, max_steps=1, concurrency=256))


def settings(**changes):
    """Of all trainers here: the schedule, and how tokens are packed."""
    packing = {"max_seq_len": 64, "micro_token_budget": 4096, "overhead_tokens": 64, "pad_token_id": 0}
    return {"betas": (0.9, 0.95), "warmup_steps": 10, "lr_scheduler_type": "cosine", "lr_min_ratio": 0.05, **packing, **changes}


def imitate(player: Player, rng: random.Random, steps: int) -> None:
    """Stage 1."""
    problems = [TASK.draw(rng) for _ in range(8000)]
    rows = [{"prompt": problem["question"], "completion": TASK.demonstrate(problem, rng)} for problem in problems]
    items = SFTItems(player.tokenizer).of((f"demonstration {number}", row) for number, row in enumerate(rows))
    source = ItemBatchSource(items, batch_size=64)
    cfg = TrainerConfig(**settings(lr=3e-3))
    Trainer(model=player.model, algo=make_sft(normalizer="tokens"), batch_source=source, cfg=cfg).train_sync(steps)


def preferences(player: Player, rng: random.Random, problems: int, seed: int):
    """Pairs of answers that the policy gave to one problem, the right one preferred: samples made of the tokens that were sampled."""
    drawn = [TASK.draw(rng) for _ in range(problems)]
    answers: dict[str, list] = {}
    for rollout in player.play(drawn * 4, seed=seed):
        answers.setdefault(rollout.meta["problem_id"], []).append(rollout)
    items = []
    for problem, given in answers.items():
        right = [rollout for rollout in given if rollout.total_reward > 0]
        wrong = [rollout for rollout in given if rollout.total_reward <= 0]
        for number, pair in enumerate(zip(right, wrong, strict=False)):
            for role, rollout in zip(("chosen", "rejected"), pair, strict=True):
                item = sample_from_step(rollout, rollout.steps[0], 1.0)
                items.append(
                    replace(
                        item,
                        meta={"pair_id": f"{problem}/{number}", "role": role, "label": 1.0},
                        attachments=type(item.attachments)(),
                    )
                )
    return items


def learn_preferences(player: Player, train, test, steps: int):
    """Stage 2: the reward model, and its accuracy on pairs that it has not seen."""
    shape = {name: value for name, value in player.model.config.to_dict().items() if name not in ("id2label", "label2id")}
    config = Qwen2Config(**shape, num_labels=1)
    model = Qwen2ForSequenceClassification(config)
    model.model.load_state_dict(player.model.model.state_dict())
    cfg = RMTrainerConfig(**settings(lr=1e-3, warmup_steps=20))
    source = preference_batches(train, batch_size=32)
    trainer = RMTrainer(model=model, algo=make_bradley_terry(), batch_source=source, cfg=cfg, eval_items=test)
    trainer.train_sync(steps)
    return model, trainer.evaluate()["eval_pairwise_accuracy"]


def measure(player: Player, scorer: RewardModelScorer, stage: str) -> Measured:
    """The scorer writes its score beside the reward, which stays the task's own."""
    played = player.play(list(TASK.heldout()) * 4, scorer, seed=10**6)
    mean = lambda values: sum(values) / len(played)  # noqa: E731
    found = Measured(stage, mean(r.meta["rm_score"] for r in played), mean(r.total_reward >= 1 for r in played))
    print(f"{found.stage:<28}score {found.score:7.3f}   right {found.right:.3f}", flush=True)
    return found


def reinforce(
    player: Player, scorer: RewardModelScorer, rng: random.Random, steps: int, parts: int, penalty: float
) -> list[Measured]:
    """Stage 3: 32 problems a step, 8 answers to each, rewarded by the score alone."""
    groups = GRPORequestStrategy(group_size=8)
    algorithm = make_grpo(group_size=8, clip_eps_high=0.28, normalizer="tokens")
    source = RolloutBatchSource(
        engine=player.engine(RewardModelReward(scorer, "replace", unfinished_penalty=penalty)),
        requests_fn=lambda: groups.expand([player.ask(TASK.draw(rng), rng.randrange(2**31)) for _ in range(32)]),
        algorithm=algorithm,
        concurrency=256,
    )
    cfg = TrainerConfig(**settings(lr=3e-4, minibatches_per_batch=2, weight_decay=0.0))
    trainer = Trainer(
        model=player.model,
        algo=algorithm,
        batch_source=source,
        publisher=LocalPublisher(player.client),
        cfg=cfg,
        total_training_steps=steps * parts,
    )
    measured = []
    for part in range(1, parts + 1):
        trainer.train_sync(steps)
        measured.append(measure(player, scorer, f"after {part * steps} steps of GRPO"))
    return measured


def verdict(measured: list[Measured]) -> str:
    """What the two numbers say together."""
    first, best, last = measured[0], max(measured, key=lambda m: m.right), measured[-1]
    if last.score <= first.score:
        return "The score did not rise: the policy did not learn what the reward model wants."
    if last.right > best.right - FALL:
        return f"Score and right answers rose together: {first.right:.3f} -> {last.right:.3f} of the answers are right."
    return (
        f"OVER-OPTIMISED: the score went on rising while right answers fell from {best.right:.3f} ({best.stage}) to {last.right:.3f}; "
        "stop there, or train the reward model on answers of that policy."
    )


def main(
    seed: int = 0,
    *,
    sft_steps: int = 300,
    problems: int = 1500,
    rm_steps: int = 200,
    rl_steps: int = 20,
    parts: int = 4,
    penalty: float = 10.0,
) -> tuple[list[Measured], float]:
    """What was measured before reinforcement and after each of its parts, and the reward model's accuracy on held-out pairs."""
    torch.manual_seed(seed)
    rng, player = random.Random(seed), Player()
    imitate(player, rng, sft_steps)
    train, test = (preferences(player, rng, count, seed=10**7 + count) for count in (problems, max(100, problems // 5)))
    model, accuracy = learn_preferences(player, train, test, rm_steps)
    print(
        f"reward model: right about {accuracy:.3f} of {len(test) // 2} held-out pairs, trained on {len(train) // 2}", flush=True
    )
    judge = LocalRewardModel(model, player.tokenizer)
    scorer = RewardModelScorer(judge, policy_tokenizer=player.tokenizer, normalize=False, batch_size=4096)
    measured = [measure(player, scorer, "before reinforcement")]
    measured += reinforce(player, scorer, rng, rl_steps, parts, penalty)
    print(verdict(measured))
    return measured, accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--penalty", type=float, default=10.0, help="off the score of an answer that does not end; try 0")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # more threads than free cores make a small model slower
    main(arguments.seed, penalty=arguments.penalty)
