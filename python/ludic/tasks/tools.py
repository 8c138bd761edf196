"""A task with two tool calls: the start key holds another key; what does that key hold? See
`ludic.envs.key_value`.

In 16 % of its demonstrations the warm-up teacher looks up both keys and answers right; in 62 % it
guesses directly, and in the rest it makes a mistake on the way. Reinforcement learning selects the
episodes that look up the answer. Pairs of a start key and its content are held out; the content of
the second key is random in every episode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from random import Random
from typing import ClassVar

from ludic.envs.key_value import KEYS, TOOL_RULES, KeyValueEnv, TaggedText, TerseText
from ludic.errors import check_value
from ludic.tasks.episodic import Episode, EpisodicTask, Played, Shown, Turn, share, transcript
from ludic.types import Observation, Rollout

FORMATS = ("terse", "chat")
_SPLIT_SEED = 20_000  # of the held-out pairs, which are the same in every run
_EPISODES = 500  # in an evaluation, spread evenly over the held-out pairs


@dataclass(frozen=True)
class Tools(EpisodicTask):
    """90 pairs of a start key and the key that it holds; reward 1 for the right answer, else 0."""

    right: float = 0.16
    """Share of demonstrations that look up both keys and answer right."""
    guess: float = 0.62
    """Share that guesses without a call."""
    wrong_key: float = 0.09
    """Share whose second call looks up a wrong key and answers its content."""
    wrong_answer: float = 0.045
    """Share that looks up both keys and answers at random; the rest make one call and then
    guess."""
    num_heldout: int = 20
    """Pairs kept for evaluation, out of 90."""
    format: str = "terse"
    """`terse`: one or two characters a turn. `chat`: rules, sentences, and calls between tags."""

    def __post_init__(self) -> None:
        for name in ("right", "guess", "wrong_key", "wrong_answer"):
            check_value(name, getattr(self, name), least=0, most=1)
        shares = self.right + self.guess + self.wrong_key + self.wrong_answer
        check_value("right + guess + wrong_key + wrong_answer", shares, least=0, most=1)
        check_value("num_heldout", self.num_heldout, "the rest is for training", least=1, most=45)
        check_value("format", self.format, choices=FORMATS)

    max_turns = 4
    success_reward = 1.0
    reward_sees = "the answer; never whether it was looked up"
    facts: ClassVar[Mapping[str, str]] = {"looked_up": "both keys were looked up before the answer"}
    rates: ClassVar[Mapping[str, str]] = {**facts, "answered": "episodes that ended with an answer"}

    @property
    def max_new_tokens(self) -> int:
        return 5 if self.format == "terse" else 32

    @property
    def system_prompt(self) -> str | None:
        return None if self.format == "terse" else TOOL_RULES

    def draw(self, rng: Random) -> Episode:
        return _episode(*rng.choice(self._split[0]))

    def demonstrations(self, count: int, rng: Random) -> Sequence[Sequence[Turn]]:
        return [self._demonstrate(self.draw(rng), rng) for _ in range(count)]

    def suites(self) -> Mapping[str, Sequence[Episode]]:
        pairs = self._split[1]
        return {"held out": [_episode(*pairs[i % len(pairs)]) for i in range(_EPISODES)]}

    def measure(self, played: Mapping[str, Sequence[Played]]) -> dict[str, float]:
        last = [rollout.steps[-1] for episodes in played.values() for _, rollout in episodes]
        return {
            "looked_up": share(bool(step.info.get("looked_up", False)) for step in last),
            "answered": share(step.terminated and not step.info.get("parse_error", False) for step in last),
        }

    def show(self, episode: Episode, rollout: Rollout) -> Shown:
        return Shown(f"starts at {episode['start']}", transcript(rollout), str(rollout.steps[-1].info.get("target", "")))

    def make_env(self, episode: Episode) -> KeyValueEnv:
        text = TerseText() if self.format == "terse" else TaggedText()
        return KeyValueEnv(
            episode["start"], holds=episode["holds"], max_turns=self.max_turns, text=text, system_prompt=self.system_prompt
        )

    def _demonstrate(self, episode: Episode, rng: Random) -> list[Turn]:
        env = self.make_env(episode)
        observation: Observation
        observation, _ = env.env_reset(seed=rng.getrandbits(32))
        turns = []
        for kind, key in self._plan(env, rng):
            action = self._format_action(kind, key)
            turns.append(Turn(observation, action))
            observation = env.env_step(action).obs
        return turns

    def _plan(self, env: KeyValueEnv, rng: Random) -> list[tuple[str, str]]:
        """The teacher's actions, drawn by the shares above."""
        first, second, drawn = env.start, env.store[env.start], rng.random()
        guess = rng.choice(KEYS)
        if drawn < self.guess:
            return [("answer", guess)]
        drawn -= self.guess
        if drawn < self.right:
            return [("call", first), ("call", second), ("answer", env.target)]
        drawn -= self.right
        if drawn < self.wrong_key:
            wrong = rng.choice([key for key in KEYS if key != second])
            return [("call", first), ("call", wrong), ("answer", env.store[wrong])]
        drawn -= self.wrong_key
        if drawn < self.wrong_answer:
            return [("call", first), ("call", second), ("answer", guess)]
        return [("call", first), ("answer", guess)]

    def _format_action(self, kind: str, key: str) -> str:
        if self.format == "terse":
            return f"{'?' if kind == 'call' else '='}{key}"
        return f"<get>{key}</get>" if kind == "call" else f"<answer>{key}</answer>"

    @cached_property
    def _split(self) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        """(training pairs, held-out pairs)."""
        pairs = list(permutations(KEYS, 2))
        Random(_SPLIT_SEED).shuffle(pairs)
        return pairs[self.num_heldout :], pairs[: self.num_heldout]


def _episode(start: str, holds: str) -> Episode:
    return {"id": f"{start} holds {holds}", "start": start, "holds": holds}
