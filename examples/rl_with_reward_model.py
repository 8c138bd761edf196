"""Reinforcement against a learnt reward model, and what it is worth by the true reward: on a CPU,
with no download.

    python examples/rl_with_reward_model.py

The task is to sort five digits: `52914>` is answered by `12459`. The policy is never trained on the
task's own reward:

1. a small policy imitates a teacher who is right in one of four demonstrations;
2. it answers training problems, and of two answers to a problem the one with fewer mistakes is
   preferred. A reward model, begun from the policy's weights, is trained on these pairs, token by
   token as they were sampled (`RMTrainer`, `make_bradley_terry`);
3. GRPO trains the policy on the reward model's score (`LocalRewardModel`, `RewardModelScorer`,
   `RewardModelReward`).

Before and after, two numbers are measured on held-out problems: the score, which is trained on, and
the share of right answers, which is wanted. Where the first rises and the second falls, the reward
model is over-optimised, and the end says so. It does not take much: 5 steps of GRPO raise the share
of right answers from about 0.2 to about 0.5, and 15 steps raise the score further and lose them
all again (docs/reward-models.md has three seeds).
"""

import argparse
import asyncio
import random
from dataclasses import dataclass

import torch
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from ludic.agents import Agent
from ludic.context import FullDialog
from ludic.distributed.publisher import LocalPublisher
from ludic.inference import InferenceSpec, LocalChatClient, LocalRewardModel, ReturnSpec, SamplingParams
from ludic.interaction import SingleAgentProtocol
from ludic.models.byte_tokenizer import make_byte_tokenizer
from ludic.parsers import ParseResult
from ludic.recipes.model import make_small_model
from ludic.recipes.schema import NetworkSection
from ludic.tasks import DigitSort
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
    SAWItem,
    Trainer,
    TrainerConfig,
    make_bradley_terry,
    make_grpo,
    make_sft,
)
from ludic.training.batching.epochs import ItemBatchSource
from ludic.training.batching.pair_batches import preference_batches
from ludic.training.samples.sft import SFTItems

TASK = DigitSort(digits=5, right=0.25, backwards=0.5)
NETWORK = NetworkSection(hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=384, max_positions=64)
FALL = 0.02
"""A drop of the true reward below this counts as noise."""


@dataclass(frozen=True)
class Measured:
    """Means over sampled answers to held-out problems."""

    stage: str
    score: float
    """The reward model's score, which the policy is trained on."""
    right: float
    """The fraction of right answers, which is the goal."""


class Player:
    """The policy and everything it needs to answer problems."""

    def __init__(self) -> None:
        self.model, self.tokenizer = make_small_model(NETWORK), make_byte_tokenizer()
        self.client = LocalChatClient(self.model, self.tokenizer, max_batch_size=256)

    def engine(self, scorer=None) -> RolloutEngine:
        return RolloutEngine(env_registry={"sort": TASK.make_env}, protocol_registry={"answer": self.protocol}, scorer=scorer)

    def protocol(self) -> SingleAgentProtocol:
        whole = lambda text: ParseResult(action=text, reward=0.0, obs=None)  # noqa: E731  the answer is the whole completion
        return SingleAgentProtocol(Agent(client=self.client, model="small", ctx=FullDialog(), parser=whole))

    def ask(self, problem, seed: int, temperature: float = 1.0) -> RolloutRequest:
        sampling = SamplingParams(temperature=temperature, max_tokens=TASK.max_new_tokens)
        inference = InferenceSpec(sampling=sampling, return_=ReturnSpec.for_rl())
        return RolloutRequest(
            EnvSpec("sort", {"problem": problem}),
            ProtocolSpec("answer"),
            seed,
            seed,
            inference,
            meta={"problem_id": problem["id"]},
        )

    def play(self, asked, scorer=None, seed: int = 0):
        """`asked` has problems and temperatures."""
        requests = [self.ask(problem, seed + number, temperature) for number, (problem, temperature) in enumerate(asked)]
        return asyncio.run(self.engine(scorer).generate_rollouts(requests, max_steps=1, concurrency=256))


def settings(**changes):
    """Settings that all trainers share: the schedule and the packing of tokens."""
    packing = {"max_seq_len": 64, "micro_token_budget": 4096, "overhead_tokens": 64, "pad_token_id": 0}
    return {"betas": (0.9, 0.95), "warmup_steps": 10, "lr_scheduler_type": "cosine", "lr_min_ratio": 0.05, **packing, **changes}


def imitate(player: Player, rng: random.Random, steps: int) -> None:
    """Stage 1: supervised training on the teacher's demonstrations."""
    problems = [TASK.draw(rng) for _ in range(8000)]
    rows = [{"prompt": problem["question"], "completion": TASK.demonstrate(problem, rng)} for problem in problems]
    items = SFTItems(player.tokenizer).of((f"demonstration {number}", row) for number, row in enumerate(rows))
    source = ItemBatchSource(items, batch_size=64)
    cfg = TrainerConfig(**settings(lr=3e-3))
    Trainer(model=player.model, algo=make_sft(normalizer="tokens"), batch_source=source, cfg=cfg).train_sync(steps)


def mistakes(answer: str, right: str) -> int:
    """Number of digits to insert, delete or replace to get the right answer (Levenshtein 1966)."""
    row = list(range(len(right) + 1))
    for i, given in enumerate(answer, 1):
        diagonal, row[0] = row[0], i
        for j, wanted in enumerate(right, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (given != wanted))
    return row[-1]


def preferences(player: Player, rng: random.Random, problems: int, source: str) -> list[SAWItem]:
    """Pairs of answers to one problem; the one with fewer mistakes is preferred. The samples have
    the sampled tokens. Half of the answers are sampled at a higher temperature, and each problem
    also gets an answer to another problem."""
    drawn = {problem["id"]: problem for problem in (TASK.draw(rng) for _ in range(problems))}
    asked = [(problem, temperature) for problem in drawn.values() for temperature in (1.0, 1.0, 1.0, 1.5, 1.5, 1.5)]
    answers: dict[str, list] = {}
    for rollout in player.play(asked, seed=rng.randrange(2**31)):
        step = rollout.steps[0]
        answers.setdefault(rollout.meta["problem_id"], []).append((step.action, step.trace))
    items, strangers = [], [given[0] for given in answers.values()]
    for name, given in answers.items():
        prompt = given[0][1].prompt_token_ids
        ranked = sorted([*given, rng.choice(strangers)], key=lambda answer: mistakes(answer[0], drawn[name]["answer"]))
        fewest = mistakes(ranked[0][0], drawn[name]["answer"])
        worse = [answer for answer in ranked if mistakes(answer[0], drawn[name]["answer"]) > fewest]
        for number, answer in enumerate(worse):
            for role, (_, trace) in (("chosen", ranked[0]), ("rejected", answer)):
                meta = {"pair_id": f"{source}/{name}/{number}", "role": role, "label": 1.0}
                items.append(sample(prompt, trace.completion_token_ids, meta))
    return items


def sample(prompt: list[int], completion: list[int], meta) -> SAWItem:
    ids = [*prompt, *completion]
    return SAWItem(ids, [1] * len(ids), [0] * len(prompt) + [1] * len(completion), 1.0, meta)


def make_reward_model(player: Player) -> Qwen2ForSequenceClassification:
    """A reward model with the policy's layers and a new head."""
    shape = {name: value for name, value in player.model.config.to_dict().items() if name not in ("id2label", "label2id")}
    model = Qwen2ForSequenceClassification(Qwen2Config(**shape, num_labels=1))
    model.model.load_state_dict(player.model.model.state_dict())
    return model


def learn_preferences(model, train: list[SAWItem], test: list[SAWItem], steps: int) -> float:
    """Stage 2: train the reward model. Returns its accuracy on unseen pairs."""
    source = preference_batches(train, batch_size=32)
    cfg = RMTrainerConfig(**settings(lr=1e-3, warmup_steps=20))
    trainer = RMTrainer(model=model, algo=make_bradley_terry(), batch_source=source, cfg=cfg, eval_items=test)
    trainer.train_sync(steps)
    return trainer.evaluate()["eval_pairwise_accuracy"]


def measure(player: Player, scorer: RewardModelScorer, stage: str) -> Measured:
    """Evaluate the policy. The scorer writes its score beside the reward, which stays the task's
    own."""
    played = player.play([(problem, 1.0) for problem in TASK.heldout()] * 4, scorer, seed=10**6)
    mean = lambda values: sum(values) / len(played)  # noqa: E731
    found = Measured(stage, mean(r.meta["rm_score"] for r in played), mean(r.total_reward >= 1 for r in played))
    print(f"{stage:<20} score {found.score:7.3f}   right {found.right:.3f}", flush=True)
    return found


def reinforce(player: Player, scorer: RewardModelScorer, rng: random.Random, steps: int) -> None:
    """Stage 3: 32 problems per step, 8 answers to each, rewarded only by the score."""
    groups = GRPORequestStrategy(group_size=8)
    algorithm = make_grpo(group_size=8, clip_eps_high=0.28, normalizer="tokens")
    source = RolloutBatchSource(
        engine=player.engine(RewardModelReward(scorer, "replace", unfinished_penalty=10.0)),
        requests_fn=lambda: groups.expand([player.ask(TASK.draw(rng), rng.randrange(2**31)) for _ in range(32)]),
        algorithm=algorithm,
        concurrency=256,
    )
    cfg = TrainerConfig(**settings(lr=3e-4, minibatches_per_batch=2, weight_decay=0.0, warmup_steps=2))
    publisher = LocalPublisher(player.client)
    Trainer(model=player.model, algo=algorithm, batch_source=source, publisher=publisher, cfg=cfg).train_sync(steps)


def verdict(rounds: list[tuple[Measured, Measured]]) -> str:
    """What the two numbers mean together."""
    first, last = rounds[0][0], rounds[-1][1]
    bad = [after.stage for before, after in rounds if after.score > before.score and after.right < before.right - FALL]
    said = f"Right answers: {first.right:.3f} before, {last.right:.3f} at the end."
    return f"{said} OVER-OPTIMISED, the score rising while right answers fell: {', '.join(bad)}." if bad else said


def main(
    seed: int = 0, *, sft_steps: int = 300, problems: int = 600, rm_steps: int = 250, rl_steps: int = 5, rounds: int = 1
) -> list[tuple[Measured, Measured]]:
    """The measurements before and after each round."""
    torch.manual_seed(seed)
    rng, player = random.Random(seed), Player()
    imitate(player, rng, sft_steps)
    model, pairs, measured = make_reward_model(player), list[SAWItem](), []
    judge = LocalRewardModel(model, player.tokenizer)
    scorer = RewardModelScorer(judge, policy_tokenizer=player.tokenizer, normalize=False, batch_size=4096)
    for number in range(1, rounds + 1):
        test = preferences(player, rng, problems // 5, f"test {number}")
        pairs += preferences(player, rng, problems, f"round {number}")
        accuracy = learn_preferences(model, pairs, test, rm_steps)
        print(
            f"round {number}: {len(pairs) // 2} pairs; the reward model is right about {accuracy:.3f} of {len(test) // 2} others"
        )
        before = measure(player, scorer, f"round {number}, before")
        reinforce(player, scorer, rng, rl_steps)
        measured.append((before, measure(player, scorer, f"round {number}, after")))
    print(verdict(measured))
    return measured


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("--seed", 0), ("--rounds", 1), ("--rl-steps", 5)):
        parser.add_argument(name, type=int, default=default)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # with more threads than free cores a small model is slower
    main(arguments.seed, rounds=arguments.rounds, rl_steps=arguments.rl_steps)
