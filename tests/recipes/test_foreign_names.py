"""The names of settings in other libraries: each has an answer, and none leads astray."""

import re

import pytest

from ludic import DPO, GRPO, SFT, RewardModel
from ludic.errors import ConfigError, ConfigTypeError
from ludic.recipes.compose import compose, list_settings
from ludic.recipes.dpo.schema import compose_dpo
from ludic.recipes.foreign_names import ARGUMENTS, INSTEAD, OPENRLHF, REASONS, SETTINGS, VERL, explain
from ludic.recipes.overrides import suggest
from ludic.recipes.rm.schema import compose_rm
from ludic.recipes.sft.schema import compose_sft

ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "answer": "3"}]


def words(text):
    return text.split()


TRANSFORMERS = words(
    """
output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate
lr_scheduler_type lr_scheduler_kwargs warmup_steps optim optim_args weight_decay adam_beta1
adam_beta2 adam_epsilon optim_target_modules gradient_accumulation_steps
average_tokens_across_devices max_grad_norm label_smoothing_factor bf16 fp16 bf16_full_eval
fp16_full_eval tf32 activation_checkpointing activation_checkpointing_kwargs
gradient_checkpointing gradient_checkpointing_kwargs torch_compile torch_compile_backend
torch_compile_mode use_liger_kernel liger_kernel_config use_cache neftune_noise_alpha
torch_empty_cache_steps auto_find_batch_size logging_strategy logging_steps logging_first_step
log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen log_level
log_level_replica disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id
trackio_static_space_id eval_strategy eval_steps eval_delay per_device_eval_batch_size
prediction_loss_only eval_on_start eval_do_concat_batches eval_use_gather_object
eval_accumulation_steps include_for_metrics batch_eval_metrics save_only_model save_strategy
save_steps save_on_each_node save_total_limit enable_jit_checkpoint push_to_hub hub_token
hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision load_best_model_at_end
metric_for_best_model greater_is_better ignore_data_skip restore_callback_states_from_checkpoint
full_determinism seed data_seed use_cpu accelerator_config parallelism_config
dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers
dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order
remove_unused_columns label_names train_sampling_strategy length_column_name
ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend
ddp_timeout fsdp fsdp_config deepspeed debug skip_memory_metrics do_train do_eval do_predict
resume_from_checkpoint local_rank
"""
)
"""The fields of `transformers.TrainingArguments` 5.23."""
TRL = words(
    """
activation_offloading assistant_only_loss attn_implementation beta bnb_4bit_quant_storage
bnb_4bit_quant_type cache_implementation cast_lm_head_to_fp32 center_rewards_coefficient
chat_template_kwargs chat_template_path completion_only_loss dataset_kwargs dataset_num_proc
dataset_text_field delta disable_dropout discopop_tau ds3_gather_for_generation dtype
entropy_coef entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target eos_token
epsilon epsilon_high eval_packing f_alpha_divergence_coef f_divergence_type
generation_batch_size generation_kwargs importance_sampling_level label_smoothing ld_alpha
load_in_4bit load_in_8bit log_completions log_completions_hub_repo log_multimodal
log_unique_prompts lora_alpha lora_dropout lora_modules_to_save lora_r lora_target_modules
lora_target_parameters lora_task_type loss_type loss_weights mask_truncated_completions
max_completion_length max_length max_tool_calling_iterations min_p model_init_kwargs
model_name_or_path model_revision multi_objective_aggregation normalize_advantages
num_completions_to_print num_generations num_generations_eval num_iterations
off_policy_mask_threshold packing packing_strategy pad_to_multiple_of pad_token padding_free
precompute_ref_batch_size precompute_ref_log_probs ref_model_mixup_alpha ref_model_sync_steps
repetition_penalty reward_clip_range reward_weights router_aux_loss_coef sapo_temperature_neg
sapo_temperature_pos scale_rewards shuffle_dataset steps_per_generation sync_ref_model
temperature top_entropy_quantile top_k top_p transformers_continuous_batching_config
truncation_mode trust_remote_code use_adaptive_entropy use_bias_correction_kl
use_bnb_nested_quant use_dora use_peft use_rslora use_transformers_continuous_batching
use_transformers_paged use_vllm use_weighting vespo_k_neg vespo_k_pos vespo_lambda_neg
vespo_lambda_pos vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_group_port
vllm_importance_sampling_cap vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min
vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_max_model_length
vllm_mode vllm_model_impl vllm_server_base_url vllm_server_host vllm_server_port
vllm_server_timeout vllm_structured_outputs_regex vllm_tensor_parallel_size
"""
)
"""What `GRPOConfig`, `RLOOConfig`, `SFTConfig`, `DPOConfig`, `RewardConfig` and `ModelConfig` of
TRL 1.16 add to them."""
TRAINERS = words(
    """
reward_funcs args train_dataset eval_dataset processing_class reward_processing_classes
optimizers peft_config tools rollout_func environment_factory quantization_config ref_model
data_collator compute_metrics preprocess_logits_for_metrics optimizer_cls_and_kwargs
compute_loss_func formatting_func
"""
)
"""The arguments of TRL's trainers, but for `model` and `callbacks`, which are ours."""


def test_every_name_of_trl_and_transformers_is_in_the_table():
    assert (len(TRANSFORMERS), len(TRL)) == (114, 123)
    assert {*TRANSFORMERS, *TRL} <= {*SETTINGS, *INSTEAD, *REASONS}
    assert set(TRAINERS) <= {*ARGUMENTS, *SETTINGS}


def test_a_name_stands_in_one_table():
    """But for two that are settings of other commands than `ludic train`."""
    tables = (SETTINGS, INSTEAD, REASONS)
    assert sum(map(len, tables)) == len(set().union(*tables)) + 2


def test_what_a_name_is_called_here_is_a_setting_of_a_command():
    known = {*list_settings(), *keys(compose_dpo([])), *keys(compose_rm([])), *keys(compose_sft([]))}
    opened = ("algorithm_args.", "task.args.", "report_args.", "model_init_kwargs.")
    paths = {path for table in (SETTINGS, VERL, OPENRLHF) for paths in table.values() for path in paths.split(",")}
    assert len(paths) > 60
    assert {path for path in paths if not path.startswith(opened)} <= known
    named = {path for text in (*INSTEAD.values(), *REASONS.values()) for path in re.findall(r"\b[a-z]+\.[a-z_]+\b", text)}
    named = {path for path in named if path.partition(".")[0] in {key.partition(".")[0] for key in known}}
    assert len(named) > 15
    assert {path for path in named if not path.startswith(opened)} <= known


def keys(recipe, prefix=""):
    """The paths of all settings of a recipe."""
    for name, value in vars(recipe).items():
        yield f"{prefix}{name}"
        if hasattr(value, "__dataclass_fields__"):
            yield from keys(value, f"{prefix}{name}.")


def test_every_name_is_answered_from_the_table_and_not_by_the_nearest_setting():
    for known in (list_settings(), list(keys(compose_dpo([]))), list(keys(compose_sft([])))):
        for name in {*TRANSFORMERS, *TRL, *VERL, *OPENRLHF}:
            assert suggest(name, known) == f"; {explain(name, known)}"


@pytest.mark.parametrize(
    ("command", "argument", "message"),
    [
        (compose, "save_steps=5", "it is called checkpoint.every_n_steps"),
        (compose, "eval_steps=5", "it is called trainer.eval_every_n_steps"),
        (compose, "deepspeed=zero3.json", "write sharding.kind=full and ranks=N"),
        (compose, "scale_rewards=false", "write algorithm_args.group_normalize_adv=false"),
        (compose, "attn_implementation=eager", "it is called model_init_kwargs.attn_implementation"),
        (compose, "num_train_epochs=3", "write steps=N: a pass over R rows is R / rollout.prompts steps"),
        (compose, "wandb_project=p", "it is called report_args.project"),
        (compose, "dataset_config=main", "it is called task.args.config"),
        (compose_sft, "dataset_config=main", "it is task.args.config, a setting of another command"),
        (compose, "sync_ref_model=true", "the reference never changes while the policy is trained"),
        (compose, "beta=0.1", "it is called algorithm_args.reference_kl"),
        (compose, "max_length=512", "it is called trainer.max_seq_len"),
        (compose, "trainer.learning_rate=1", "it is called trainer.lr"),
        (compose, "actor_rollout_ref.rollout.n=8", "it is called rollout.group_size"),
        (compose, "n_samples_per_prompt=8", "it is called rollout.group_size"),
        (compose, "maxent_tau=0.1", "it is called algorithm_args.tau"),
        (compose_dpo, "beta=0.1", "it is called loss.beta"),
        (compose_dpo, "loss_type=ipo", "it is called loss.loss_type"),
        (compose_dpo, "num_train_epochs=3", "it is called epochs"),
        (compose_sft, "loss_type=nll", "write algorithm=NAME"),
        (compose_sft, "num_generations=8", "it is rollout.group_size, a setting of another command"),
        (compose_rm, "max_length=512", "it is called trainer.max_seq_len"),
    ],
)
def test_a_name_of_another_library_is_answered_for_the_command(command, argument, message):
    with pytest.raises(ConfigError, match=f"no setting '{argument.partition('=')[0]}'; {re.escape(message)}"):
        command([argument])


@pytest.mark.parametrize("make", [GRPO, SFT, DPO, RewardModel])
@pytest.mark.parametrize("name", ["args", "peft_config", "save_steps", "optim", "use_vllm", "sync_ref_model", "max_length"])
def test_the_objects_answer_as_the_commands_do(make, name):
    given = [lambda completions, **columns: [0.0]] if make is GRPO else []
    answer = f"is an argument of TRL; write {ARGUMENTS[name]}" if name in ARGUMENTS else "no setting"
    with pytest.raises((ConfigError, ConfigTypeError), match=re.escape(answer)) as caught:
        make("m", *given, ROWS, **{name: 1})
    assert "did you mean" not in str(caught.value)
