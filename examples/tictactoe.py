"""A small model learns tic-tac-toe, against an opponent or against itself. No download; about two
minutes on two cores.

The model first imitates a teacher half of whose moves are perfect. Then it is reinforced by how its
games end: against an opponent of which four moves in ten are perfect, or, with `--self-play`,
against itself: one policy is both players of a `MultiAgentProtocol`, and the rollout of either is a
training sample. It is measured against a random and a perfect opponent, which it was not trained
against.

    python examples/tictactoe.py
    python examples/tictactoe.py --self-play
    python examples/tictactoe.py --self-play --random-moves 0   # every game from the empty board
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from dataclasses import replace

import torch

from ludic.agents import Agent
from ludic.context import FullDialog
from ludic.distributed.publisher import LocalPublisher
from ludic.envs.tictactoe import (
    MixedOpponent,
    MoveText,
    PerfectOpponent,
    RandomOpponent,
    TicTacToeEnv,
    TwoPlayerTicTacToeEnv,
)
from ludic.inference import InferenceSpec, LocalChatClient, ReturnSpec, SamplingParams
from ludic.interaction import MultiAgentProtocol, SingleAgentProtocol
from ludic.models.byte_tokenizer import make_line_tokenizer
from ludic.parsers import ParseResult
from ludic.recipes.model import make_small_model
from ludic.recipes.schema import NetworkSection
from ludic.tasks import TicTacToe
from ludic.tasks.demonstrations import DemonstrationSource
from ludic.training import (
    EnvSpec,
    GroupNormalizedReturn,
    ProtocolSpec,
    RolloutBatchSource,
    RolloutEngine,
    RolloutRequest,
    Trainer,
    TrainerConfig,
    make_grpo,
    make_sft,
)
from ludic.training.batching import GRPORequestStrategy

GROUP = 8
OPPONENTS = {"mixed": MixedOpponent(0.4), "random": RandomOpponent(), "perfect": PerfectOpponent()}
SAMPLED = InferenceSpec(SamplingParams(temperature=1.0, max_tokens=4), ReturnSpec.for_rl())


def make_engine(client: LocalChatClient) -> RolloutEngine:
    """An engine for games of one agent against an opponent, and for self-play of one policy."""

    def player() -> Agent:
        return Agent(
            client=client,
            model="small",
            ctx=FullDialog(),
            parser=lambda text: ParseResult(text, 0.0, None),
            incomplete_completion_feedback="?",  # a message about each truncated answer would fill a context of 256 tokens
        )

    def against(mark: str, opponent: str) -> TicTacToeEnv:
        return TicTacToeEnv(
            agent_starts=mark == "X",
            opponent=OPPONENTS[opponent],
            text=MoveText(),
            forced_draw_reward=0.5,
            system_prompt=None,
        )

    return RolloutEngine(
        env_registry={
            "against": against,
            "itself": lambda random_moves: TwoPlayerTicTacToeEnv(text=MoveText(), random_moves=random_moves, system_prompt=None),
        },
        protocol_registry={
            "one": lambda: SingleAgentProtocol(player(), stop_on_parse_error=True),
            "two": lambda: MultiAgentProtocol({"X": player(), "O": player()}),
        },
    )


def game(mark: str, opponent: str, env_seed: int, sampling_seed: int) -> RolloutRequest:
    spec = EnvSpec("against", {"mark": mark, "opponent": opponent})
    return RolloutRequest(spec, ProtocolSpec("one"), env_seed=env_seed, sampling_seed=sampling_seed, inference=SAMPLED)


def training_games(rng: random.Random, *, self_play: bool, random_moves: int) -> list[RolloutRequest]:
    """Groups of eight games with the same opening. Self-play gives two rollouts per game, so both
    modes give the same number."""
    seeds = [(rng.getrandbits(31), rng.getrandbits(31)) for _ in range(32 if self_play else 64)]
    if not self_play:
        return [game("O" if rng.random() < 2 / 3 else "X", "mixed", *pair) for pair in seeds]
    return [
        RolloutRequest(
            EnvSpec("itself", {"random_moves": rng.randint(0, random_moves)}),
            ProtocolSpec("two"),
            env_seed=env_seed,
            sampling_seed=sampling_seed,
            inference=SAMPLED,
        )
        for env_seed, sampling_seed in seeds
    ]


async def measure(client: LocalChatClient, games: int = 400) -> dict[str, float]:
    """Sampled games against both opponents with fixed seeds, half of them on either side."""
    rates = {}
    for opponent in ("random", "perfect"):
        requests = [game("XO"[i % 2], opponent, 1_000_000 + i, 1_000_000 + i) for i in range(games)]
        rollouts = await make_engine(client).generate_rollouts(requests, max_steps=5, concurrency=games)
        results = [rollout.steps[-1].info.get("result") for rollout in rollouts]
        for mark in "XO":
            held = [
                result in ("win", "draw")
                for result, asked in zip(results, requests, strict=True)
                if asked.env.kwargs["mark"] == mark
            ]
            rates[f"not lost as {mark} ({opponent})"] = sum(held) / len(held)
    return rates


def show(stats: dict[str, float]) -> None:
    shown = {name: stats[f"train/{name}"] for name in ("step", "loss", "avg_total_reward") if f"train/{name}" in stats}
    print("  ".join(f"{name} {value:.3g}" for name, value in shown.items()), flush=True)


async def run(
    *, seed: int = 0, warmup: int = 350, steps: int = 70, self_play: bool = False, random_moves: int = 1
) -> tuple[dict, dict]:
    """Imitate, measure, reinforce, measure. Returns the measurements before and after."""
    torch.manual_seed(seed)
    random.seed(seed)
    rng = random.Random(seed)
    tokenizer = make_line_tokenizer()
    network = NetworkSection(
        hidden_size=128, num_layers=2, num_heads=8, num_kv_heads=8, intermediate_size=384, max_positions=256,
        initializer_range=0.08, end_of_turn="newline",
    )  # fmt: skip
    model = make_small_model(network)
    client = LocalChatClient(model, tokenizer)
    sizes = {"model_device": "cpu", "max_seq_len": 256, "micro_token_budget": 4096, "overhead_tokens": 64}
    sizes |= {"pad_token_id": tokenizer.pad_token_id, "lr_min_ratio": 0.05}

    imitation = Trainer(
        model=model,
        algo=make_sft(normalizer="tokens"),
        batch_source=DemonstrationSource(TicTacToe(), tokenizer, batch_size=64, seed=seed),
        cfg=TrainerConfig(lr=3e-3, betas=(0.9, 0.95), lr_scheduler_type="cosine", warmup_steps=20, sync_every_steps=0, **sizes),
        total_training_steps=warmup,
    )
    started = time.perf_counter()
    await imitation.train(warmup, log_every=50, log_fn=show)
    before = await measure(client)
    print(f"imitated in {time.perf_counter() - started:.0f} s: {before}")

    # a game that ends before O has moved has no rollout of O, so O's group is smaller
    credit = GroupNormalizedReturn(GROUP, normalize_adv=True, allow_partial=self_play)
    algo = replace(make_grpo(group_size=GROUP, normalizer="tokens", clip_eps_high=0.28), credit_assigner=credit)
    reinforcement = Trainer(
        model=model,
        algo=algo,
        batch_source=RolloutBatchSource(
            engine=make_engine(client),
            requests_fn=lambda: GRPORequestStrategy(GROUP).expand(
                training_games(rng, self_play=self_play, random_moves=random_moves)
            ),
            algorithm=algo,
            max_steps=9,
            concurrency=512,
        ),
        publisher=LocalPublisher(client),
        cfg=TrainerConfig(
            lr=1e-3,
            betas=(0.9, 0.99),
            weight_decay=0.0,
            lr_scheduler_type="linear",
            warmup_steps=10,
            minibatches_per_batch=4,
            **sizes,
        ),
        total_training_steps=steps,
    )
    started = time.perf_counter()
    await reinforcement.train(steps, log_every=5, log_fn=show)
    after = await measure(client)
    print(f"reinforced in {time.perf_counter() - started:.0f} s: {after}")
    return before, after


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warmup", type=int, default=350, help="steps of imitation")
    parser.add_argument("--steps", type=int, default=70, help="steps of reinforcement")
    parser.add_argument("--self-play", action="store_true", help="both players are the policy")
    parser.add_argument(
        "--random-moves", type=int, choices=(0, 1), default=1, help="with --self-play: some games open with a random move"
    )
    asyncio.run(run(**vars(parser.parse_args())))
