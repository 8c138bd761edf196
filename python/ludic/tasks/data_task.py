"""A task made of a data set and reward functions: the user's own problem."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, TypeVar

from ludic.data import DataMixture, DataSet, Row, load_data, load_mixture
from ludic.envs.prompt_env import PromptEnv, prompt_shown
from ludic.errors import ConfigError, DataError
from ludic.tasks.base import Problem
from ludic.tasks.rewards import DataRewards, NoRewards, build_rewards, is_one_verifier

PROMPT_COLUMNS = ("prompt", "question", "problem", "instruction")
"""Columns that may hold the prompt, in this order, without `prompt_column`."""
ANSWER_COLUMNS = ("answer", "solution", "target", "completion")
"""Columns that may hold the right answer. Only the report uses it."""


P = TypeVar("P", bound=Problem)


class DataProblem(Problem):
    """A problem and its row of the data set."""

    row: Row


class DataTask:
    """The prompts of a data set, rewarded by reward functions.

    The `num_heldout` prompts with the lowest hashes are held out: the same for any order of the
    file and any seed of the run. All rows of a held-out prompt are held out. `heldout_data` names a
    separate file instead.
    """

    def __init__(
        self,
        data: str | Mapping[str, Any] | DataMixture | None = None,
        reward: Any = None,
        reward_weights: Any = None,
        *,
        prompt_column: str | None = None,
        config: str | None = None,
        split: str = "train",
        num_heldout: int | None = None,
        heldout_data: str | None = None,
        heldout_split: str = "test",
        max_new_tokens: int = 256,
        reward_timeout_s: float = 600.0,
        judged: bool = False,
        eval_reward: Any = None,
        eval_reward_weights: Any = None,
    ) -> None:
        """`data`: a source of `load_data`, or a mixture. `num_heldout` None: a tenth of the
        prompts, at most 200. `config` and `split` are for ids of the `datasets` library. `judged`:
        a reward model scores the answers, so that `reward` is optional. `eval_reward` rewards the
        held-out answers; None: `reward` with its weights."""
        if data is None or (reward is None and not judged):
            raise ConfigError("a problem of your own needs data=FILE and reward=MODULE:FUNCTION, or reward_model=DIRECTORY")
        self.training_scorer = (
            NoRewards() if reward is None else build_rewards(reward, reward_weights, timeout_s=reward_timeout_s)
        )
        """Rewards the answers that are trained on."""
        self.scorer = _make_heldout_scorer(self.training_scorer, eval_reward, eval_reward_weights)
        """Rewards the held-out answers."""
        measured_by = reward if eval_reward is None else eval_reward
        self._is_verified = is_one_verifier(measured_by) and self.scorer.weights == [1.0]
        self.max_new_tokens = max_new_tokens
        data = DataMixture.from_mapping(data) if isinstance(data, Mapping) else data
        if not isinstance(data, str | DataMixture):
            raise ConfigError(
                f"data ({data!r}) must be a file, a folder, a hub id, or {{datasets: [{{id: a.jsonl}}, {{id: b.jsonl}}]}}"
            )
        share = data.test_split_size if isinstance(data, DataMixture) else None
        loaded = _load(data, prompt_column, config, split)
        problems = self._problems(loaded, "")
        if heldout_data is None:
            heldout = _lowest_hashes(problems, num_heldout, loaded.table.name, share=share)
        else:
            heldout = self._problems(_load(heldout_data, prompt_column, config, heldout_split), "heldout-")[:num_heldout]
        seen = {_key(problem) for problem in heldout}
        self.training: Sequence[DataProblem] = [problem for problem in problems if _key(problem) not in seen]
        """The problems to train on, in passes: each once before any is repeated."""
        if not self.training:
            raise ConfigError(
                f"every prompt of {loaded.table.name} is held out and none is left to train on; lower task.args.num_heldout"
            )
        self.digest = loaded.digest()
        """Identifies the content of the data set."""
        self._held = heldout

    @property
    def reward_sees(self) -> str:
        terms = [
            name if weight == 1 else f"{weight:g} * {name}"
            for name, weight in zip(self.training_scorer.names, self.training_scorer.weights, strict=True)
        ]
        return f"what {' + '.join(terms)} returned for the whole answer"

    @property
    def success_reward(self) -> float | None:
        """1 if a built-in verifier is the only reward; None for the user's functions, whose rewards
        for a right answer are unknown."""
        return 1.0 if self._is_verified else None

    @property
    def system_prompt(self) -> str | None:
        """Suggested by a reward function, for prompts and recipes without a system prompt."""
        return self.training_scorer.system_prompt or self.scorer.system_prompt

    @property
    def facts(self) -> Mapping[str, str]:
        return {}

    @property
    def measures(self) -> Mapping[str, str]:
        """The reward of each function, if there are several, averaged where present."""
        return {**_list_measures(self.training_scorer), **self.rates}

    @property
    def rates(self) -> Mapping[str, str]:
        """The same of the functions that reward held-out answers."""
        return _list_measures(self.scorer)

    @property
    def problem_list(self) -> DataTask:
        return self

    def begin_batch(self, number: int) -> None:
        """Tell the reward functions the number of the batch."""
        self.training_scorer.trainer_state.global_step = number

    def draw(self, rng: Random) -> Problem:
        return rng.choice(self.training)

    def heldout(self) -> Sequence[Problem]:
        return self._held

    def demonstrate(self, problem: Problem, rng: Random) -> str:
        """The completion of the row."""
        completion = problem["row"].get("completion")  # type: ignore[typeddict-item]
        if not completion:
            raise ConfigError(
                "a warm-up needs a column `completion` with an answer in every row; disable the warm-up with warmup.steps=0"
            )
        return str(completion if isinstance(completion, str) else completion[-1]["content"])

    def make_env(self, problem: Problem) -> PromptEnv:
        row: Row = problem["row"]  # type: ignore[typeddict-item]
        return PromptEnv(row, system_prompt=self.system_prompt)

    def _problems(self, loaded: DataSet, prefix: str) -> list[DataProblem]:
        """The problems of the rows. Raises DataError, naming the row, if a reward function
        cannot judge it."""
        scorers = (self.training_scorer, self.scorer)
        for scorer in scorers:
            scorer.check_columns([name for name in loaded.columns if name not in ("prompt", "completion")])
        problems = []
        for index, row in enumerate(loaded.rows):
            try:
                for scorer in scorers:
                    scorer.check_row(row)
            except DataError as error:
                raise DataError(f"{loaded.where(index)}: {error}") from error
            shown = next((str(row[name]) for name in ANSWER_COLUMNS if row.get(name) is not None), "")
            problems.append(DataProblem(id=f"{prefix}{index}", question=prompt_shown(row["prompt"]), answer=shown, row=row))
        return problems


def _make_heldout_scorer(training: DataRewards, reward: Any, weights: Any) -> DataRewards:
    if reward is None:
        if weights is not None:
            raise ConfigError("eval_reward_weights are those of eval_reward; set eval_reward too")
        return training.for_evaluation()
    built = build_rewards(reward, weights, timeout_s=training.timeout_s, setting="eval_reward")
    built.is_eval, built.trainer_state = True, training.trainer_state
    return built


def _list_measures(scorer: DataRewards) -> dict[str, str]:
    return {f"rewards/{name}": f"{name}, its mean" for name in scorer.names} if len(scorer.names) > 1 else {}


def _load(source: str | DataMixture, prompt_column: str | None, config: str | None, split: str) -> DataSet:
    columns = {"prompt": prompt_column or PROMPT_COLUMNS}
    if isinstance(source, DataMixture):
        return load_mixture(source, columns=columns)
    return load_data(source, kind="prompt", columns=columns, config=config, split=split)


def _lowest_hashes(
    problems: Sequence[DataProblem], requested: int | None, source: str, *, share: float | None
) -> list[DataProblem]:
    """One problem for each held-out prompt: `requested`, else a `share` of them, else a tenth, at
    most 200."""
    number = requested
    if number is None and share is not None:
        number = max(1, round(share * len({_key(problem) for problem in problems})))
    return hold_out(problems, number, source, key=_key)


def hold_out(problems: Sequence[P], number: int | None, source: str, *, key: Callable[[P], str] | None = None) -> list[P]:
    """The first of the problems with each of the `number` lowest keys, by default hashes of the
    questions; None: a tenth of them, at most 200. The same for any order of the problems."""
    find_key = key or _question_key
    distinct = {find_key(problem): problem for problem in reversed(problems)}
    if number is None:
        number = min(200, max(1, len(distinct) // 10))
    if not 1 <= number < len(distinct):
        raise ConfigError(
            f"num_heldout ({number}) must be at least 1 and less than the {len(distinct)} different prompts of {source}; or name "
            "a separate file with task.args.heldout_data"
        )
    return [distinct[key] for key in sorted(distinct)[:number]]


def _question_key(problem: Problem) -> str:
    return hashlib.sha256(problem["question"].encode("utf-8", "surrogatepass")).hexdigest()


def _key(problem: DataProblem) -> str:
    return hashlib.sha256(json.dumps(problem["row"]["prompt"], sort_keys=True).encode()).hexdigest()
