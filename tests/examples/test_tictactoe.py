"""The tic-tac-toe example runs against an opponent and in self-play, and it learns."""

import asyncio
import importlib.util
import random
from pathlib import Path

import pytest

from ludic.types import ChatResponse

EXAMPLE = Path(__file__).parents[2] / "examples" / "tictactoe.py"


class Uniform:
    """Chooses a cell from the seed of the request."""

    async def complete(self, request):
        return ChatResponse(str(random.Random(request.seed).randint(1, 9)), [1], [0.0], "stop", [1]), {}


def load():
    spec = importlib.util.spec_from_file_location("tictactoe_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("self_play", [False, True])
def test_the_example_runs(self_play, capsys):
    example = load()
    games, measure = example.training_games, example.measure
    example.training_games = lambda rng, **settings: games(rng, **settings)[:6]
    example.measure = lambda client: measure(client, games=20)
    before, after = asyncio.run(example.run(warmup=2, steps=1, self_play=self_play))
    assert before.keys() == after.keys() == {f"not lost as {mark} ({who})" for mark in "XO" for who in ("random", "perfect")}
    assert "reinforced in" in capsys.readouterr().out


def test_self_play_gives_one_rollout_per_player_with_its_own_credit():
    """Both rollouts are in one group, and each is compared only with the same player of the other
    games."""
    example = load()
    games = example.GRPORequestStrategy(4).expand(example.training_games(random.Random(0), self_play=True, random_moves=1)[:1])
    teacher = example.make_engine(Uniform())
    rollouts = asyncio.run(teacher.generate_rollouts(games, max_steps=9))
    credit = example.GroupNormalizedReturn(4, allow_partial=True).compute(rollouts)
    for mark in "XO":
        of_mark = [rollout for rollout in rollouts if rollout.meta["agent_id"] == mark]
        mean = sum(rollout.total_reward for rollout in of_mark) / len(of_mark)
        for rollout in of_mark:
            for step in rollout.steps:
                assert credit[rollout.id, step.index] == pytest.approx(rollout.total_reward - mean)


@pytest.mark.integration
@pytest.mark.slow  # the recipe of the game learns in tests/runs/test_learning.py
def test_the_model_learns_to_play():
    before, after = asyncio.run(load().run(seed=0))
    assert before["not lost as O (random)"] < 0.6
    assert after["not lost as X (random)"] > 0.9
    assert after["not lost as O (random)"] > 0.75
    assert after["not lost as O (perfect)"] > 0.5
