"""Every key of the flat files of MaxEnt-GRPO changes the recipe, or is named with the reason why
not."""

import pytest

from ludic.recipes.flat_recipe import KNOWN, WITHOUT_EFFECT, from_flat
from ludic.recipes.foreign_names import MAXENT_ONLY

GRPO = {"train_grpo_objective": True, "model_name_or_path": "a", "dataset_name": "b", "beta": 0.1}
MAXENT = {**GRPO, "train_grpo_objective": False, "maxent_use_clip_objective": True, "clip_range": 0.2}
META = {**MAXENT, "controller_meta_enabled": True, "controller_meta_lr": 0.1}
SEEDED = {**GRPO, "info_seed_enabled": True, "info_seed_num_seeds": 4}
SERVED = {**GRPO, "use_vllm": True}
BATCHED = {**GRPO, "per_device_train_batch_size": 2, "num_generations": 2}
STEERED = {**GRPO, "kl_target": 0.07, "kl_horizon": 500, "kl_ctl_step_size": 1.0}
LONG = {**GRPO, "max_prompt_length": 64, "max_completion_length": 64}

REQUIRED = {
    "model_name_or_path": "c",
    "dataset_name": "c",
    "output_dir": "c/d",
    "logging_steps": 5,
    "save_steps": 7,
    "train_grpo_objective": False,
}
PAIR = {
    "seed": 43,
    "evaluation_strategy": "steps",
    "eval_strategy": "steps",
    "eval_steps": 9,
    "per_device_eval_batch_size": 8,
    "bf16": True,
    "learning_rate": 2e-6,
    "lr_scheduler_type": "linear",
    "warmup_ratio": 0.3,
    "warmup_steps": 3,
    "adam_beta1": 0.8,
    "adam_beta2": 0.98,
    "adam_epsilon": 1e-7,
    "max_grad_norm": 0.2,
    "num_generations": 8,
    "max_steps": 30,
    "num_train_epochs": 2,
    "clip_range": 0.1,
    "gen_temperature": 0.7,
    "gen_top_p": 0.95,
    "gen_top_k": 5,
    "gen_stop_sequences": ["</answer>"],
    "force_custom_loop": True,
    "maxent_reference_logprobs_source": "model",
    "gradient_checkpointing": True,
}
SHARED = {
    "system_prompt": "e",
    "chat_template": "e",
    "benchmarks": ["e"],
    "report_to": "wandb",
    "run_name": "e",
    "wandb_project": "e",
    "wandb_entity": "e",
    "wandb_run_group": "e",
    "dataset_config": "e",
    "dataset_prompt_column": "e",
    "dataset_solution_column": "e",
    "eval_dataset_name": "e",
    "eval_dataset_config": "e",
    "eval_dataset_split": "e",
    "eval_dataset_prompt_column": "e",
    "eval_dataset_solution_column": "e",
    "reward_funcs": ["e"],
    "reward_weights": [2.0],
    "eval_reward_funcs": ["e"],
    "eval_reward_weights": [2.0],
    "reference_model_name_or_path": "e",
    "reference_model_revision": "e",
    "model_revision": "e",
    "save_strategy": "steps",
    "save_total_limit": 2,
    "overwrite_output_dir": True,
    "resume_from_checkpoint": True,
    "init_from_checkpoint": "e",
    "controller_state_path": "e",
    "controller_overwrite_from_config": True,
    "log_completions": True,
    "log_like_grpo": True,
    "recipe_path": "e",
    "maxent_logprob_chunk_size": 64,
    "maxent_score_slice_prefetch": 2,
    "maxent_score_tail_tokens": 512,
    "maxent_prompt_cache_size": 5,
    "maxent_allow_stale_reference_logprobs": True,
    "maxent_allow_empty_weight_fallback": True,
    "maxent_share_reference_model": True,
}
SERVER = {
    "use_vllm": False,
    "vllm_mode": "colocate",
    "vllm_url": "http://a:1",
    "vllm_server_base_url": "http://a:1",
    "vllm_server_host": "a",
    "vllm_server_port": 1,
    "vllm_return_logprobs": True,
    "vllm_sync_weights": True,
    "vllm_sync_interval_steps": 4,
    "vllm_best_of": 2,
    "vllm_frequency_penalty": 0.1,
    "vllm_presence_penalty": 0.1,
    "vllm_top_k": 5,
    "vllm_stop_sequences": ["</answer>"],
    "vllm_logprob_fail_after": 2,
    "vllm_logprob_fallback": True,
    "vllm_max_completion_rounds": 2,
    "vllm_retry_sleep": 1.0,
    "vllm_backfill_with_model": True,
    "vllm_client_tag_fail_fast": True,
}
OBJECTIVE = {
    "maxent_tau": 0.3,
    "maxent_q_temperature": 0.7,
    "maxent_q_epsilon": 1e-5,
    "maxent_length_normalize_ref": False,
    "maxent_use_clip_objective": False,
    "maxent_clip_objective_coef": 0.5,
    "maxent_clip_adv_baseline": 0.25,
    "maxent_clip_range": 0.3,
    "maxent_target_weight_entropy": 1.0,
    "maxent_target_weight_entropy_start": 1.0,
    "maxent_target_weight_entropy_final": 1.5,
    "maxent_target_weight_entropy_horizon": 9,
    "maxent_tau_lr": 0.1,
    "maxent_tau_min": 0.1,
    "maxent_tau_max": 2.0,
    "maxent_tau_warmup_steps": 3,
}
CONTROLLER = {
    "controller_meta_enabled": False,
    "controller_meta_method": "first_order",
    "controller_meta_lr": 0.2,
    "controller_meta_tau_lr": 0.2,
    "controller_meta_beta_lr": 0.2,
    "controller_meta_beta_grad_clip": 2.0,
    "controller_meta_update_interval": 3,
    "controller_meta_objective": "potential",
    "controller_meta_analytic_steps": 2,
    "controller_meta_truncation_steps": 2,
    "controller_meta_optimizer": "adam",
    "controller_meta_use_hessian": True,
}
INFO_SEED = {
    "info_seed_enabled": False,
    "info_seed_num_seeds": 5,
    "info_seed_lambda": 0.2,
    "info_seed_temperature": 0.3,
    "info_seed_prompt_template": "{seed} {prompt}",
    "info_seed_loss_type": "ce",
    "info_seed_pooling": "last",
    "info_seed_alpha_entropy": 0.5,
}
BATCH = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "num_processes": 2}
KL = {"kl_target": 0.08, "kl_horizon": 300, "kl_ctl_step_size": 0.5}
LENGTHS = {"max_prompt_length": 128, "max_completion_length": 128}
ALONE = {
    "dataset_mixture": {"datasets": [{"id": "e"}]},
    "init_kl_coeff": 0.2,
    "init_kl_coef": 0.2,
    "kl_penalty_beta": 0.2,
    "beta": 0.2,
}
"""Keys that cannot stand beside another name of the same setting."""
KEYS = [
    *((GRPO, REQUIRED), (GRPO, PAIR), (GRPO, SHARED), (SERVED, SERVER), (MAXENT, OBJECTIVE), (META, CONTROLLER)),
    *((SEEDED, INFO_SEED), (BATCHED, BATCH), (LONG, LENGTHS), (STEERED, KL)),
    ({"train_grpo_objective": True}, ALONE),
    ({"train_grpo_objective": False}, {name: value for name, value in ALONE.items() if name != "dataset_mixture"}),
]
"""A file of the document, and the keys of its guide and configuration with values that the file
does not have: the required ones, those of the pair of recipes for mathematics, and the others."""


@pytest.mark.parametrize(
    ("content", "key", "value"), [(content, key, value) for content, keys in KEYS for key, value in keys.items()]
)
def test_each_key_of_the_document_is_translated_or_named(content, key, value):
    before, after = from_flat(content), from_flat({**without_dependents(content, key, value), key: value})
    assert content.get(key) != value
    if after.recipe == before.recipe:
        assert len(after.without_effect[key].split()) > 2  # a reason


@pytest.mark.parametrize(
    ("keys", "url"),
    [
        ({"vllm_url": "http://a:1/generate"}, "http://a:1"),
        ({"vllm_url": "http://a:1/generate/"}, "http://a:1"),
        ({"vllm_url": "https://a/proxy"}, "https://a/proxy"),
        ({"vllm_server_host": "a", "vllm_server_port": 29525}, "http://a:29525"),
        ({"vllm_server_port": 29525}, "http://127.0.0.1:29525"),
        ({"vllm_server_base_url": "http://a:1", "vllm_server_host": "b"}, "http://a:1"),
    ],
)
def test_the_address_of_the_server_has_several_names(keys, url):
    translated = from_flat({**SERVED, **keys})
    assert translated.recipe["inference"] == {"kind": "vllm", "url": url}
    assert set(translated.without_effect) == ({"vllm_server_host"} if "vllm_server_base_url" in keys else set())


def test_what_a_file_leaves_out_is_as_in_the_document():
    """Its defaults, where ours are others: clipping .2 on both sides, temperature .8 and top-p .9,
    InfoSeed's coefficient 0, and no control of beta without all three settings."""
    recipe = from_flat(SEEDED | {"kl_target": 0.07, "kl_horizon": 500}).recipe
    assert recipe["algorithm_args"]["clip_eps_low"] == recipe["algorithm_args"]["clip_eps_high"] == 0.2
    assert (recipe["rollout"]["temperature"], recipe["rollout"]["top_p"]) == (0.8, 0.9)
    assert recipe["info_seed"] == {"num_seeds": 4, "coeff": 0.0}
    assert "controllers" not in recipe
    named = from_flat({**GRPO, "kl_target": 0.07, "kl_ctl_step_size": 0}).without_effect
    assert set(named) == {"kl_target", "kl_ctl_step_size"}


def test_a_rate_of_0_of_the_meta_controller_is_that_of_both():
    translated = from_flat({**META, "controller_meta_tau_lr": 0.0, "controller_meta_beta_lr": 0.3, "maxent_tau_lr": 0.1})
    assert translated.recipe["controllers"]["meta"] == {"method": "analytic", "lr": 0.1, "beta_lr": 0.3}
    assert set(translated.without_effect) == {"controller_meta_tau_lr", "maxent_tau_lr"}


def without_dependents(content, key, value):
    """The file without the settings of a part that the key switches off."""
    if key == "info_seed_enabled" and not value:
        return {name: given for name, given in content.items() if not name.startswith("info_seed")}
    return content


def test_the_keys_are_known_and_of_one_kind():
    document = {key for _, keys in KEYS for key in keys}
    assert document <= set(KNOWN)
    assert not set(WITHOUT_EFFECT) & set(MAXENT_ONLY)
    assert set(OBJECTIVE) >= set(MAXENT_ONLY)
