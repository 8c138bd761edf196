"""The names of settings in other libraries: each has an answer, and none leads astray."""

import re

import pytest

from ludic import DPO, GRPO, SFT, RewardModel
from ludic.errors import ConfigError, ConfigTypeError
from ludic.recipes.compose import compose, list_settings
from ludic.recipes.epochs_schema import compose_dpo, compose_rm, compose_sft
from ludic.recipes.foreign_names import ARGUMENTS, INSTEAD, OPENRLHF, OTHERS, REASONS, SETTINGS, VERL, explain
from ludic.recipes.overrides import suggest

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

OF_VERL = words(
    """
data.tokenizer data.train_files data.val_files data.prompt_key data.reward_fn_key
data.max_prompt_length data.max_response_length data.train_batch_size data.val_batch_size
data.gen_batch_size data.return_raw_input_ids data.return_raw_chat data.return_full_prompt
data.shuffle data.seed data.dataloader_num_workers data.filter_overlong_prompts
data.truncation data.image_key data.video_key data.trust_remote_code data.custom_cls.path
data.custom_cls.name data.apply_chat_template_kwargs data.train_max_samples
data.val_max_samples actor_rollout_ref.hybrid_engine actor_rollout_ref.model.path
actor_rollout_ref.model.external_lib actor_rollout_ref.model.override_config
actor_rollout_ref.model.enable_gradient_checkpointing
actor_rollout_ref.model.enable_activation_offload actor_rollout_ref.model.use_remove_padding
actor_rollout_ref.model.lora_rank actor_rollout_ref.model.lora_alpha
actor_rollout_ref.model.target_modules actor_rollout_ref.model.use_liger
actor_rollout_ref.model.use_fused_kernels actor_rollout_ref.model.trust_remote_code
actor_rollout_ref.model.custom_chat_template actor_rollout_ref.model.tokenizer_path
actor_rollout_ref.model.lora_adapter_path actor_rollout_ref.model.exclude_modules
actor_rollout_ref.model.use_shm actor_rollout_ref.actor.strategy
actor_rollout_ref.actor.ppo_mini_batch_size actor_rollout_ref.actor.ppo_micro_batch_size
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu actor_rollout_ref.actor.use_dynamic_bsz
actor_rollout_ref.actor.ppo_max_token_len_per_gpu actor_rollout_ref.actor.grad_clip
actor_rollout_ref.actor.clip_ratio actor_rollout_ref.actor.clip_ratio_low
actor_rollout_ref.actor.clip_ratio_high actor_rollout_ref.actor.clip_ratio_c
actor_rollout_ref.actor.loss_agg_mode actor_rollout_ref.actor.entropy_coeff
actor_rollout_ref.actor.use_kl_loss actor_rollout_ref.actor.use_torch_compile
actor_rollout_ref.actor.kl_loss_coef actor_rollout_ref.actor.kl_loss_type
actor_rollout_ref.actor.ppo_epochs actor_rollout_ref.actor.shuffle
actor_rollout_ref.actor.ulysses_sequence_parallel_size
actor_rollout_ref.actor.checkpoint.save_contents actor_rollout_ref.actor.checkpoint.contents
actor_rollout_ref.actor.checkpoint.load_contents actor_rollout_ref.actor.optim.lr
actor_rollout_ref.actor.optim.lr_warmup_steps
actor_rollout_ref.actor.optim.lr_warmup_steps_ratio actor_rollout_ref.actor.optim.min_lr_ratio
actor_rollout_ref.actor.optim.num_cycles actor_rollout_ref.actor.optim.warmup_style
actor_rollout_ref.actor.optim.lr_scheduler_type
actor_rollout_ref.actor.optim.total_training_steps actor_rollout_ref.actor.optim.weight_decay
actor_rollout_ref.actor.optim.betas
actor_rollout_ref.actor.fsdp_config.wrap_policy.min_num_params
actor_rollout_ref.actor.fsdp_config.param_offload
actor_rollout_ref.actor.fsdp_config.optimizer_offload
actor_rollout_ref.actor.fsdp_config.offload_policy
actor_rollout_ref.actor.fsdp_config.fsdp_size
actor_rollout_ref.actor.fsdp_config.reshard_after_forward
actor_rollout_ref.actor.fsdp_config.model_dtype
actor_rollout_ref.actor.fsdp_config.forward_prefetch
actor_rollout_ref.actor.policy_loss.loss_mode actor_rollout_ref.actor.tis_imp_ratio_cap
actor_rollout_ref.actor.megatron.tensor_model_parallel_size
actor_rollout_ref.actor.data_loader_seed actor_rollout_ref.ref.strategy
actor_rollout_ref.ref.log_prob_micro_batch_size
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu
actor_rollout_ref.ref.log_prob_use_dynamic_bsz
actor_rollout_ref.ref.log_prob_max_token_len_per_gpu
actor_rollout_ref.ref.fsdp_config.param_offload actor_rollout_ref.ref.model.path
actor_rollout_ref.rollout.name actor_rollout_ref.rollout.mode
actor_rollout_ref.rollout.temperature actor_rollout_ref.rollout.top_k
actor_rollout_ref.rollout.top_p actor_rollout_ref.rollout.use_fire_sampling
actor_rollout_ref.rollout.prompt_length actor_rollout_ref.rollout.response_length
actor_rollout_ref.rollout.dtype actor_rollout_ref.rollout.gpu_memory_utilization
actor_rollout_ref.rollout.ignore_eos actor_rollout_ref.rollout.enforce_eager
actor_rollout_ref.rollout.free_cache_engine actor_rollout_ref.rollout.load_format
actor_rollout_ref.rollout.tensor_model_parallel_size
actor_rollout_ref.rollout.data_parallel_size actor_rollout_ref.rollout.max_num_batched_tokens
actor_rollout_ref.rollout.max_model_len actor_rollout_ref.rollout.max_num_seqs
actor_rollout_ref.rollout.log_prob_micro_batch_size
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu
actor_rollout_ref.rollout.log_prob_use_dynamic_bsz
actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu
actor_rollout_ref.rollout.disable_log_stats actor_rollout_ref.rollout.enable_chunked_prefill
actor_rollout_ref.rollout.do_sample actor_rollout_ref.rollout.n
actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space
actor_rollout_ref.rollout.val_kwargs.top_k actor_rollout_ref.rollout.val_kwargs.top_p
actor_rollout_ref.rollout.val_kwargs.temperature actor_rollout_ref.rollout.val_kwargs.n
actor_rollout_ref.rollout.val_kwargs.do_sample actor_rollout_ref.rollout.multi_turn.enable
actor_rollout_ref.rollout.multi_turn.max_turns
actor_rollout_ref.rollout.multi_turn.max_assistant_turns
actor_rollout_ref.rollout.multi_turn.max_user_turns
actor_rollout_ref.rollout.multi_turn.tool_config_path
actor_rollout_ref.rollout.multi_turn.interaction_config_path
actor_rollout_ref.rollout.multi_turn.format actor_rollout_ref.rollout.calculate_log_probs
actor_rollout_ref.rollout.agent.num_workers
actor_rollout_ref.rollout.multi_turn.completion_callback
actor_rollout_ref.rollout.multi_turn.max_parallel_calls
actor_rollout_ref.rollout.multi_turn.max_tool_response_length actor_rollout_ref.rollout.seed
actor_rollout_ref.rollout.enable_prefix_caching actor_rollout_ref.nccl_timeout critic.strategy
critic.optim.lr critic.model.path critic.ppo_epochs critic.cliprange_value
critic.ppo_micro_batch_size_per_gpu critic.ppo_mini_batch_size
critic.model.enable_gradient_checkpointing critic.grad_clip critic.loss_agg_mode critic.enable
critic.optim.weight_decay critic.rollout_n critic.ppo_max_token_len_per_gpu
reward_model.enable reward_model.strategy reward_model.model.path
reward_model.model.input_tokenizer reward_model.micro_batch_size
reward_model.micro_batch_size_per_gpu reward_model.max_length reward_model.use_dynamic_bsz
reward_model.reward_manager reward_model.launch_reward_fn_async
reward_model.sandbox_fusion.url reward_model.forward_max_token_len_per_gpu
reward_model.overlong_buffer.enable reward_model.overlong_buffer.len
reward_model.overlong_buffer.penalty_factor reward_model.reward_kwargs.overlong_buffer_cfg.len
reward_model.reward_kwargs.max_resp_len reward_model.num_workers
reward_model.enable_resource_pool custom_reward_function.path custom_reward_function.name
custom_reward_function.reward_kwargs algorithm.gamma algorithm.lam algorithm.adv_estimator
algorithm.norm_adv_by_std_in_grpo algorithm.use_kl_in_reward algorithm.kl_penalty
algorithm.kl_ctrl.type algorithm.kl_ctrl.kl_coef algorithm.kl_ctrl.horizon
algorithm.kl_ctrl.target_kl algorithm.filter_groups.enable algorithm.filter_groups.metric
algorithm.filter_groups.max_num_gen_batches algorithm.use_pf_ppo algorithm.rollout_is
algorithm.rollout_is_threshold algorithm.rollout_correction.rollout_is
algorithm.rollout_correction.rollout_is_threshold trainer.balance_batch trainer.total_epochs
trainer.total_training_steps trainer.project_name trainer.experiment_name trainer.logger
trainer.log_val_generations trainer.rollout_data_dir trainer.validation_data_dir
trainer.nnodes trainer.n_gpus_per_node trainer.save_freq trainer.resume_mode
trainer.resume_from_path trainer.val_before_train trainer.val_only trainer.test_freq
trainer.critic_warmup trainer.default_local_dir trainer.max_actor_ckpt_to_keep
trainer.max_critic_ckpt_to_keep trainer.device ray_init.num_cpus ray_init.timeline_json_file
ray_kwargs.ray_init.num_cpus
"""
)
"""Keys of `ppo_trainer.yaml` of verl."""
OF_OPENRLHF = words(
    """
ref_num_nodes ref_num_gpus_per_node reward_num_nodes reward_num_gpus_per_node
colocate_actor_ref actor_num_nodes actor_num_gpus_per_node critic_num_nodes
critic_num_gpus_per_node colocate_critic_reward colocate_all_models vllm_num_engines
vllm_tensor_parallel_size vllm_sync_backend vllm_sync_with_ray enable_prefix_caching
enforce_eager vllm_enable_sleep vllm_gpu_memory_utilization eval_steps save_steps
logging_steps ckpt_path max_ckpt_num load_checkpoint local_rank zero_stage bf16 param_dtype
enable_ema ema_beta zpg adam_offload flash_attn attn_implementation use_liger_kernel
gradient_checkpointing_use_reentrant deepspeed_enable_sleep ds_tensor_parallel_size
packing_samples load_in_4bit lora_rank lora_alpha target_modules lora_dropout save_path
num_episodes rollout_batch_size vllm_generate_batch_size micro_rollout_batch_size max_epochs
prompt_max_len generate_max_len max_len max_samples max_norm l2 ptx_coef eps_clip
eps_clip_low_high dual_clip value_clip lambd gamma micro_train_batch_size train_batch_size
normalize_reward top_p temperature freezing_actor_steps n_samples_per_prompt
save_value_network actor_learning_rate critic_learning_rate lr_warmup_ratio lr_scheduler
kl_horizon init_kl_coef kl_estimator kl_target use_kl_loss aux_loss_coef entropy_loss_coef
adam_betas adam_eps reward_clip_range advantage_estimator no_advantage_std_norm ring_attn_size
ring_head_stride pretrain reward_pretrain remote_rm_url critic_pretrain value_head_prefix
ref_reward_offload agent_func_path prompt_data prompt_data_probs prompt_split eval_dataset
eval_split eval_temperature eval_n_samples_per_prompt input_key label_key input_template
apply_chat_template use_wandb wandb_org wandb_group wandb_project wandb_run_name
use_tensorboard dynamic_filtering dynamic_filtering_reward_range async_train async_queue_size
use_dynamic_batch train_max_tokens_per_gpu rollout_max_tokens_per_gpu overlong_buffer_len
overlong_penalty_factor policy_loss_type enable_vllm_is_correction vllm_is_truncated_threshold
full_determinism stop_properly_penalty_coef beta ipo nll_loss_coef ref_pretrain ref_offload
chosen_key rejected_key prompt_key dataset dataset_probs dataset_split learning_rate
output_key multiturn tokenizer_chat_template
"""
)
"""Options of `train_ppo_ray`, `train_sft`, `train_dpo` and `train_rm` of OpenRLHF."""


def test_every_name_of_trl_and_transformers_is_in_the_table():
    assert (len(TRANSFORMERS), len(TRL)) == (114, 123)
    assert {*TRANSFORMERS, *TRL} <= {*SETTINGS, *INSTEAD, *REASONS}
    assert set(TRAINERS) <= {*ARGUMENTS, *SETTINGS}


def test_every_name_of_verl_and_openrlhf_has_an_answer():
    assert (len(OF_VERL), len(OF_OPENRLHF)) == (223, 143)
    known = list_settings()
    for name in (*OF_VERL, *OF_OPENRLHF):
        assert not suggest(name, known).startswith(("; did you mean", "; `--print-config`")), name


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
    named = {
        path
        for text in (*INSTEAD.values(), *REASONS.values(), *OTHERS.values())
        for path in re.findall(r"\b[a-z]+\.[a-z_]+\b", text)
    }
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
        for name in {*TRANSFORMERS, *TRL, *VERL, *OPENRLHF, *OTHERS}:
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
        (compose, "actor_rollout_ref.actor.ppo_mini_batch_size=64", "write trainer.minibatches_per_batch=N"),
        (compose, "actor_rollout_ref.actor.loss_agg_mode=token-mean", "write algorithm_args.normalizer=tokens"),
        (compose, "actor_rollout_ref.rollout.val_kwargs.temperature=0", "held-out problems are sampled as in training"),
        (compose, "actor_rollout_ref.rollout.seed=1", "docs/migration.md has the names of verl"),
        (compose, "critic.optim.weight_decay=0.1", "there is no critic"),
        (compose, "reward_model.max_length=512", "write reward_model=FOLDER"),
        (compose, "trainer.total_epochs=3", "write steps=N: a pass over R rows is R / rollout.prompts steps"),
        (compose, "trainer.n_gpus_per_node=8", "write ranks=N"),
        (compose, "custom_reward_function.name=f", "write reward=module:function"),
        (compose, "train_batch_size=64", "write trainer.minibatches_per_batch=N"),
        (compose_sft, "train_batch_size=64", "it is called batch_size"),
        (compose_sft, "max_epochs=3", "it is called epochs"),
        (compose, "max_epochs=3", "it is called trainer.epochs_per_batch"),
        (compose, "trainer.esi_redundant_time=3", "`--print-config` lists every key"),
        (compose, "trainer.default_hdfs_dir=d", "`--print-config` lists every key"),
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
