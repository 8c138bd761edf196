"""Problems of reasoning-gym: about a hundred kinds, each made without end by a generator with
settings of difficulty, and judged by its own verifier."""

from __future__ import annotations

import json
import sys
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from itertools import accumulate
from math import inf
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Literal, get_args

from ludic.envs.env import SingleAgentEnv, check_step
from ludic.envs.line_process import LineProcessPool
from ludic.envs.maths.grader import NUMBER
from ludic.envs.maths.tagged import tagged_answer
from ludic.errors import ConfigError, GradingError, MissingExtraError, check_value
from ludic.tasks.episodic import Problem
from ludic.types import Info, StepOutcome

AnswerIn = Literal["tags", "text", "number"]
WORKER = Path(__file__).with_name("reasoning_gym_worker.py")
TAGS_PROMPT = (
    "Think step by step. Then write the final answer, and nothing else, between <answer> and </answer>, in the form that the "
    "question asks for."
)
_ATTEMPTS, _FAILURES = 1_000, 10


class GymProblem(Problem):
    """A problem, and how it is made again."""

    dataset: int
    """Number of its kind, in the order of the task's."""
    index: int
    """Number of the problem, of its kind."""


class ReasoningGym:
    """Problems of one kind or of several. `ReasoningGym("chain_sum", {"max_terms": 2})`.

    The first `num_heldout` problems of each kind's generator are held out, and the others are
    trained on, without those whose question is held out as well: where few different questions
    exist, more than one number makes the same.
    """

    success_reward = 1.0
    facts: ClassVar[Mapping[str, str]] = {"answered": "an answer was found in the text"}

    def __init__(
        self,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        *,
        datasets: Sequence[Mapping[str, Any]] | None = None,
        seed: int = 0,
        num_heldout: int = 200,
        num_problems: int = 10_000,
        answer_in: AnswerIn = "tags",
        partial_credit: bool = True,
        max_new_tokens: int = 256,
        timeout_s: float = 5.0,
    ) -> None:
        """`config` has the fields of the kind's config class in reasoning-gym. `datasets`, instead
        of `name` and `config`, mixes kinds: `[{name: chain_sum, weight: 2}, {name: gcd, config:
        {...}}]`, where `weight` (1) is proportional to how often a kind is drawn and held out.

        `answer_in`: where the answer is, in the last pair of `<answer>` tags, which the system
        prompt asks for; the whole text; or the last number in it. A text without one is wrong.
        `partial_credit`: rewards are the verifier's scores, some of which give a part for a wrong
        answer, such as the share of the text that is the right one; false: 1 for a score of 1, else
        0. `num_problems`: how many each generator has, with the held-out ones; a few make them all
        at the start. `seed` chooses which, and not the order in which they are drawn. `timeout_s`:
        limit for making or judging a problem.
        """
        if find_spec("reasoning_gym") is None:
            raise MissingExtraError.for_extra("reasoning-gym", "reasoning-gym")
        check_value("answer_in", answer_in, choices=get_args(AnswerIn))
        self._kinds = _read_kinds(name, config, datasets)
        check_value("num_heldout", num_heldout, "one for each kind of problem", least=len(self._kinds))
        check_value("num_problems", num_problems, "num_heldout of them are held out", above=num_heldout)
        self.num_heldout, self.num_problems, self.partial_credit = num_heldout, num_problems, partial_credit
        self.answer_in, self.max_new_tokens = answer_in, max_new_tokens
        self.system_prompt = TAGS_PROMPT if answer_in == "tags" else None
        several = [each["name"] for each in self._kinds] if len(self._kinds) > 1 else []
        self.measures = {f"rewards/{each}": f"{each}, mean reward" for each in several}
        weights = [each["weight"] for each in self._kinds]
        self._bounds = list(accumulate(weights))
        self._num_held = [max(1, round(num_heldout * weight / sum(weights))) for weight in weights]
        """How many problems of each kind are held out, at least 1."""
        self._pool = _GymProcesses(self._kinds, seed, num_problems, timeout_s)

    @property
    def reward_sees(self) -> str:
        place = {"tags": "the last pair of <answer> tags", "text": "the whole text", "number": "the last number"}[self.answer_in]
        return f"what reasoning-gym's verifier says of {place}, in an answer that ended"

    def draw(self, rng: Random) -> GymProblem:
        """A problem to train on. Raises ConfigError if every question seems to be held out, and
        GradingError if each of several problems fails or takes too long to make."""
        dataset = bisect_right(self._bounds, rng.random() * self._bounds[-1])
        own, failures = Random(rng.getrandbits(64)), 0  # a retry leaves the draws after this one as they are
        for _ in range(_ATTEMPTS):
            try:
                problem = self._pool.make(dataset, own.randrange(self._num_held[dataset], self.num_problems))
            except GradingError:  # a resumed run would draw the same one
                failures += 1
                if failures == _FAILURES:
                    raise
                continue
            if problem["question"] not in self._held:
                return problem
        name = self._kinds[dataset]["name"]
        raise ConfigError(f"{_ATTEMPTS} problems of {name} in a row are held out; lower num_heldout, or change task.args.config")

    def heldout(self) -> Sequence[GymProblem]:
        return list(self._held.values())

    def demonstrate(self, problem: Problem, rng: Random) -> str:
        """The generator's own answer, without steps that lead to it. Raises ConfigError where it
        names none."""
        if not problem["answer"]:
            raise ConfigError(f"the problem {problem['id']} has no reference answer to demonstrate; set warmup.steps=0")
        return f"<answer>{problem['answer']}</answer>" if self.answer_in == "tags" else problem["answer"]

    def make_env(self, problem: Problem) -> ReasoningGymEnv:
        return ReasoningGymEnv(self, problem)  # type: ignore[arg-type]

    def find_answer(self, text: str) -> str | None:
        """The answer in the model's text; None without one."""
        if self.answer_in == "text":
            return text.strip() or None
        if self.answer_in == "tags":
            found = tagged_answer(text, template="relaxed")
            return None if found is None else found.strip()
        numbers = NUMBER.findall(text)
        return numbers[-1].replace(",", "") if numbers else None  # most verifiers compare the text

    async def score(self, problem: GymProblem, answer: str) -> float:
        """The verifier's score, from 0 to 1. Raises GradingError past the deadline."""
        score = await self._pool.run_in_thread(self._pool.score, problem, answer)
        return score if self.partial_credit else float(score >= 1.0)

    @cached_property
    def _held(self) -> dict[str, GymProblem]:
        """The first problems of each kind by their questions, each question once."""
        held: dict[str, GymProblem] = {}
        try:
            for kind, count in enumerate(self._num_held):
                for index in range(count):
                    problem = self._pool.make(kind, index)
                    held.setdefault(problem["question"], problem)
        except GradingError as error:
            raise ConfigError(f"{error}; change task.args.config, or raise task.args.timeout_s") from error
        return held

    def info_of(self, problem: GymProblem, reward: float) -> Info:
        """The reward under the name of its kind, if there are several."""
        name = f"rewards/{self._kinds[problem['dataset']]['name']}"
        return {name: reward} if name in self.measures else {}


class ReasoningGymEnv(SingleAgentEnv):
    """One problem, one answer."""

    def __init__(self, task: ReasoningGym, problem: GymProblem) -> None:
        super().__init__()
        self._task, self._problem, self._done = task, problem, False
        self._system_prompt = task.system_prompt

    def env_reset(self, *, seed: int | None = None) -> tuple[str, Info]:
        """The question; the same at every reset, for any seed."""
        self._done = False
        return self._problem["question"], {"question_id": self._problem["id"]}

    async def env_step(self, action: str) -> StepOutcome:  # type: ignore[override]  # the protocol awaits it
        check_step(not self._done, f"problem {self._problem['id']} is already answered")
        self._done = True
        answer = self._task.find_answer(action)
        reward = 0.0 if answer is None else await self._task.score(self._problem, answer)
        info: Info = {
            "question_id": self._problem["id"],
            "parsed_answer": answer,
            "target_answer": self._problem["answer"],
            "answered": answer is not None,
            **self._task.info_of(self._problem, reward),
        }
        return StepOutcome(obs="", reward=reward, truncated=False, terminated=True, info=info)

    def env_current_obs(self) -> str:
        return self._problem["question"]


def _read_kinds(
    name: str | None, config: Mapping[str, Any] | None, datasets: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """`{name, config, weight}` of each kind. Raises ConfigError for anything else."""
    if (name is None) == (datasets is None) or (datasets is not None and config is not None):
        raise ConfigError("task.args needs `name` (and perhaps `config`), such as chain_sum, or `datasets`, a list of several")
    kinds = []
    for each in [{"name": name, "config": config or {}}] if datasets is None else datasets:
        kind = {"weight": 1.0, "config": {}, **each} if isinstance(each, Mapping) else {}
        if kind.keys() != {"name", "weight", "config"} or not isinstance(kind["name"], str):
            raise ConfigError(f"a kind of problems ({each!r}) must be {{name: chain_sum, weight: 1, config: {{...}}}}")
        weight = kind["weight"]
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < inf:
            raise ConfigError(f"the weight of {kind['name']} ({weight!r}) must be a number above 0")
        if not isinstance(kind["config"], Mapping) or kind["config"].keys() & {"seed", "size"}:
            raise ConfigError(f"config ({kind['config']!r}) of {kind['name']} must be a mapping without seed and size")
        kinds.append(kind)
    names = [kind["name"] for kind in kinds]
    if not names or len({*names}) < len(names):
        raise ConfigError(f"the kinds of problems ({', '.join(names)}) must be one or more, each once")
    return kinds


class _GymProcesses(LineProcessPool):
    """Processes that make and judge the problems of some kinds."""

    def __init__(self, kinds: Sequence[Mapping[str, Any]], seed: int, size: int, timeout_s: float, memory_mb: int = 4096) -> None:
        settings = {"datasets": [{"name": each["name"], "config": each["config"]} for each in kinds], "seed": seed, "size": size}
        command = ["env", "PYTHONHASHSEED=0", sys.executable, "-P", str(WORKER), str(memory_mb), json.dumps(settings)]
        super().__init__(command, timeout_s=timeout_s, name="reasoning-gym")
        self._names = [each["name"] for each in kinds]
        state = self.ask({}, "making the generators")
        if "unknown" in state:
            check_value("a name of reasoning-gym's problems", state["unknown"], choices=state["known"])
        if "error" in state:
            raise ConfigError(f"reasoning-gym refuses task.args: {state['error']}")

    def make(self, dataset: int, index: int) -> GymProblem:
        what = f"making problem {index} of {self._names[dataset]}"
        made = self.ask({"dataset": dataset, "index": index}, what)
        question = self.check(made, "question", str, what)
        identity = f"{self._names[dataset]}-{index}"
        return GymProblem(id=identity, question=question, answer=str(made["answer"] or ""), dataset=dataset, index=index)

    def score(self, problem: GymProblem, answer: str) -> float:
        what = f"judging {answer[:80]!r} as the answer to {problem['id']}"
        request = {"dataset": problem["dataset"], "index": problem["index"], "text": answer, "limit_s": 2 * self.timeout_s + 1}
        return float(self.check(self.ask(request, what), "score", float, what))
