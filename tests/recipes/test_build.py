"""Objects built from names, and the errors of unknown names."""

import re
from pathlib import Path
from random import Random

import numpy as np
import pytest
from chat_tokenizers import merging_tokenizer

from ludic.cli import app as cli
from ludic.errors import ConfigError
from ludic.models.byte_tokenizer import make_byte_tokenizer
from ludic.recipes.build import build_algorithm, build_episodic_task, build_task, build_trainer_config, normalize_each
from ludic.recipes.compose import compose, to_yaml
from ludic.recipes.epochs_schema import compose_rm, compose_sft
from ludic.recipes.model import build_policy, build_reward_model, make_small_model
from ludic.recipes.schema import TaskSection
from ludic.runs.directory import RunDirectory
from ludic.runs.reinforce import RLRun
from ludic.tasks import DigitSort
from ludic.training.algorithm import RLAlgorithm
from ludic.training.config import TrainerConfig
from ludic.training.credit_assignment import GroupNormalizedReturn, MonteCarloReturn, OverlongPenalty
from ludic.training.group_credit import EachRewardNormalized
from ludic.training.presets import make_cispo
from ludic.training.presets.registry import REGISTRY
from ludic.training.process_rewards import ProcessReward
from ludic.training.reward_functions import RewardFunctions
from ludic.training.types import ActorTokenLogps, SampleAttachments, SAWBatch, SAWItem


def make_own(group_size: int, eps: float = 0.1) -> RLAlgorithm:
    parts = make_cispo(group_size=group_size, clip_eps_high=eps)
    return RLAlgorithm("own", parts.credit_assigner, parts.loss, parts.preprocess)


def make_nothing() -> str:
    return "nothing"


class AlwaysSeven(DigitSort):
    """A user-defined task."""


def test_the_small_model_has_the_documented_size() -> None:
    model = make_small_model(compose().network)
    assert sum(parameter.numel() for parameter in model.parameters()) == 427_520


@pytest.mark.parametrize("name", sorted(REGISTRY))
@pytest.mark.parametrize("recipe", ["sort", "addition", "code", "maxent", "tictactoe", "tools"])
def test_every_algorithm_is_built_with_the_settings_of_every_recipe(recipe: str, name: str) -> None:
    assert build_algorithm(compose([recipe, f"algorithm={name}"])).name == name


def test_an_algorithm_of_your_own_is_named_by_module_and_function() -> None:
    recipe = compose([f"algorithm={__name__}:make_own", "algorithm_args.eps=0.4", "rollout.group_size=6"])
    algorithm = build_algorithm(recipe)
    assert (algorithm.name, algorithm.loss.clip_eps_high) == ("own", 0.4)
    assert RunDirectory.default_name(recipe) == "sort-make_own-seed0"


def test_the_algorithms_group_size_is_that_of_the_rollouts() -> None:
    credit = build_algorithm(compose(["rollout.group_size=4"])).credit_assigner
    assert isinstance(credit, GroupNormalizedReturn)
    assert credit.group_size == 4
    assert isinstance(build_algorithm(compose(["algorithm=reinforce"])).credit_assigner, MonteCarloReturn)


def test_process_rewards_replace_the_algorithms_credit_and_keep_its_length_penalty() -> None:
    settings = ["rollout.group_size=4", "process_reward={mode: as_is, gamma: 0.9, normalize: none}"]
    credit = build_algorithm(compose(settings)).credit_assigner
    assert credit == ProcessReward(4, "as_is", 0.9, "none")
    dapo = build_algorithm(compose([*settings, "algorithm=dapo"]), max_completion_tokens=10).credit_assigner
    assert dapo == OverlongPenalty(credit, 10, 2)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["process_reward.mode=sum"], r"mode \('sum'\) .*returns"),
        (["process_reward.gama=1"], r"process_reward\.gama: .*gamma"),
        *(
            (["process_reward.mode=returns", f"algorithm={name}"], f"process_reward .*{name}")
            for name in ("maxent_grpo", "gspo", "gmpo", "reinforce_baseline")
        ),
    ],
)
def test_process_rewards_that_cannot_be_are_refused(settings: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build_algorithm(compose(settings))


@pytest.mark.parametrize("name", ["grpo", "maxent_grpo", "reinforce"])  # with and without a check of its own
def test_answers_that_the_limit_cut_off_are_left_out_after_the_advantages(name: str) -> None:
    algorithm = build_algorithm(compose([f"algorithm={name}", "rollout.mask_truncated=true"]))
    reasons = ["stop", "length", "stop"]
    logps = SampleAttachments(actor_logps=ActorTokenLogps(token_logps=[-1.0]))
    items = [SAWItem([1, 2], [1, 1], [0, 1], 1.0, {"finish_reason": reason}, logps) for reason in reasons]
    kept = algorithm.preprocess(SAWBatch(items))
    assert [item.meta["finish_reason"] for item in kept.items] == ["stop", "stop"]


@pytest.mark.parametrize("sharded", [False, True])
def test_a_model_is_loaded_with_the_arguments_of_the_recipe(tmp_path: Path, monkeypatch, sharded: bool) -> None:
    """The whole one, and the one without weights of other ranks; a reward model too."""
    make_small_model(compose(["sort"]).network).save_pretrained(tmp_path)
    make_byte_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr("ludic.recipes.model.has_no_weights", lambda section: sharded)
    eager = [f"model={tmp_path}", "model_init_kwargs.attn_implementation=eager"]
    policy, tokenizer = build_policy(compose(["sort", *eager]))
    assert policy.config._attn_implementation == "eager"
    assert build_reward_model(compose_rm(eager), tokenizer).config._attn_implementation == "eager"
    assert build_policy(compose(["sort", *eager[:1]]))[0].config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["model=m", "model_init_kwargs.trust_remote_code=true"],
            r"\(trust_remote_code\) must be of attn_implementation, .* revision",
        ),
        (["model=m", "model_init_kwargs.use_safetensors=false"], r"\(use_safetensors\) must be of"),
        (["model_init_kwargs.revision=main"], "with a `model`"),
    ],
)
def test_arguments_that_no_model_is_loaded_with_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_policy(compose(["sort", *arguments]))


def test_the_help_lists_every_algorithm() -> None:
    assert sorted(REGISTRY) == re.split(", | or ", cli.ALGORITHMS)


def test_dapo_penalises_at_the_token_limit_of_an_answer() -> None:
    credit = build_algorithm(compose(["algorithm=dapo"]), max_completion_tokens=50).credit_assigner
    assert isinstance(credit, OverlongPenalty)
    assert (credit.max_tokens, credit.buffer_tokens) == (50, 10)
    assert RLRun.build(compose(["algorithm=dapo", "rollout.max_new_tokens=40"]), print).algorithm.credit_assigner.max_tokens == 40


def test_a_users_task_is_named_by_module_and_class() -> None:
    task = build_task(TaskSection(kind=f"{__name__}:AlwaysSeven", args={"digits": 3}))
    assert isinstance(task, AlwaysSeven)
    assert len(task.draw(Random(0))["answer"]) == 3


def test_the_trainer_config_knows_what_the_recipe_set_explicitly() -> None:
    cfg = build_trainer_config(compose(["trainer.eval_max_steps=3"]).trainer, pad_token_id=7, seed=5)
    assert (cfg.pad_token_id, cfg.seed, cfg.eval_max_steps) == (7, 5, 3)
    assert cfg.was_set("eval_max_steps")
    assert not cfg.was_set("eval_concurrency")


def test_a_setting_that_is_set_to_its_default_counts_as_set(tmp_path: Path) -> None:
    default = TrainerConfig().eval_concurrency
    recipe = compose([f"trainer.eval_concurrency={default}"])
    cfg = build_trainer_config(recipe.trainer, pad_token_id=7, seed=5)
    assert cfg.eval_limits(max_steps=None, timeout_s=None, concurrency=None)["concurrency"] == default
    (tmp_path / "config.yaml").write_text(to_yaml(recipe))  # a resumed run reads its settings from a file
    again = build_trainer_config(compose([str(tmp_path / "config.yaml")]).trainer, pad_token_id=7, seed=5)
    assert again.was_set("eval_concurrency")
    assert not again.was_set("eval_max_steps")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["algorithm=crispo"], r"algorithm \(crispo\) .*did you mean cispo"),
        (["algorithm=x"], r"cispo, dapo, dr_grpo.*, .*module:function"),
        ([f"algorithm={__name__}:absent"], r"has no 'absent'"),
        ([f"algorithm={__name__}:REGISTRY"], r"is dict; it must return an RLAlgorithm"),
        ([f"algorithm={__name__}:make_nothing"], r"returned str; it must return an RLAlgorithm"),
        ([f"algorithm={__name__}:make_own", "algorithm_args.esp=1"], r"algorithm_args\.esp: make_own .* did you mean eps\?"),
        (["algorithm_args.clip_eps_hi=0.3"], r"algorithm_args\.clip_eps_hi: .* did you mean clip_eps_high\?"),
    ],
)
def test_the_error_of_an_invalid_algorithm_has_a_remedy(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_algorithm(compose(arguments))


class Sized:
    """A task of the user's with an argument."""

    def __init__(self, size):
        self.size = size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["task.kind=srot"], r"task\.kind \(srot\) .*did you mean sort\?"),
        (["task.args.digit=5"], r"task\.args\.digit: DigitSort .*did you mean digits\?"),
        ([f"task.kind={__name__}:Sized"], r"Sized needs size; set task\.args\.size=VALUE"),
        (["task.kind=nowhere:Task"], r"task\.kind \(nowhere:Task\) cannot be imported"),
        (["addition", "task.args.right=2"], r"right \(2\) .*at most 1"),
    ],
)
def test_the_error_of_an_invalid_task_has_a_remedy(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_task(compose(arguments).task)


@pytest.mark.parametrize(
    "override", ["steps=-1", "threads=0", "rollout.prompts=0", "evaluation.prompts=0", "warmup.batch_size=0"]
)
def test_the_error_of_a_count_that_is_too_small_names_it(override: str) -> None:
    key = override.split("=")[0]
    with pytest.raises(ConfigError, match=rf"{key} \(.*\) .*at least [01]"):
        compose([override])


@pytest.mark.parametrize("override", ["checkpoint.layout=deep", "checkpoint.static_files=nowhere"])
def test_wrong_settings_of_checkpoints_are_refused_before_a_run_begins(override: str) -> None:
    with pytest.raises(ConfigError, match=override.partition("=")[2]):
        RLRun.build(compose([override]), print)
    with pytest.raises(ConfigError, match=override.partition("=")[2]):
        compose_sft(["data=rows.jsonl", override])


def test_a_network_whose_size_is_not_divisible_by_its_heads_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"network\.hidden_size \(100\) .*a multiple of network\.num_heads \(8\)"):
        compose(["network.hidden_size=100", "network.num_heads=8"])
    with pytest.raises(ConfigError, match=r"network\.num_heads \(8\) .*a multiple of network\.num_kv_heads \(3\)"):
        compose_sft(["data=rows.jsonl", "network.hidden_size=64", "network.num_heads=8", "network.num_kv_heads=3"])


def test_the_small_model_has_the_vocabulary_of_the_named_tokenizer(tmp_path: Path) -> None:
    merging_tokenizer().save_pretrained(tmp_path)
    recipe = compose([f"tokenizer={tmp_path}"])
    model, tokenizer = build_policy(recipe)
    assert len(tokenizer) != len(make_byte_tokenizer())
    assert model.get_input_embeddings().num_embeddings == len(tokenizer)
    assert (model.config.pad_token_id, model.config.eos_token_id) == (tokenizer.pad_token_id, tokenizer.eos_token_id)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.group_size=1"], r"group_size \(1\) must be at least 2"),
        (["rollout.temperature=0"], r"rollout\.temperature \(0\) gives equal answers, and grpo compares"),
        (["rollout.temperature=0", "algorithm=cispo"], "and cispo compares them"),
    ],
)
def test_a_run_that_cannot_learn_is_refused_before_it_starts(overrides, message):
    with pytest.raises(ConfigError, match=message):
        build_algorithm(compose(["sort", "algorithm=grpo", *overrides]))


@pytest.mark.parametrize(
    "overrides", [["algorithm=reinforce", "rollout.group_size=1"], ["algorithm=grpo", "rollout.temperature=0", "steps=0"]]
)
def test_a_run_that_can_learn_or_should_not_learn_is_accepted(overrides):
    build_algorithm(compose(["sort", *overrides]))


@pytest.mark.parametrize(
    ("number", "remedy"), [(0, "$"), (2.5, "$"), ("2", "$"), (np.int64(2), "$"), (lambda self: 2, "; make it a property$")]
)
def test_the_numbers_of_a_task_are_whole(monkeypatch, number, remedy):
    monkeypatch.setattr(DigitSort, "max_new_tokens", number)
    with pytest.raises(ConfigError, match=rf"max_new_tokens .*task sort \(.*\) .*at least 1{remedy}"):
        build_episodic_task(compose(["sort"]))


REWARDS = RewardFunctions([lambda completions: [], len], [1.0, 0.5])


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "dapo"])
def test_rewards_are_normalised_apart_inside_the_credit_of_an_algorithm(name: str) -> None:
    recipe = compose([f"algorithm={name}", "algorithm_args.normalize=sample"])
    algorithm = build_algorithm(recipe, max_completion_tokens=50)
    credit = normalize_each(algorithm, REWARDS).credit_assigner
    before = algorithm.credit_assigner
    if isinstance(credit, OverlongPenalty):
        credit, before = credit.inner, before.inner
    assert credit == EachRewardNormalized(before, {"<lambda>": 1.0, "len": 0.5})
    assert credit.inner.normalize == "sample"


@pytest.mark.parametrize(("name", "scorer"), [("rloo", REWARDS), ("dr_grpo", REWARDS), ("remax", REWARDS), ("grpo", None)])
def test_rewards_that_cannot_be_normalised_apart_are_refused(name: str, scorer: RewardFunctions | None) -> None:
    with pytest.raises(ConfigError, match=rf"reward_normalize \(each\) needs reward functions.*{name}$"):
        normalize_each(build_algorithm(compose([f"algorithm={name}"])), scorer)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reward_normalize=each"], r"reward_normalize \(each\) needs reward"),
        (["reward_normalize=apart", "reward=math"], r"reward_normalize \(apart\) must be one of sum, each"),
    ],
)
def test_the_setting_of_several_rewards_is_checked(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose(arguments)


@pytest.mark.parametrize("argument", ["rollout.over_sampling_factor=2", "place.actors=1", "info_seed.num_seeds=2"])
def test_a_greedy_answer_in_each_group_needs_whole_groups(argument: str) -> None:
    with pytest.raises(ConfigError, match=r"algorithm \(remax\) adds a greedy answer"):
        build_algorithm(compose(["algorithm=remax", argument]))
