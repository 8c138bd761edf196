"""The names of settings in other libraries: each has an answer, and none leads astray."""

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from transformers import TrainingArguments

import ludic.recipes.foreign_names
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
data.shuffle data.seed data.dataloader_num_workers data.filter_overlong_prompts data.truncation
data.image_key data.video_key data.trust_remote_code data.custom_cls.path data.custom_cls.name
data.apply_chat_template_kwargs data.train_max_samples data.val_max_samples
actor_rollout_ref.hybrid_engine actor_rollout_ref.model.path
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
actor_rollout_ref.actor.checkpoint.save_contents
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
actor_rollout_ref.actor.fsdp_config.offload_policy actor_rollout_ref.actor.fsdp_config.fsdp_size
actor_rollout_ref.actor.fsdp_config.reshard_after_forward
actor_rollout_ref.actor.fsdp_config.model_dtype
actor_rollout_ref.actor.fsdp_config.forward_prefetch
actor_rollout_ref.actor.policy_loss.loss_mode
actor_rollout_ref.actor.megatron.tensor_model_parallel_size
actor_rollout_ref.actor.data_loader_seed actor_rollout_ref.ref.strategy
actor_rollout_ref.ref.log_prob_micro_batch_size
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu
actor_rollout_ref.ref.log_prob_use_dynamic_bsz
actor_rollout_ref.ref.log_prob_max_token_len_per_gpu
actor_rollout_ref.ref.fsdp_config.param_offload actor_rollout_ref.rollout.name
actor_rollout_ref.rollout.mode actor_rollout_ref.rollout.temperature
actor_rollout_ref.rollout.top_k actor_rollout_ref.rollout.top_p
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
actor_rollout_ref.rollout.val_kwargs.top_k actor_rollout_ref.rollout.val_kwargs.top_p
actor_rollout_ref.rollout.val_kwargs.temperature actor_rollout_ref.rollout.val_kwargs.n
actor_rollout_ref.rollout.val_kwargs.do_sample actor_rollout_ref.rollout.multi_turn.enable
actor_rollout_ref.rollout.multi_turn.max_assistant_turns
actor_rollout_ref.rollout.multi_turn.max_user_turns
actor_rollout_ref.rollout.multi_turn.tool_config_path
actor_rollout_ref.rollout.multi_turn.format actor_rollout_ref.rollout.calculate_log_probs
actor_rollout_ref.rollout.agent.num_workers
actor_rollout_ref.rollout.multi_turn.max_parallel_calls
actor_rollout_ref.rollout.multi_turn.max_tool_response_length actor_rollout_ref.rollout.seed
actor_rollout_ref.rollout.enable_prefix_caching actor_rollout_ref.nccl_timeout critic.strategy
critic.optim.lr critic.model.path critic.ppo_epochs critic.cliprange_value
critic.ppo_micro_batch_size_per_gpu critic.ppo_mini_batch_size
critic.model.enable_gradient_checkpointing critic.grad_clip critic.loss_agg_mode critic.enable
critic.optim.weight_decay critic.rollout_n critic.ppo_max_token_len_per_gpu reward_model.enable
reward_model.model.path reward_model.reward_manager reward_model.num_workers
reward_model.enable_resource_pool custom_reward_function.path custom_reward_function.name
algorithm.gamma algorithm.lam algorithm.adv_estimator algorithm.norm_adv_by_std_in_grpo
algorithm.use_kl_in_reward algorithm.kl_penalty algorithm.kl_ctrl.type algorithm.kl_ctrl.kl_coef
algorithm.kl_ctrl.horizon algorithm.kl_ctrl.target_kl algorithm.filter_groups.enable
algorithm.filter_groups.metric algorithm.filter_groups.max_num_gen_batches algorithm.use_pf_ppo
algorithm.rollout_correction.rollout_is algorithm.rollout_correction.rollout_is_threshold
trainer.balance_batch trainer.total_epochs trainer.total_training_steps trainer.project_name
trainer.experiment_name trainer.logger trainer.log_val_generations trainer.rollout_data_dir
trainer.validation_data_dir trainer.nnodes trainer.n_gpus_per_node trainer.save_freq
trainer.resume_mode trainer.resume_from_path trainer.val_before_train trainer.val_only
trainer.test_freq trainer.critic_warmup trainer.default_local_dir trainer.max_actor_ckpt_to_keep
trainer.max_critic_ckpt_to_keep trainer.device ray_kwargs.ray_init.num_cpus
reward.reward_model.model_path reward.custom_reward_function.path
"""
)
"""Keys of `ppo_trainer.yaml` of verl 0.9.1."""
OF_OPENRLHF = words(
    """
actor.aux_loss_coef actor.dual_clip actor.entropy_coef actor.eps_clip actor.eps_clip_low_high
actor.gradient_checkpointing_reentrant actor.model_name_or_path actor.num_gpus_per_node
actor.num_nodes actor.policy_loss_type adam.betas adam.eps adam.lr adam.weight_decay
algo.advantage.estimator algo.advantage.gamma algo.advantage.is_correction_level
algo.advantage.is_correction_mode algo.advantage.is_correction_threshold algo.advantage.lambd
algo.advantage.no_std_norm algo.dynamic_filtering_enable algo.dynamic_filtering_range
algo.kl.estimator algo.kl.init_coef algo.kl.use_loss ckpt.load_enable ckpt.max_num
ckpt.output_dir ckpt.path ckpt.save_steps data.apply_chat_template data.chosen_key data.dataset
data.dataset_probs data.dataset_split data.input_key data.input_template data.label_key
data.max_len data.max_samples data.multiturn data.output_key data.prompt_dataset data.prompt_key
data.prompt_probs data.prompt_split data.rejected_key data.tokenizer_chat_template
ds.adam_offload ds.attn_implementation ds.enable_sleep ds.load_in_4bit ds.lora.rank
ds.lora.target_modules ds.packing_samples ds.param_dtype ds.ring_attn_head_stride
ds.ring_attn_size ds.tensor_parallel_size ds.use_liger_kernel ds.value_head_prefix ds.zero_stage
ds.zpg eval.n_samples_per_prompt eval.split eval.steps eval.temperature local_rank
logger.logging_steps logger.tensorboard_dir logger.wandb.group logger.wandb.key logger.wandb.org
logger.wandb.run_name lr_scheduler lr_warmup_ratio max_norm model.aux_loss_coef model.beta
model.gradient_checkpointing_reentrant model.ipo_enable model.model_name_or_path
model.nll_loss_coef ref.model_name_or_path ref.num_gpus_per_node ref.num_nodes ref.offload
reward.model_name_or_path reward.normalize_enable reward.num_gpus_per_node reward.num_nodes
reward.offload reward.overlong_buffer_len reward.overlong_penalty_factor reward.remote_url
reward.stop_properly_penalty_coef rollout.batch_size rollout.max_new_tokens
rollout.max_tokens_per_gpu rollout.micro_batch_size rollout.n_samples_per_prompt
rollout.temperature rollout.top_p rollout.vllm_generate_batch_size train.agent_func_path
train.async_enable train.async_queue_size train.batch_size train.colocate_actor_ref
train.colocate_all train.colocate_critic_reward train.dynamic_batch_enable train.ema_beta
train.enable_ema train.max_epochs train.max_tokens_per_gpu train.micro_batch_size
train.num_episodes vllm.enable_prefix_caching vllm.enable_sleep vllm.enforce_eager
vllm.gpu_memory_utilization vllm.num_engines vllm.sync_backend vllm.sync_with_ray
vllm.tensor_parallel_size
"""
)
"""Options of `train_ppo_ray`, `train_sft`, `train_dpo` and `train_rm` of OpenRLHF 0.11.2."""


def test_every_name_of_trl_and_transformers_is_in_the_table():
    assert (len(TRANSFORMERS), len(TRL)) == (114, 123)
    assert {*TRANSFORMERS, *TRL} <= {*SETTINGS, *INSTEAD, *REASONS}
    assert set(TRAINERS) <= {*ARGUMENTS, *SETTINGS}


def test_every_name_of_verl_and_openrlhf_has_an_answer():
    assert (len(OF_VERL), len(OF_OPENRLHF)) == (198, 127)
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
        (compose, "num_train_epochs=3", "write steps=N: a pass over R rows"),
        (compose, "wandb_project=p", "it is called report_args.project"),
        (compose, "dataset_config=main", "it is called task.args.config"),
        (compose_sft, "dataset_config=main", "it is task.args.config, a setting"),
        (compose, "sync_ref_model=true", "the reference never changes"),
        (compose, "beta=0.1", "it is called algorithm_args.reference_kl"),
        (compose, "max_length=512", "it is called trainer.max_seq_len"),
        (compose, "trainer.learning_rate=1", "it is called trainer.lr"),
        (compose, "actor_rollout_ref.rollout.n=8", "it is called rollout.group_size"),
        (compose, "rollout.n_samples_per_prompt=8", "it is called rollout.group_size"),
        (compose, "maxent_tau=0.1", "it is called algorithm_args.tau"),
        (compose, "actor_rollout_ref.actor.ppo_mini_batch_size=64", "write trainer.minibatches_per_batch=N"),
        (compose, "actor_rollout_ref.actor.loss_agg_mode=token-mean", "write algorithm_args.normalizer=tokens"),
        (compose, "actor_rollout_ref.rollout.val_kwargs.temperature=0", "held-out problems are sampled as in training"),
        (compose, "actor_rollout_ref.rollout.seed=1", "docs/migration.md has the names of verl"),
        (compose, "critic.optim.weight_decay=0.1", "with algorithm=ppo, set critic.model"),
        (compose, "reward_model.max_length=512", "write reward_model=FOLDER"),
        (compose, "trainer.total_epochs=3", "write steps=N: a pass over R rows"),
        (compose, "trainer.n_gpus_per_node=8", "write ranks=N"),
        (compose, "custom_reward_function.name=f", "write reward=module:function"),
        (compose, "train.batch_size=64", "write trainer.minibatches_per_batch=N"),
        (compose_sft, "train.batch_size=64", "it is called batch_size"),
        (compose_sft, "train.max_epochs=3", "it is called epochs"),
        (compose, "train.max_epochs=3", "it is called trainer.epochs_per_batch"),
        (compose, "trainer.esi_redundant_time=3", "`--print-config` lists every key"),
        (compose, "trainer.default_hdfs_dir=d", "`--print-config` lists every key"),
        (compose_dpo, "beta=0.1", "it is called loss.beta"),
        (compose_dpo, "loss_type=ipo", "it is called loss.loss_type"),
        (compose_dpo, "num_train_epochs=3", "it is called epochs"),
        (compose_sft, "loss_type=nll", "write algorithm=NAME"),
        (compose_sft, "num_generations=8", "it is rollout.group_size, a setting"),
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


ROOT = Path(__file__).parents[2]
PEERS = ROOT / "target" / "peers"
VERSIONS = dict(re.findall(r"^(\w+)==([\d.]+)$", (ROOT / "constraints-peers.txt").read_text(), flags=re.MULTILINE))
CONFIGS = ("grpo", "rloo", "sft", "dpo", "reward", "model")

of_wheels = pytest.mark.skipif(not PEERS.is_dir(), reason="`.ci/get-peers` fetches the wheels")
"""Tests that read the names out of the wheels of the other libraries."""


def fields_of_trl() -> set[str]:
    """The fields of the configurations, with those of the classes above them in the wheel."""
    paths = [PEERS / "trl" / "trainer" / f"{name}_config.py" for name in (*CONFIGS, "base")]
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    return {
        item.target.id
        for node in classes
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and not item.target.id.startswith("_")
    }


def keys_of_verl() -> set[str]:
    """The settings of the trainers that use FSDP and Megatron."""

    def paths(section: dict[str, object], prefix: str = ""):
        for name, value in section.items():
            yield f"{prefix}{name}"
            if isinstance(value, dict):
                yield from paths(value, f"{prefix}{name}.")

    composed = [PEERS / "verl/trainer/config" / f"_generated_ppo_{kind}.yaml" for kind in ("trainer", "megatron_trainer")]
    return {name for path in composed for name in paths(yaml.safe_load(path.read_text(encoding="utf-8")))}


def flags_of_openrlhf() -> set[str]:
    commands = [next(PEERS.rglob(f"openrlhf/cli/{name}.py")) for name in ("train_ppo_ray", "train_sft", "train_dpo", "train_rm")]
    return {flag for path in commands for flag in re.findall(r'add_argument\(\s*"--([\w.]+)"', path.read_text(encoding="utf-8"))}


@pytest.mark.integration
@of_wheels
def test_the_page_and_the_tables_name_the_versions():
    named = f"TRL {VERSIONS['trl'].removesuffix('.0')}", f"verl {VERSIONS['verl']}", f"OpenRLHF {VERSIONS['openrlhf']}"
    page = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
    tables = " ".join((ludic.recipes.foreign_names.__doc__ or "").split())
    assert {name for name in named if name not in page or name not in tables} == set()
    for library, version in VERSIONS.items():
        assert list((PEERS / "wheels").glob(f"{library}-{version}-*.whl")), library


@pytest.mark.integration
@of_wheels
def test_every_field_of_trl_is_in_a_table_and_every_name_is_a_field():
    found = fields_of_trl()
    assert len(found) > 100
    assert found <= {*SETTINGS, *INSTEAD, *REASONS}
    assert set(TRL) <= found | {field.name for field in fields(TrainingArguments)}


@pytest.mark.integration
@of_wheels
def test_every_name_of_verl_is_in_its_configuration():
    found = keys_of_verl()
    assert len(found) > 400
    assert set(VERL) <= found
    assert set(OF_VERL) <= found


@pytest.mark.integration
@of_wheels
def test_every_name_of_openrlhf_is_a_flag_of_its_commands():
    found = flags_of_openrlhf()
    assert len(found) > 150
    assert set(OPENRLHF) <= found
    assert set(OF_OPENRLHF) <= found


@pytest.mark.integration
@of_wheels
def test_what_has_no_counterpart_is_a_name_of_one_of_the_two():
    known = keys_of_verl() | flags_of_openrlhf()
    assert {name for name in OTHERS if name not in known} == set()
