"""A task made of a data set and reward functions: the user's own problem."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, NotRequired, TypeVar

import numpy as np
from numpy.typing import NDArray

from ludic.data import DataMixture, DataSet, Row, load_data, load_mixture
from ludic.data.row_images import check_images, has_images, intern_row, list_images
from ludic.data.rows_on_disk import Changed
from ludic.envs.dataset_qa_env import PromptEnv, prompt_shown, right_answer
from ludic.errors import ConfigError, DataError, check_value
from ludic.images.content import show_content
from ludic.images.store import digest_of
from ludic.tasks.episodic import Problem, ProblemList
from ludic.tasks.rewards import DataRewards, NoRewards, build_rewards, is_one_verifier

PROMPT_COLUMNS = ("prompt", "question", "problem", "instruction")
"""Columns that may hold the prompt, in this order, without `prompt_column`."""


class DataProblem(Problem):
    """A problem and its row of the data set."""

    row: Row
    images_of: NotRequired[tuple[str, str | None]]
    """Of a row with images: where it is, and the folder of its data file."""


class DataTask(ProblemList):
    """The prompts of a data set, rewarded by reward functions."""

    def __init__(
        self,
        data: TaskData | str | Mapping[str, Any] | DataMixture | None = None,
        reward: Any = None,
        reward_weights: Any = None,
        *,
        max_new_tokens: int = 256,
        reward_timeout_s: float | None = None,
        judged: bool = False,
        eval_reward: Any = None,
        eval_reward_weights: Any = None,
    ) -> None:
        """Without a source but with `heldout_data`, as in a benchmark, every problem is held out.
        `reward_timeout_s`: the deadline of a call of a reward function with all completions of a
        batch. None means 600 s for coroutine functions, and no deadline for plain ones, which run
        in a thread of their own if it is set. `judged`: a reward model scores the answers, so that
        `reward` is optional. `eval_reward` rewards the held-out answers. None means `reward` with
        its weights."""
        given = data if isinstance(data, TaskData) else TaskData(data)
        if (given.source or given.heldout_data) is None or (reward is None and not judged):
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
        rows = TaskData.of(data)
        self._image_folder = None if rows.image_folder is None else Path(rows.image_folder).expanduser()
        loaded = _load(rows, *rows.first_source)

        def read(source: str | DataMixture, split: str, prefix: str) -> Sequence[DataProblem]:
            return self._make_problems(_load(replace(rows, streaming=False), source, split) if prefix else loaded, prefix)

        def key(problem: DataProblem) -> str:
            row = problem["row"]
            shown = [row["prompt"], *map(_digest_image, list_images(row))] if "images_of" in problem else row["prompt"]
            return hash_text(json.dumps(shown, sort_keys=True, default=_digest_image))

        _, self.training, self._held = rows.divide(read, key=key, name=loaded.table.name)
        self.digest = loaded.digest()

    @property
    def reward_sees(self) -> str:
        trained, held_out = (
            " + ".join(
                name if weight == 1 else f"{weight:g} * {name}" for name, weight in zip(each.names, each.weights, strict=True)
            )
            for each in (self.training_scorer, self.scorer)
        )
        both = trained == held_out or not trained  # a reward model may be the only reward of training
        in_training = "" if both else f", and in training what {trained} returned"
        return f"what {held_out} returned for the whole answer{in_training}"

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
    def measures(self) -> Mapping[str, str]:
        """The reward of each function, if there are several, averaged where present."""
        return {**_list_measures(self.training_scorer), **self.rates}

    @property
    def rates(self) -> Mapping[str, str]:
        """The same of the functions that reward held-out answers."""
        return _list_measures(self.scorer)

    def begin_batch(self, number: int) -> None:
        """Tell the reward functions the number of the batch."""
        self.training_scorer.trainer_state.global_step = number

    def heldout(self) -> Sequence[Problem]:
        return self._held

    def demonstrate(self, problem: Problem, rng: Random) -> str:
        """The completion of the row."""
        completion = problem["row"].get("completion")  # type: ignore[typeddict-item]
        if not completion:
            raise ConfigError("a warm-up needs a column `completion` with an answer in every row; disable it with warmup.steps=0")
        return str(completion if isinstance(completion, str) else completion[-1]["content"])

    def make_env(self, problem: Problem) -> PromptEnv:
        row: Row = problem["row"]  # type: ignore[typeddict-item]
        if "images_of" in problem:
            where, folder = problem["images_of"]  # type: ignore[typeddict-item]
            row = intern_row(row, None if folder is None else Path(folder), where)
        return PromptEnv(row, system_prompt=self.system_prompt)

    def _make_problems(self, loaded: DataSet, prefix: str) -> Sequence[DataProblem]:
        """The problems of the rows; of rows on disk, made on access. Raises
        DataError, naming the row, if a reward function cannot judge it."""
        scorers = (self.training_scorer, self.scorer)
        columns = [name for name in loaded.columns if name not in ("prompt", "completion")]
        for scorer in scorers:
            scorer.check_columns([*columns, "images"] if has_images(loaded.rows[0]) else columns)
        checking = [scorer for scorer in scorers if scorer.checks_rows]
        for index, row in enumerate(loaded.rows) if checking else ():  # rows on disk are read for it
            try:
                for scorer in checking:
                    scorer.check_row(row)
            except DataError as error:
                raise DataError(f"{loaded.where(index)}: {error}") from error

        def make(index: int, row: Row) -> DataProblem:
            question = show_content(prompt_shown(row["prompt"]))
            problem = DataProblem(id=f"{prefix}{index}", question=question, answer=right_answer(row), row=row)
            if has_images(row):
                folder = self._image_folder or loaded.table.folder_of(index)
                problem["images_of"] = loaded.where(index), None if folder is None else str(folder)
            return problem

        for index, row in enumerate(loaded.rows) if isinstance(loaded.rows, list) else ():
            check_images(row, self._image_folder or loaded.table.folder_of(index), loaded.where(index))
        problems = Changed(loaded.rows, make)
        return list(problems) if isinstance(loaded.rows, list) else problems


def _digest_image(image: Any) -> str:
    """What tells one image of a row from another, without reading files."""
    if isinstance(image, Mapping):
        image = image["path"] if image.get("bytes") is None else image["bytes"]
    return digest_of(image) if isinstance(image, bytes) else str(image)


def _make_heldout_scorer(training: DataRewards, reward: Any, weights: Any) -> DataRewards:
    if reward is None:
        if weights is not None:
            raise ConfigError("eval_reward_weights weigh eval_reward; set eval_reward too")
        return training.for_evaluation()
    built = build_rewards(reward, weights, timeout_s=training.plain_timeout_s, setting="eval_reward")
    built.is_eval, built.trainer_state = True, training.trainer_state
    return built


def _list_measures(scorer: DataRewards) -> dict[str, str]:
    return {f"rewards/{name}": f"{name}, its mean" for name in scorer.names} if len(scorer.names) > 1 else {}


def _load(rows: TaskData, source: str | DataMixture, split: str) -> DataSet:
    columns: dict[str, str | Sequence[str]] = {"prompt": rows.prompt_column or PROMPT_COLUMNS}
    columns |= {"answer": rows.answer_column} if rows.answer_column else {}
    if isinstance(source, DataMixture):
        if rows.streaming:
            raise ConfigError("streaming=true reads one file, folder or hub id, not a mixture; set streaming=false")
        return load_mixture(source, columns=columns)
    return load_data(source, kind="prompt", columns=columns, config=rows.config, split=split, streaming=rows.streaming)


P = TypeVar("P", bound=Problem)
Source = str | DataMixture
Keys = NDArray[np.bytes_]
MOST_HELD_OUT = 200
"""Of those that are chosen by their number."""


@dataclass(frozen=True)
class TaskData:
    """The data set of a task. Its fields but `source` and `streaming` are settings of
    `task.args`.

    Example: `TaskData("problems.jsonl", num_heldout=50)`.
    """

    source: Any = None
    """A source of `load_data`, or a mixture of several, as `DataMixture` or its mapping. None means
    that there is nothing to train on, and `heldout_data` is all there is."""
    prompt_column: str | None = None
    """None means the first of the usual columns of a prompt that the rows have."""
    answer_column: str | None = None
    """The column that reward functions get as `answer`. None means the one of that name, if any."""
    config: str | None = None
    """Of an id of the `datasets` library."""
    split: str = "train"
    num_heldout: int | None = None
    """The prompts with the lowest hashes, the same for any order of the rows and any seed. None
    means a tenth of the prompts, at most 200. All rows of a held-out prompt are held out."""
    heldout_data: str | None = None
    """Data that is held out instead, its first `num_heldout` rows if that is given."""
    heldout_split: str = "test"
    image_folder: str | None = None
    """What paths of images in rows are relative to, and may not leave. None means the folder of
    each data file."""
    streaming: bool = False
    """Leave the rows of `source` on disk, and read each again when its problem is played. A setting
    of its own in a recipe."""

    @classmethod
    def of(cls, data: TaskData | Source | Mapping[str, Any] | None) -> TaskData:
        """The record itself, or one of a source alone. ConfigError for other values."""
        given = data if isinstance(data, TaskData) else cls(data)
        source = given.source
        if source is None and given.heldout_data is not None:
            return given
        if isinstance(source, Mapping):
            return cls(**{**vars(given), "source": DataMixture.from_mapping(source)})
        if not isinstance(source, str | DataMixture):
            raise ConfigError(f"data ({source!r}) must be a file, a folder, a hub id, or {{datasets: [{{id: a.jsonl}}]}}")
        return given

    @property
    def first_source(self) -> tuple[Any, str]:
        """The source with its split; `heldout_data` with its own if that is all there is."""
        return (self.heldout_data, self.heldout_split) if self.source is None else (self.source, self.split)

    def divide(
        self, read: Callable[[Any, str, str], Sequence[P]], *, key: Callable[[P], str], name: str | None = None
    ) -> tuple[Sequence[P], Sequence[P], Sequence[P]]:
        """(all problems of the first source, those to train on, those held out).

        `read` returns the problems of (a source, its split, a prefix of their ids); problems with
        the same `key`, a hash in hex digits, have the same prompt. `name` is the source's in
        messages.
        """
        problems = read(*self.first_source, "")
        if self.source is None:
            return problems, [], problems[: self.num_heldout]
        shown = name or str(self.source)
        keys = _list_keys(problems, key)
        if self.heldout_data is not None:
            heldout = read(self.heldout_data, self.heldout_split, "heldout-")[: self.num_heldout]
            held_keys = _list_keys(heldout, key)
        else:
            number = self.num_heldout
            share = self.source.test_split_size if isinstance(self.source, DataMixture) else None
            if number is None and share is not None:
                number = max(1, round(share * len(np.unique(keys))))
            held_keys, rows = hold_out(keys, number, shown)
            heldout = [problems[row] for row in rows]
        kept = np.flatnonzero(~np.isin(keys, held_keys))
        training: Sequence[P] = Changed(array("q", kept.tolist()), lambda _, row: problems[row])
        if not self.streaming:
            training = list(training)
        if not training:
            raise ConfigError(f"every prompt of {shown} is held out and none is left to train on; lower task.args.num_heldout")
        return problems, training, heldout


def hold_out(keys: Keys, number: int | None, source: str) -> tuple[Keys, list[int]]:
    """(the `number` lowest keys, the first row that has each). None means a tenth of the different
    keys, at most 200. The same prompts for any order of the rows.

    Example: the keys c a b a and number 2 are (a b, rows 1 and 2).
    """
    distinct, first = np.unique(keys, return_index=True)
    if len(distinct) == 1:
        raise ConfigError(f"{source} needs two prompts or more, one held out (rows: {len(keys)}); or set task.args.heldout_data")
    if number is None:
        number = min(MOST_HELD_OUT, max(1, len(distinct) // 10))
    hint = f"{source} has {len(distinct)} different prompts; or set heldout_data"
    check_value("num_heldout", number, hint, least=1, most=len(distinct) - 1)
    return distinct[:number], first[:number].tolist()


def _list_keys(problems: Sequence[P], key: Callable[[P], str]) -> Keys:
    """The first 16 bytes of each key, in its order."""
    return np.fromiter((bytes.fromhex(key(problem)[:32]) for problem in problems), "S16", len(problems))


def hash_text(text: str) -> str:
    """A key of prompts, by whose order they are held out."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
