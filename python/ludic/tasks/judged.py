"""Reinforcement learning against a reward model: loads the `reward_model` of a recipe, and wraps
the task that it rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ludic.errors import ConfigError, shorten_names
from ludic.files.atomic import read_json
from ludic.files.checkpoints import ADAPTER, ADAPTER_CONFIG
from ludic.inference.local.reward import LocalRewardModel
from ludic.models.loading import check_dtype, load_classifier, load_tokenizer
from ludic.models.lora import load_adapter
from ludic.models.names import WRAPPING
from ludic.models.packed_attention import pin_rope
from ludic.models.places import find_adapter_base, find_place
from ludic.tasks.episodic import EpisodicTask, Played, WrappedTask, share
from ludic.tasks.rewards import NoRewards
from ludic.training.credit_assignment import CombineMode
from ludic.training.reward_scorer import SCORE_INFO, TASK_REWARD_INFO, RewardModelReward, RewardModelScorer


class JudgedTask(WrappedTask):
    """A task that a reward model rewards in training. Everything else stays the task's own.

    Held-out answers keep the task's own reward. The reward that is trained on and the one that
    counts are two numbers, and both are reported.
    """

    def __init__(self, task: EpisodicTask, reward: RewardModelReward, *, source: str) -> None:
        super().__init__(task)
        self._source = source
        self._training_scorer = replace(reward, before=task.training_scorer)
        records_score = replace(reward, before=task.scorer, mode="bonus", rm_coeff=0.0)
        self._scorer = self._training_scorer if is_unrewarded(task) else records_score

    @property
    def training_scorer(self) -> RewardModelReward:
        """Makes the score the reward, or a part of it, as `reward_model_args.mode` says."""
        return self._training_scorer

    @property
    def scorer(self) -> RewardModelReward:
        """Records the score and leaves the reward as it is. For a task without a reward of its own:
        the scorer of training."""
        return self._scorer

    @property
    def reward_is_score(self) -> bool:
        return is_unrewarded(self.task)

    @property
    def reward_sees(self) -> str:
        if self.reward_is_score:
            return f"the score of {self._source} for the whole answer"
        return f"the score of {self._source} in training; held-out rewards are the task's own: {self.task.reward_sees}"

    @property
    def measures(self) -> Mapping[str, str]:
        own_reward = {} if self.reward_is_score else {TASK_REWARD_INFO: "the task's own reward, its mean"}
        return {**self.task.measures, SCORE_INFO: "score of the reward model, its mean", **own_reward}

    @property
    def rates(self) -> Mapping[str, str]:
        return {**self.task.rates, SCORE_INFO: "score of the reward model, its mean"}

    def measure(self, played: Mapping[str, Sequence[Played]]) -> dict[str, float]:
        """The task's rates, and the mean score of the first suite's rollouts."""
        first_suite = next(iter(played.values()))
        infos = [rollout.steps[-1].info for _, rollout in first_suite]
        return {**self.task.measure(played), SCORE_INFO: share(info[SCORE_INFO] for info in infos if SCORE_INFO in info)}


def is_unrewarded(task: EpisodicTask) -> bool:
    """Whether only a reward model rewards its answers."""
    return isinstance(task.scorer, NoRewards)


def judged_by(
    task: EpisodicTask,
    tokenizer: Any,
    source: str,
    device: str,
    *,
    mode: CombineMode = "replace",
    rm_coeff: float = 1.0,
    alpha: float = 0.5,
    unfinished_penalty: float = 10.0,
    normalize: bool = False,
    dtype: str = "float32",
    micro_token_budget: int = 16384,
    batch_size: int = 4096,
    step_end: str | int | None = None,
    timeout_s: float = 600.0,
    max_seq_len: int | None = None,
) -> JudgedTask:
    """`task`, rewarded in training by the model in `source`, which is loaded on `device`.
    `tokenizer` is the policy's.

    The keywords are arguments of `RewardModelReward`, `RewardModelScorer` and `load_reward_model`.
    """
    scorer = RewardModelScorer(
        load_reward_model(source, dtype=dtype, device=device, micro_token_budget=micro_token_budget, max_seq_len=max_seq_len),
        batch_size=batch_size,
        policy_tokenizer=tokenizer,
        step_end=step_end,
        normalize=normalize,
        timeout_s=timeout_s,
    )
    return JudgedTask(
        task, RewardModelReward(scorer, mode, rm_coeff, alpha, unfinished_penalty=unfinished_penalty), source=source
    )


def load_reward_model(
    source: str,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    micro_token_budget: int = 16384,
    max_seq_len: int | None = None,
) -> LocalRewardModel:
    """A model with one label: a folder in Hugging Face layout, of a `ludic train-rm` run or of
    adapters, or a hub id. `max_seq_len`: RoPE that depends on length is computed for sequences of
    this number of tokens (`pin_rope`).

    Weights are read from safetensors only. Raises ConfigError for a model without a head, or
    adapters of one, which would score by chance.
    """
    check_dtype(dtype)
    folder = find_place(source, ADAPTER_CONFIG)
    base, model = (source, _classifier(source, dtype)) if folder is None else _merged(source, folder, dtype)
    pin_rope(model, max_seq_len)
    return LocalRewardModel(
        model.requires_grad_(False).to(device).eval(), load_tokenizer(base), micro_token_budget=micro_token_budget, name=source
    )


_REMEDY = "name a reward model, such as the folder of a `ludic train-rm` run"


def _classifier(source: str, dtype: str) -> Any:
    """The classifier in a folder. Raises ConfigError if its head is not there."""
    model, missing = load_classifier(source, dtype, description=f"reward_model ({source})")
    if missing:
        kind = " or ".join(model.config.architectures or [model.config.model_type])
        raise ConfigError(f"reward_model ({source}, a {kind}) has no weights for {shorten_names(sorted(missing))}; {_REMEDY}")
    if model.config.num_labels != 1:
        raise ConfigError(f"reward_model ({source}) gives {model.config.num_labels} labels; a reward is one number")
    return model


def _merged(source: str, adapters: Path, dtype: str) -> tuple[str, Any]:
    """The base of the adapters, and the base model with the adapters merged into it. The head is
    from the adapters or from the base."""
    base = find_adapter_base(adapters)
    kind = read_json(adapters / ADAPTER_CONFIG).get("task_type")
    if kind == "CAUSAL_LM":
        raise ConfigError(f"reward_model ({source}) holds adapters of a language model ({kind}); {_REMEDY}")
    model, missing = load_classifier(base, dtype, description=f"the base of reward_model ({source}), {base},", num_labels=1)
    try:
        with safe_open(adapters / ADAPTER, framework="pt") as stored:
            theirs = {name.removeprefix(WRAPPING) for name in stored.keys()}  # noqa: SIM118  it is no mapping
        if not theirs.issuperset(missing):
            raise ConfigError(
                f"reward_model ({source}) and its base ({base}) lack weights {shorten_names(sorted(missing - theirs))}; {_REMEDY}"
            )
        return base, load_adapter(model, adapters).merge_and_unload()
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = " ".join(str(error).split())
        raise ConfigError(f"the adapters of reward_model ({source}) do not fit {base}: {reason[:300]}") from error
