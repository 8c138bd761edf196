"""Flat recipe files of MaxEnt-GRPO: every key is translated or named, and the pair differs only
where it should."""

import json

import pytest
import yaml
from omegaconf import OmegaConf

from ludic.errors import ConfigError
from ludic.recipes import flat_recipe
from ludic.recipes.build import build_algorithm, build_controllers, build_trainer_config
from ludic.recipes.compose import compose, list_settings
from ludic.recipes.flat_recipe import KNOWN, WITHOUT_EFFECT, from_flat, is_flat, translate_name
from ludic.recipes.foreign_names import SEED
from ludic.recipes.sections import ControllersSection
from ludic.training.loss import CompositeLoss, ListwiseLoss, ReferenceKLLoss
from ludic.training.maxent.credit import ListwiseCredit
from ludic.training.presets import make_grpo, make_maxent_grpo

COMMON = {
    "model_name_or_path": "Qwen/Qwen2.5-1.5B-Instruct",
    "dataset_name": "open-r1/OpenR1-Math-220k",
    "dataset_prompt_column": "problem",
    "dataset_solution_column": "answer",
    "eval_dataset_name": "HuggingFaceH4/MATH-500",
    "eval_dataset_split": "test",
    "output_dir": "var/data/pair",
    "seed": 42,
    "evaluation_strategy": "steps",
    "eval_steps": 25,
    "per_device_eval_batch_size": 8,
    "bf16": True,
    "learning_rate": 1e-6,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.2,
    "adam_beta2": 0.99,
    "adam_epsilon": 1e-6,
    "max_grad_norm": 0.15,
    "num_generations": 16,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 32,
    "max_prompt_length": 2096,
    "max_completion_length": 2048,
    "max_steps": 2000,
    "clip_range": 0.05,
    "init_kl_coeff": 0.5,
    "kl_target": 0.07,
    "kl_horizon": 500,
    "kl_ctl_step_size": 1.0,
    "logging_steps": 1,
    "save_steps": 50,
    "gen_temperature": 1.0,
    "gen_top_p": 1.0,
    "vllm_stop_sequences": ["</answer>"],
    "maxent_reference_logprobs_source": "model",
    "maxent_logprob_chunk_size": 64,
}
"""What the two recipes of the document's pair share (their facts, not their text)."""
GRPO = {**COMMON, "train_grpo_objective": True, "force_custom_loop": True}
MAXENT = {
    **COMMON,
    "train_grpo_objective": False,
    "maxent_tau": 1e-4,
    "maxent_q_temperature": 0.7,
    "maxent_target_weight_entropy": 2.2,
    "maxent_target_weight_entropy_start": 1.2,
    "maxent_target_weight_entropy_final": 2.2,
    "maxent_target_weight_entropy_horizon": 2000,
    "maxent_tau_lr": 1e-3,
    "maxent_tau_min": 1e-6,
    "maxent_tau_max": 1.0,
    "maxent_tau_warmup_steps": 200,
    "maxent_score_tail_tokens": 512,
    "maxent_use_clip_objective": True,
    "maxent_clip_adv_baseline": 0.25,
    "controller_meta_enabled": True,
    "controller_meta_tau_lr": 0.02,
    "controller_meta_beta_lr": 0.01,
    "controller_meta_beta_grad_clip": 5.0,
}
SHARED = {
    "task": {
        "kind": "data",
        "args": {"prompt_column": "problem", "heldout_data": "HuggingFaceH4/MATH-500", "heldout_split": "test"},
    },
    "model": "Qwen/Qwen2.5-1.5B-Instruct",
    "data": "open-r1/OpenR1-Math-220k",
    "reward": "pure_accuracy_math",
    "output": "var/data",
    "name": "pair",
    "seed": 42,
    "steps": 2000,
    "log_every": 1,
    "rollout": {"prompts": 4, "group_size": 16, "max_new_tokens": 2048, "temperature": 1.0, "top_p": 1.0},
    "trainer": {
        "lr": 1e-6,
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.2,
        "warmup_steps": 0,
        "lr_min_ratio": 0.0,
        "betas": [0.9, 0.99],
        "eps": 1e-6,
        "max_grad_norm": 0.15,
        "max_seq_len": 4144,
        "micro_token_budget": 8192,
        "mixed_precision_dtype": "bf16",
        "eval_every_n_steps": 25,
        "minibatches_per_batch": 1,
    },
    "checkpoint": {"every_n_steps": 50, "max_to_keep": None},
    "report_header": True,
    "report_aliases": True,
    "reference": {"source": "model"},
}
DOCUMENT_FORM = {"form": "likelihood", "baseline": "none", "sampler_exponent": 0.0}
KL = {"target": 0.07, "horizon": 500, "step_size": 1.0}


def test_the_grpo_recipe_of_the_pair():
    translated = from_flat(GRPO)
    assert translated.recipe == {
        **SHARED,
        "algorithm": "grpo",
        "algorithm_args": {
            "reference_kl": 0.5,
            "kl_level": "sequence",
            "clip_eps_low": 0.05,
            "clip_eps_high": 0.05,
            "group_normalize_adv": False,
        },
        "controllers": {"kl": KL},
    }
    named = {"dataset_solution_column", "evaluation_strategy", "per_device_eval_batch_size", "vllm_stop_sequences"}
    assert set(translated.without_effect) == named | {"maxent_logprob_chunk_size", "force_custom_loop"}


def test_the_maxent_recipe_of_the_pair():
    translated = from_flat(MAXENT)
    assert translated.recipe == {
        **SHARED,
        "algorithm": "maxent_grpo",
        "algorithm_args": {
            "tau": 1e-4,
            "beta": 0.5,
            "kl_level": "sequence",
            "q_temperature": 0.7,
            **DOCUMENT_FORM,
            "clip_coeff": 1.0,
            "clip_baseline": 0.25,
            "clip_eps_low": 0.05,
            "clip_eps_high": 0.05,
        },
        "controllers": {
            "kl": KL,
            "entropy": {
                "target": 2.2,
                "start": 1.2,
                "final": 2.2,
                "horizon": 2000,
                "lr": 1e-3,
                "least": 1e-6,
                "most": 1.0,
                "warmup_steps": 200,
            },
            "meta": {"method": "analytic", "tau_lr": 0.02, "beta_lr": 0.01, "beta_grad_clip": 5.0},
        },
    }


def test_the_objective_is_the_documents():
    """L = -mean sum w l + beta L_kl, with the L_kl of whole answers."""
    algorithm = make_maxent_grpo(
        group_size=4, **from_flat({**MAXENT, "maxent_use_clip_objective": False}).recipe["algorithm_args"]
    )
    assert isinstance(algorithm.batch_credit, ListwiseCredit)
    assert (algorithm.batch_credit.baseline, algorithm.batch_credit.sampler_exponent) == ("none", 0.0)
    assert isinstance(algorithm.loss, CompositeLoss)
    policy, penalty = [term.loss for term in algorithm.loss.terms]
    assert isinstance(policy, ListwiseLoss)
    assert isinstance(penalty, ReferenceKLLoss)
    assert penalty.level == "sequence"


def test_the_pair_differs_in_the_algorithm_and_its_controllers_alone():
    pair = [from_flat(content).recipe for content in (GRPO, MAXENT)]
    different = {key for key in pair[0] | pair[1] if pair[0].get(key) != pair[1].get(key)}
    assert different == {"algorithm", "algorithm_args", "controllers"}


def test_a_key_that_a_switch_makes_idle_is_named():
    idle = from_flat({**MAXENT, "maxent_use_clip_objective": False, "vllm_url": "http://a:1", "maxent_tau_min": 0.0})
    plain = {"tau": 1e-4, "beta": 0.5, "kl_level": "sequence", "q_temperature": 0.7, **DOCUMENT_FORM}
    assert idle.recipe["algorithm_args"] == plain
    assert "inference" not in idle.recipe
    assert "least" not in idle.recipe["controllers"]["entropy"]
    assert {"clip_range", "maxent_clip_adv_baseline", "vllm_url", "maxent_tau_min"} <= set(idle.without_effect)
    served = from_flat({**MAXENT, "use_vllm": True, "vllm_url": "http://a:1"})
    assert served.recipe["inference"] == {"kind": "vllm", "url": "http://a:1"}


def test_infoseed_is_trained_with_the_objective_of_grpo():
    content = {
        **GRPO,
        "info_seed_enabled": True,
        "info_seed_num_seeds": 4,
        "info_seed_lambda": 0.01,
        "info_seed_alpha_entropy": 0.5,
    }
    translated = from_flat({**content, "info_seed_temperature": 0.3}, task="infoseed")
    assert translated.recipe["info_seed"] == {"num_seeds": 4, "coeff": 0.01, "temperature": 0.3}
    assert translated.recipe["algorithm"] == "grpo"
    assert "info_seed_alpha_entropy" in translated.without_effect


def test_the_sections_of_a_hydra_template_are_flattened():
    template = {
        "command": "train-maxent",
        "maxent": {"training": {"maxent_tau": 0.2}, "script": {"dataset_name": "a"}, "model": None},
    }
    translated = from_flat(template)
    assert (translated.recipe["algorithm_args"]["tau"], translated.recipe["data"]) == (0.2, "a")
    assert translated.without_effect == {"command": "it is ludic train"}
    with pytest.raises(ConfigError, match=r"maxent.recipe \(a.yaml\) names another file"):
        from_flat({"maxent": {"recipe": "a.yaml"}})


@pytest.mark.parametrize("prefix", ["", "training.", "baseline.training.", "maxent.training.", "infoseed.script.", "maxent."])
def test_prefixes_of_overrides_are_accepted(prefix):
    assert translate_name(f"{prefix}max_steps") == "max_steps"
    assert translate_name("trainer.lr") == "trainer.lr"


def test_no_key_has_two_meanings_and_targets_are_settings():
    assert len(set(KNOWN)) == len(KNOWN)
    later = ("model_init_kwargs.", "controllers.", "reference.", "algorithm_args.", "task.args.", "report_args.")
    targets = {path for path in flat_recipe.SHARED.values() if not path.startswith(later)}
    targets |= {f"info_seed.{name}" for name in SEED.values()}
    assert targets <= set(list_settings())
    assert all(reason and reason[0] == reason[0].lower() for reason in WITHOUT_EFFECT.values())


def test_the_trainer_takes_the_settings_of_a_flat_file(tmp_path):
    (tmp_path / "flat.yaml").write_text(yaml.safe_dump({**GRPO, "gradient_checkpointing": True, "gen_top_k": 5}))
    recipe = compose([str(tmp_path / "flat.yaml")])
    assert build_trainer_config(recipe.trainer, pad_token_id=0, seed=0).mixed_precision_dtype == "bf16"
    assert (recipe.gradient_checkpointing, recipe.rollout.top_k) == (True, 5)


def test_a_name_of_trl_is_translated_named_or_refused():
    """A flat file has the names of TRL's GRPOConfig too."""
    translated = from_flat({**GRPO, "temperature": 1.0, "sync_ref_model": False, "load_in_4bit": False, "epsilon_high": None})
    assert translated.recipe["rollout"]["temperature"] == 1.0
    assert translated.without_effect["sync_ref_model"].startswith("the reference never changes")
    with pytest.raises(ConfigError, match=r"epsilon \(0.1\) has no translation .*algorithm_args.clip_eps_low"):
        from_flat({**GRPO, "epsilon": 0.1})


def test_only_files_of_the_document_are_flat():
    assert is_flat({"train_grpo_objective": True})
    assert is_flat({"maxent_tau": 1})
    assert is_flat({"baseline": {"training": {}}})
    assert not is_flat({"recipe": "sort", "trainer": {"lr": 1}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"maxent_tua": 1}, r"no setting 'maxent_tua' in recipes of MaxEnt-GRPO; did you mean maxent_tau"),
        ({"beta": 0.1}, r"init_kl_coeff \(0.5\) and beta \(0.1\) are names of one setting"),
        ({"maxent_tau": 0.1}, r"maxent_tau are settings of MaxEnt, and the objective is GRPO"),
        ({"num_generations": 7}, r"is 64 answers, which num_generations \(7\) must divide"),
        ({"maxent_reference_logprobs_source": "stale"}, r"source \('stale'\) must be one of auto, model"),
        ({"dataset_mixture": {"datasets": []}}, r"dataset_name \(.*\) and dataset_mixture .*one setting, data"),
        ({"use_vllm": True, "vllm_mode": "both"}, r"vllm_mode \('both'\) must be one of server, colocate"),
    ],
)
def test_what_contradicts_itself_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        from_flat({**GRPO, **changes})


def test_names_of_one_coefficient_may_agree_and_a_switch_that_is_off_is_named():
    translated = from_flat({**GRPO, "beta": 0.5, "controller_meta_enabled": False, "controller_meta_lr": 0.1})
    assert translated.recipe["algorithm_args"]["reference_kl"] == 0.5
    assert translated.without_effect["controller_meta_lr"] == "controller_meta_enabled is off"
    with pytest.raises(ConfigError, match=r"task \('sft'\) .*one of grpo, maxent"):
        from_flat(GRPO, task="sft")
    with pytest.raises(ConfigError, match="needs info_seed_enabled"):
        from_flat(GRPO, task="infoseed")


@pytest.mark.parametrize("switch", [{}, {"info_seed_enabled": False}])
def test_infoseed_that_is_switched_off_leaves_its_settings_without_effect(switch):
    translated = from_flat({**GRPO, **switch, "info_seed_num_seeds": 4, "info_seed_lambda": 0.01})
    assert translated.recipe == from_flat(GRPO).recipe
    assert translated.without_effect["info_seed_num_seeds"] == "info_seed_enabled is off"


@pytest.mark.parametrize("method", ["first_order", "truncated_backprop"])
def test_the_meta_controller_of_grpo_takes_the_analytic_step_of_beta(method):
    """The document's own command for its GRPO template: there is no tau to differentiate by."""
    meta = {"controller_meta_enabled": True, "controller_meta_method": method, "controller_meta_lr": 0.02}
    translated = from_flat({"train_grpo_objective": True, "beta": 0.5, "kl_target": 0.07, **meta})
    assert "beta takes the analytic step" in translated.without_effect["controller_meta_method"]
    section = OmegaConf.to_object(
        OmegaConf.merge(OmegaConf.structured(ControllersSection), OmegaConf.create(translated.recipe["controllers"]))
    )
    [controller] = build_controllers(section, make_grpo(group_size=8, reference_kl=0.5), group_size=8)
    assert (controller.method, controller.kl_target, [*controller.coefficients]) == ("analytic", 0.07, ["beta"])
    assert from_flat({**MAXENT, **meta}).recipe["controllers"]["meta"]["method"] == method


def test_what_a_file_leaves_out_is_as_in_transformers(tmp_path):
    """A cosine that ends at 0, no warm-up, its betas, and every checkpoint."""
    (tmp_path / "flat.yaml").write_text("train_grpo_objective: true\ndataset_name: rows\nmodel_name_or_path: here\n")
    recipe = compose([str(tmp_path / "flat.yaml")])
    trainer = recipe.trainer
    assert (trainer.lr, trainer.lr_scheduler_type, trainer.lr_min_ratio, trainer.warmup_steps) == (1e-6, "cosine", 0.0, 0)
    assert (list(trainer.betas), trainer.eps, trainer.weight_decay, trainer.max_grad_norm) == ([0.9, 0.999], 1e-8, 0.0, 1.0)
    assert (recipe.checkpoint.every_n_steps, recipe.rollout.group_size) == (500, 8)
    assert (recipe.checkpoint.max_to_keep, recipe.report_header, recipe.report_aliases) == (None, True, True)
    one = compose([str(tmp_path / "flat.yaml"), "save_total_limit=2", "adam_beta2=0.9", "lr_scheduler_type=constant"])
    assert (one.checkpoint.max_to_keep, list(one.trainer.betas), one.trainer.lr_scheduler_type) == (2, [0.9, 0.9], "constant")


def test_a_run_has_the_names_of_its_file_at_its_tracker():
    tracked = {"wandb_project": "maths", "wandb_entity": "lab", "wandb_run_group": "pair"}
    named = from_flat({**GRPO, **tracked, "run_name": "first"}).recipe
    assert (named["name"], named["output"]) == ("pair", "var/data")
    assert named["report_args"] == {"project": "maths", "entity": "lab", "group": "pair", "name": "first"}
    assert from_flat({"train_grpo_objective": True, "run_name": "first"}).recipe["name"] == "first"


def test_another_column_of_answers_is_the_tasks():
    assert from_flat({**GRPO, "dataset_solution_column": "final"}).recipe["task"]["args"]["answer_column"] == "final"


BATCH = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 8}


def test_a_batch_is_that_of_all_ranks(tmp_path, monkeypatch):
    path = tmp_path / "flat.yaml"
    path.write_text(yaml.safe_dump({"train_grpo_objective": True, "dataset_name": "rows", "model_name_or_path": "here", **BATCH}))

    def problems(*overrides, **more):
        return compose([str(path), *overrides], **more).rollout.prompts

    assert problems() == 1
    assert problems("ranks=2") == problems("place.trainers=2") == problems("place={trainers:2}") == 2
    assert problems("num_processes=8") == problems("ranks=2", "num_processes=8") == 8
    assert problems(ranks=16) == 16
    assert (
        problems("per_device_train_batch_size=1", "gradient_accumulation_steps=1", ranks=0) == compose(["data"]).rollout.prompts
    )
    environment = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert problems() == 4


@pytest.mark.parametrize(
    ("given", "problems"),
    [
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}, 2),  # 16 answers, 8 to each
        ({"gradient_accumulation_steps": 4}, 4),  # 8 x 4 answers, 8 to each
        ({"num_generations": 4}, 2),  # 8 answers, 4 to each
    ],
)
def test_what_a_file_leaves_out_of_its_batch_is_that_of_grpo_config(given, problems):
    rollout = from_flat({"train_grpo_objective": True, **given}).recipe["rollout"]
    assert (rollout["prompts"], rollout["group_size"]) == (problems, given.get("num_generations", 8))


@pytest.mark.parametrize("count", [0, 1.5, "2"])
def test_a_size_of_the_batch_is_a_whole_number(count):
    with pytest.raises(ConfigError, match=r"gradient_accumulation_steps \(.*\) .*whole number, at least 1"):
        from_flat({"train_grpo_objective": True, **BATCH, "gradient_accumulation_steps": count})


def test_ludic_train_reads_a_flat_file_and_overrides_by_its_names(tmp_path, caplog):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"problem": "1+1", "answer": "2"}) + "\n")
    dropped = ("init_kl_coeff", "kl_target", "kl_horizon", "kl_ctl_step_size", "maxent_reference_logprobs_source")
    content = {key: value for key, value in GRPO.items() if key not in dropped}
    (tmp_path / "flat.yaml").write_text(yaml.safe_dump({**content, "dataset_name": str(tmp_path / "rows.jsonl")}))
    recipe = compose(
        [str(tmp_path / "flat.yaml"), "baseline.training.max_steps=7", "training.learning_rate=2e-6", "trainer.eps=1e-7"]
    )
    assert (recipe.algorithm, recipe.steps, recipe.trainer.lr, recipe.trainer.eps) == ("grpo", 7, 2e-6, 1e-7)
    assert (recipe.recipe, recipe.rollout.prompts, recipe.reward) == ("data", 4, "pure_accuracy_math")
    said = "force_custom_loop has no effect here: there is one loop, for every objective"
    assert said in caplog.text
    compose([str(tmp_path / "flat.yaml")])
    assert caplog.text.count(said) == 1  # a command composes its recipe several times


def test_a_flat_file_with_infoseed_is_a_recipe(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"problem": "1+1", "answer": "2"}) + "\n")
    path = tmp_path / "seed.yaml"
    seeds = {"info_seed_enabled": True, "info_seed_num_seeds": 4, "info_seed_lambda": 0.02, "info_seed_loss_type": "ce"}
    dropped = ("init_kl_coeff", "kl_target", "kl_horizon", "kl_ctl_step_size", "maxent_reference_logprobs_source")
    content = {key: value for key, value in GRPO.items() if key not in dropped} | seeds
    path.write_text(yaml.safe_dump({**content, "dataset_name": str(tmp_path / "rows.jsonl")}))
    recipe = compose([str(path), "infoseed.training.info_seed_temperature=0.3", "info_seed.pooling=last"])
    section = recipe.info_seed
    assert (section.num_seeds, section.coeff, section.temperature) == (4, 0.02, 0.3)
    assert (section.loss, section.pooling, section.template) == ("ce", "last", "\n[seed={seed}]")
    assert build_algorithm(recipe).credit_assigner.group_size == 16 + 4
