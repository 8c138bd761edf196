"""What the settings of TRL 1.16, transformers 5.23, verl 0.9.1, OpenRLHF 0.11.2 and MaxEnt-GRPO are
called here.

Errors about unknown settings and arguments, the translation of flat recipe files, and the tables of
docs/migration.md are made of these tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def _read(table: str, column: int = 0) -> Mapping[str, str]:
    """Name -> what stands before the arrow of its line. A line that is indented goes on with names;
    one without arrow has settings whose last part is the name."""
    read: dict[str, str] = {}
    for line in table.strip().replace("\n    ", " ").splitlines():
        ours, arrow, names = line.partition(" <-")
        if arrow:
            read |= {name: ours for group in names.split("|")[column : column + 1] for name in group.split()}
        elif column == 0:
            read |= {path.rpartition(".")[2]: path for path in ours.split()}
    return read


_TABLE = """
dtype seed tools report_to reward_weights eval_reward_weights system_prompt,rollout.system_prompt
chat_template chat_template_kwargs eos_token model_init_kwargs
gradient_checkpointing rollout.temperature rollout.top_p rollout.top_k rollout.min_p rollout.repetition_penalty
loss.loss_type loss.label_smoothing trainer.lr_scheduler_type trainer.warmup_ratio trainer.warmup_steps trainer.weight_decay
trainer.max_grad_norm
model <- model_name_or_path | actor_rollout_ref.model.path | actor.model_name_or_path model.model_name_or_path
dtype <- torch_dtype
tokenizer <- | data.tokenizer actor_rollout_ref.model.tokenizer_path
chat_template_kwargs <- | data.apply_chat_template_kwargs
chat_template <- chat_template_path | actor_rollout_ref.model.custom_chat_template | data.tokenizer_chat_template
gradient_checkpointing <- activation_checkpointing | actor_rollout_ref.model.enable_gradient_checkpointing |
    actor.gradient_checkpointing_enable model.gradient_checkpointing_enable
name <- run_name | trainer.experiment_name | logger.wandb.run_name
data <- dataset_name dataset_mixture train_dataset | data.train_files | data.prompt_dataset data.dataset
streaming <- dataset_streaming
model_init_kwargs.revision <- model_revision
model_init_kwargs.attn_implementation <- attn_implementation
trainer.router_aux_coef <- router_aux_loss_coef | | actor.aux_loss_coef model.aux_loss_coef
rollout.mask_truncated <- mask_truncated_completions
data_config,task.args.config <- dataset_config
split,task.args.split <- dataset_train_split dataset_split | | data.prompt_split
heldout_data,task.args.heldout_data <- eval_dataset_name eval_dataset | data.val_files
heldout_split,task.args.heldout_split <- eval_dataset_split dataset_test_split | | eval.split
task.args.prompt_column <- dataset_prompt_column | data.prompt_key | data.input_key
task.args.answer_column <- dataset_solution_column | | data.label_key
task.kind <- | | train.agent_func_path
tools <- | actor_rollout_ref.rollout.multi_turn.tool_config_path
reward <- reward_funcs | reward.custom_reward_function.path | reward.remote_url
eval_reward <- eval_reward_funcs
reward_model <- | reward.reward_model.model_path | reward.model_name_or_path
algorithm <- | algorithm.adv_estimator | algo.advantage.estimator
algorithm_args.group_normalize_adv <- | algorithm.norm_adv_by_std_in_grpo
algorithm_args.clip_eps_low <- | actor_rollout_ref.actor.clip_ratio_low
algorithm_args.clip_eps_high <- epsilon_high | actor_rollout_ref.actor.clip_ratio_high
algorithm_args.ratio_clip <- delta | actor_rollout_ref.actor.clip_ratio_c | actor.dual_clip
algorithm_args.tau_neg <- sapo_temperature_neg
algorithm_args.tau_pos <- sapo_temperature_pos
loss.beta,algorithm_args.reference_kl <- beta | actor_rollout_ref.actor.kl_loss_coef | algo.kl.init_coef
loss.nll_coeff <- | | model.nll_loss_coef
epochs <- num_train_epochs | trainer.total_epochs
steps <- max_steps | trainer.total_training_steps
batch_size <- | | train.batch_size
rollout.prompts <- | data.train_batch_size | rollout.batch_size
rollout.group_size <- num_generations | actor_rollout_ref.rollout.n | rollout.n_samples_per_prompt
rollout.max_new_tokens <- max_completion_length | data.max_response_length | rollout.max_new_tokens
rollout.temperature <- gen_temperature | actor_rollout_ref.rollout.temperature
rollout.top_k <- gen_top_k vllm_top_k | actor_rollout_ref.rollout.top_k
rollout.top_p <- gen_top_p | actor_rollout_ref.rollout.top_p
rollout.max_tool_turns <- max_tool_calling_iterations | actor_rollout_ref.rollout.multi_turn.max_assistant_turns
evaluation.samples_per_prompt <- num_generations_eval | actor_rollout_ref.rollout.val_kwargs.n | eval.n_samples_per_prompt
evaluation.prompts <- | data.val_max_samples
trainer.lr <- learning_rate | actor_rollout_ref.actor.optim.lr | adam.lr
trainer.eps <- adam_epsilon | | adam.eps
trainer.betas <- | actor_rollout_ref.actor.optim.betas | adam.betas
trainer.weight_decay <- | actor_rollout_ref.actor.optim.weight_decay | adam.weight_decay
trainer.warmup_ratio <- | actor_rollout_ref.actor.optim.lr_warmup_steps_ratio | lr_warmup_ratio
trainer.lr_min_ratio <- | actor_rollout_ref.actor.optim.min_lr_ratio
trainer.max_grad_norm <- | actor_rollout_ref.actor.grad_clip | max_norm
trainer.max_seq_len <- max_length | | data.max_len
trainer.micro_token_budget <- | actor_rollout_ref.actor.ppo_max_token_len_per_gpu | train.max_tokens_per_gpu
trainer.epochs_per_batch <- num_iterations | actor_rollout_ref.actor.ppo_epochs
epochs,trainer.epochs_per_batch <- | | train.max_epochs
trainer.model_device <- | trainer.device
trainer.sync_every_steps <- vllm_sync_interval_steps
trainer.eval_every_n_steps <- eval_steps | trainer.test_freq | eval.steps
trainer.eval_at_start <- eval_on_start
checkpoint.every_n_steps <- save_steps | trainer.save_freq | ckpt.save_steps
checkpoint.max_to_keep <- save_total_limit | trainer.max_actor_ckpt_to_keep | ckpt.max_num
callbacks.completions <- num_completions_to_print
callbacks.push_to_hub <- hub_model_id
callbacks.private <- hub_private_repo
log_every <- logging_steps
report_to <- | trainer.logger
reference.model <- reference_model_name_or_path ref_model | | ref.model_name_or_path
lora.rank <- lora_r | actor_rollout_ref.model.lora_rank | ds.lora.rank
lora.alpha <- lora_alpha | actor_rollout_ref.model.lora_alpha | ds.lora.alpha
lora.dropout <- lora_dropout | | ds.lora.dropout
lora.target_modules <- lora_target_modules | actor_rollout_ref.model.target_modules | ds.lora.target_modules
quantization.double <- use_bnb_nested_quant
quantization.compute_dtype <- bnb_4bit_compute_dtype
inference.url <- vllm_url vllm_server_base_url
inference.timeout_s <- vllm_server_timeout
inference.colocate <- vllm_enable_sleep_mode
place.servers <- | | vllm.num_engines
place.nodes <- | trainer.nnodes | actor.num_nodes
sharding.cpu_offload <- | | ds.adam_offload
sharding.context <- | actor_rollout_ref.actor.ulysses_sequence_parallel_size | ds.ring_attn_size
controllers.kl.target <- kl_target
controllers.kl.horizon <- kl_horizon
controllers.kl.step_size <- kl_ctl_step_size
report_args.project <- wandb_project | trainer.project_name | logger.wandb.project
report_args.entity <- wandb_entity | | logger.wandb.org
report_args.group <- wandb_run_group | | logger.wandb.group
"""
SETTINGS, VERL, OPENRLHF = (_read(_TABLE, column) for column in range(3))
"""Name -> our setting. Names of TRL, transformers and MaxEnt-GRPO take the same value, some of the
others another form. Of several settings the first that a command has is meant; the last is for
`ludic train`, and is behind a comma."""

INSTEAD = _read("""
output=RUNS name=RUN for the folder RUNS/RUN <- output_dir logging_dir
batch_size, or rollout.prompts of `ludic train`; trainer.micro_token_budget sizes the micro-batches <-
    per_device_train_batch_size gradient_accumulation_steps grad_accum_steps micro_batch_size
rollout.prompts, with rollout.group_size answers to each <- generation_batch_size
trainer.minibatches_per_batch=N for N optimizer steps on a batch of answers <- steps_per_generation
trainer.betas=[0.9,0.999] <- adam_beta1 adam_beta2
trainer.lr_min_ratio for min_lr_rate, trainer.decay_ratio for num_decay_steps of wsd; the others have no counterpart <-
    lr_scheduler_kwargs
trainer.optimizer=adamw, muon, adafactor or adamw8bit, or your own as module:factory <- optim optim_args optim_target_modules
trainer.mixed_precision_dtype=bf16, or fp16 <- bf16 fp16
trainer.model_device=cpu <- use_cpu
sharding.kind=full and ranks=N <- fsdp fsdp_config deepspeed parallelism_config accelerator_config
callbacks.keep_best=METRIC, or trainer.early_stopping_patience to end with the best weights <-
    load_best_model_at_end metric_for_best_model greater_is_better
callbacks.push_to_hub=OWNER/NAME <- push_to_hub
callbacks.completions_every=N for a table; rollouts.jsonl has all <- log_completions
--resume RUN, in Python train(resume=True) <- resume_from_checkpoint
trainer.packing=padding_free <- padding_free packing packing_strategy eval_packing
trainer.max_seq_len for prompt and answer together <- max_prompt_length
steps=N: a pass over R rows is R / rollout.prompts steps <- num_train_epochs
rows with a column `text` <- dataset_text_field
rows with `prompt` and `completion`, of which only completions are trained, or with `text` <- completion_only_loss
rows with `messages`, of which only the assistant's are trained (assistant_turns) <- assistant_only_loss
algorithm_args.clip_eps_low, and clip_eps_high, which has a default of its own <- epsilon
algorithm=NAME, such as grpo, dapo, dr_grpo, cispo or sapo <- loss_type
algorithm=gspo for sequence <- importance_sampling_level
algorithm_args.group_normalize_adv=false for none; batch has no counterpart <- scale_rewards
reward_normalize=each for normalize_then_sum <- multi_objective_aggregation
algorithm_args.correction: truncated, masked or icepop <- vllm_importance_sampling_correction vllm_importance_sampling_mode
    vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min vllm_importance_sampling_cap off_policy_mask_threshold
loss.nll_coeff for the weight of sft <- loss_weights
loss.score_regularization_lambda with loss.score_regularization_type=squared_sum <- center_rewards_coefficient
lora.rank=16 <- use_peft
lora.alpha=ALPHA*sqrt(RANK), since adapters are scaled by alpha / rank <- use_rslora
quantization=nf4, or quantization=int8 <- load_in_4bit bnb_4bit_quant_type load_in_8bit
rollout.stop, rollout.top_k, rollout.min_p or rollout.repetition_penalty <- generation_kwargs
inference=vllm; inference.python starts a server, and inference.url names one that runs <- use_vllm vllm_mode
inference.url=http://HOST:PORT <- vllm_server_host vllm_server_port
inference.server_args with the server's own, such as ['--tensor-parallel-size','2'] <-
    vllm_gpu_memory_utilization vllm_tensor_parallel_size vllm_max_model_length vllm_model_impl
task.kind=module:Class, a task of your own; in Python docs/rollouts.md too <- environment_factory rollout_func
""")
"""Name in TRL or transformers -> the setting to write instead, in another form or with another
value."""

REASONS = _read("""
not yet: the losses of pairs are sigmoid, ipo and robust <- ld_alpha f_divergence_type f_alpha_divergence_coef use_weighting
    discopop_tau
a mean is over the whole batch, of all ranks <- average_tokens_across_devices
cross entropy has no label smoothing <- label_smoothing_factor
a measurement is made as training is <- bf16_full_eval fp16_full_eval batch_eval_metrics eval_do_concat_batches
    eval_use_gather_object include_for_metrics prediction_loss_only
rollout.concurrency and trainer.micro_token_budget batch measurements <- per_device_eval_batch_size eval_accumulation_steps
torch chooses <- tf32
nothing is compiled <- torch_compile torch_compile_backend torch_compile_mode
trainer.logits=chunked never holds all logits, and needs no such kernel <- use_liger_kernel liger_kernel_config
the sampler has a cache, and training none <- use_cache cache_implementation
no noise is added to embeddings <- neftune_noise_alpha
lower trainer.micro_token_budget if memory runs out <- auto_find_batch_size torch_empty_cache_steps activation_offloading
metrics.jsonl has every step <- logging_strategy logging_first_step log_on_each_node logging_nan_inf_filter
    include_num_input_tokens_seen
messages come from Python's logging <- log_level log_level_replica
without a terminal there is a line every log_every steps <- disable_tqdm
trackers read their own environment variables <- project trackio_space_id trackio_bucket_id trackio_static_space_id
trainer.eval_every_n_steps says when <- eval_strategy evaluation_strategy eval_delay
checkpoint.every_n_steps says when <- save_strategy save_on_each_node
a checkpoint has all that a resume needs, and a resumed run goes on with it <- save_only_model ignore_data_skip
    restore_callback_states_from_checkpoint
a run that is asked to stop saves first <- enable_jit_checkpoint
`hf auth login` or HF_TOKEN logs in <- hub_token
every checkpoint is pushed, to the default branch <- hub_strategy hub_always_push hub_revision
a run never overwrites another <- overwrite_output_dir
`seed` fixes weights, the order of the data and sampling <- data_seed full_determinism shuffle_dataset
rows are in memory, or read as they come with streaming=true <- dataloader_num_workers dataloader_pin_memory
    dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order
    dataset_num_proc dataset_kwargs
the last batch may be smaller <- dataloader_drop_last
batches are packed by length <- group_by_length train_sampling_strategy length_column_name pad_to_multiple_of
reward functions get every column <- remove_unused_columns label_names
padding is masked, with the tokenizer's token <- pad_token pad_token_id
ranks exchange gradients themselves; the section `ranks` has their deadlines <- ddp_find_unused_parameters ddp_bucket_cap_mb
    ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout local_rank ds3_gather_for_generation ignore_bias_buffers
trainer.profile_memory logs the memory of passes <- skip_memory_metrics debug
`ludic train` trains and measures; `ludic eval` measures <- do_train do_eval do_predict
code of a model is never run <- trust_remote_code
a model has the dropout of its config <- disable_dropout
log-probabilities are computed in float32 (trainer.cast_logits_to_fp32) <- cast_lm_head_to_fp32
longer samples are cut on the right <- truncation_mode
the reference scores all pairs before the first step <- precompute_ref_log_probs precompute_ref_batch_size
there is no entropy term; algorithm=maxent_grpo keeps the variety of answers <- entropy_coef use_adaptive_entropy
    entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target
every token of an answer is trained <- top_entropy_quantile
there is no VESPO <- vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg
rloo's advantages are not scaled, and rewards are clipped in the reward function <- normalize_advantages reward_clip_range
the estimator is algorithm_args.kl_estimator <- use_bias_correction_kl
the reference never changes while the policy is trained <- sync_ref_model ref_model_mixup_alpha ref_model_sync_steps
rollouts.jsonl has every answer (rollout.log_every) <- log_unique_prompts log_completions_hub_repo
ludic view shows the images <- log_multimodal
the sampler in this process is the library's own <- use_transformers_continuous_batching use_transformers_paged
    transformers_continuous_batching_config
answers are free text <- vllm_structured_outputs_regex
free ports are chosen <- vllm_group_port
adapters are on linear layers alone <- lora_target_parameters lora_modules_to_save lora_task_type use_dora
quantised weights are stored as 8-bit numbers <- bnb_4bit_quant_storage
gradient_checkpointing=true has no further settings <- gradient_checkpointing_kwargs activation_checkpointing_kwargs
name a folder, or the newest revision is used <- reference_model_revision
""")
"""Name in TRL or transformers -> why there is no such setting."""

OTHERS = _read("""
write steps=N: a pass over R rows is R / rollout.prompts steps <- trainer.total_epochs train.num_episodes
write trainer.minibatches_per_batch=N for N optimizer steps on a batch of answers <- train.batch_size
    actor_rollout_ref.actor.ppo_mini_batch_size
write trainer.micro_token_budget, the tokens of a micro-batch <- train.micro_batch_size train.dynamic_batch_enable
    actor_rollout_ref.actor.ppo_micro_batch_size actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu
    actor_rollout_ref.actor.use_dynamic_bsz
write rollout.concurrency, the answers that are sampled together <- data.val_batch_size rollout.vllm_generate_batch_size
    rollout.micro_batch_size rollout.max_tokens_per_gpu
write rollout.prompts, with rollout.over_sampling_factor for more in the air <- data.gen_batch_size
write trainer.max_seq_len for prompt and answer together <- actor_rollout_ref.rollout.prompt_length
write rollout.max_new_tokens <- actor_rollout_ref.rollout.response_length
write algorithm_args.clip_eps_low and algorithm_args.clip_eps_high <- actor_rollout_ref.actor.clip_ratio actor.eps_clip
    actor.eps_clip_low_high
write algorithm_args.normalizer=tokens for token-mean, algorithm_args.length_normalize=true for seq-mean-token-mean; neither is
    seq-mean-token-sum <- actor_rollout_ref.actor.loss_agg_mode actor.loss_agg_mode
write algorithm=gspo, or another algorithm <- actor_rollout_ref.actor.policy_loss.loss_mode actor.policy_loss_type
write algorithm_args.correction: truncated, masked or icepop <- algorithm.rollout_correction algo.advantage.is_correction_mode
    algo.advantage.is_correction_level algo.advantage.is_correction_threshold
write algorithm_args.group_normalize_adv=false <- algo.advantage.no_std_norm
write algorithm_args.kl_estimator: k1 for kl, k2 for mse, k3 for low_var_kl <- actor_rollout_ref.actor.kl_loss_type
    algo.kl.estimator
write algorithm_args.reference_kl above 0: the penalty is in the loss, and none is in the reward <- algorithm.kl_ctrl.kl_coef
    algorithm.kl_penalty algorithm.use_kl_in_reward actor_rollout_ref.actor.use_kl_loss algo.kl.use_loss
write controllers.kl.target and controllers.kl.horizon, in steps and not in answers <- algorithm.kl_ctrl
write rollout.group_filter=nonzero_std, and rollout.patience for its limit <- algorithm.filter_groups algo.dynamic_filtering_enable
    algo.dynamic_filtering_range
write algorithm=dapo, with algorithm_args.overlong_buffer_tokens and algorithm_args.overlong_factor <- reward.overlong_buffer_len
    reward.overlong_penalty_factor
write trainer.lr_scheduler_type: `constant` has no warm-up, unlike `constant_with_warmup` <- lr_scheduler
    actor_rollout_ref.actor.optim.warmup_style actor_rollout_ref.actor.optim.lr_scheduler_type
write trainer.warmup_steps, where 0 and not -1 leaves it to trainer.warmup_ratio <- actor_rollout_ref.actor.optim.lr_warmup_steps
write sharding.kind=full and ranks=N <- ds.zero_stage ds.zpg actor_rollout_ref.actor.strategy actor_rollout_ref.actor.fsdp_config
    actor_rollout_ref.ref.fsdp_config
write ranks=N, the trainers of all machines together <- trainer.n_gpus_per_node actor.num_gpus_per_node
write trainer.mixed_precision_dtype=bf16, or dtype=bfloat16 for the weights <- ds.param_dtype
write model_init_kwargs.attn_implementation=flash_attention_2 <- ds.attn_implementation
write trainer.packing=padding_free <- ds.packing_samples actor_rollout_ref.model.use_remove_padding
write inference=vllm <- actor_rollout_ref.rollout.name actor_rollout_ref.rollout.mode
write inference.server_args with the server's own, such as ['--tensor-parallel-size','2'] <- vllm.enforce_eager
    vllm.enable_prefix_caching vllm.gpu_memory_utilization vllm.tensor_parallel_size
    actor_rollout_ref.rollout.gpu_memory_utilization actor_rollout_ref.rollout.tensor_model_parallel_size
    actor_rollout_ref.rollout.enforce_eager actor_rollout_ref.rollout.max_num_batched_tokens actor_rollout_ref.rollout.max_num_seqs
    actor_rollout_ref.rollout.max_model_len actor_rollout_ref.rollout.enable_chunked_prefill actor_rollout_ref.rollout.load_format
    actor_rollout_ref.rollout.dtype actor_rollout_ref.rollout.engine_kwargs actor_rollout_ref.rollout.enable_prefix_caching
write place.servers=N for N servers <- actor_rollout_ref.rollout.data_parallel_size
write inference.colocate=true for a server that shares the one GPU of a trainer <- vllm.enable_sleep ds.enable_sleep
    actor_rollout_ref.rollout.free_cache_engine
write inference.weights: gloo, ludic_nccl or disk <- vllm.sync_backend vllm.sync_with_ray
write inference.batches_ahead=N for batches that are sampled while another trains <- train.async_enable train.async_queue_size
write rollout.max_tool_turns, or task.kind=module:Class, a task of your own <- actor_rollout_ref.rollout.multi_turn data.multiturn
write data={datasets: [{id: FILE, weight: 0.5}, {id: FILE}]} <- data.prompt_probs data.dataset_probs
write output=RUNS name=RUN for the folder RUNS/RUN <- ckpt.path ckpt.output_dir trainer.default_local_dir
write --resume RUN <- ckpt.load_enable trainer.resume_mode trainer.resume_from_path
write report_to=wandb, or report_to=tensorboard <- logger.wandb.key logger.tensorboard_dir
write reward=module:function <- custom_reward_function reward.custom_reward_function
write reward_model=FOLDER; reward_model_args has its settings <- reward_model reward.reward_model
write loss.loss_type=ipo <- model.ipo_enable
write ludic eval RUN <- trainer.val_only
write a file with fewer rows <- data.max_samples data.train_max_samples
rows to fine-tune on have `prompt` and `completion`, or `messages`, and pairs `prompt`, `chosen` and `rejected` <- data.output_key
    data.chosen_key data.rejected_key
the model's chat template is used, and a tokenizer without one sees plain text <- data.apply_chat_template data.input_template
held-out problems are sampled as in training, and once more greedily <- actor_rollout_ref.rollout.val_kwargs eval.temperature
`ludic train` measures before the first step and after the last <- trainer.val_before_train
rollouts.jsonl has the answers (rollout.log_every) <- trainer.log_val_generations trainer.rollout_data_dir
    trainer.validation_data_dir
batches of ranks are always of equal cost <- trainer.balance_batch
with algorithm=ppo, set critic.model, and gamma, lam, value_clip, critic_lr or critic_warmup_steps of algorithm_args <- critic
    algorithm.gamma algorithm.lam algo.advantage.gamma algo.advantage.lambd train.colocate_critic_reward
    ds.value_head_prefix trainer.critic_warmup trainer.max_critic_ckpt_to_keep
there is no entropy term; algorithm=maxent_grpo keeps the variety of answers <- actor.entropy_coef
    actor_rollout_ref.actor.entropy_coeff
rewards are as the functions return them <- reward.normalize_enable reward.stop_properly_penalty_coef algorithm.use_pf_ppo
reward functions get every column <- data.reward_fn_key
prompts are read from the rows of data=FILE <- data.custom_cls data.return_raw_input_ids data.return_raw_chat
    data.return_full_prompt
gradient_checkpointing=true has no further settings <- actor.gradient_checkpointing_reentrant model.gradient_checkpointing_reentrant
`seed` fixes the order of prompts <- data.shuffle
prompts are measured before the first step, and what does not fit is cut off <- data.filter_overlong_prompts data.truncation
images are in the columns `image` and `images`, and videos are not read <- data.image_key data.video_key
no average of the weights is kept <- train.enable_ema train.ema_beta
the reference is in the memory of the trainer, and needs no settings but reference.model <- actor_rollout_ref.ref ref.num_nodes
    ref.num_gpus_per_node train.colocate_actor_ref ref.offload
`place` says where processes run <- train.colocate_all reward.num_nodes reward.num_gpus_per_node reward.offload ray_kwargs
sharding.context divides tokens and heads among processes, and no matrix <- ds.ring_attn_head_stride ds.tensor_parallel_size
    actor_rollout_ref.actor.megatron
docs/migration.md has the names of verl that have a counterpart <- actor_rollout_ref
""")
"""Name of verl or OpenRLHF, or section of verl's, that is no setting of the same value -> the
setting to write instead, or why there is none. A section answers for the names in it that have no
line."""

ARGUMENTS = _read("""
reward_functions <- reward_funcs
dataset <- train_dataset
tokenizer= with a folder or a hub id, unless it is the model's own <- processing_class tokenizer
the settings themselves, such as steps=100, trainer={'lr': 1e-5} or rollout={'group_size': 8} <- args
lora={'rank': 16, 'alpha': 32} <- peft_config
quantization={'kind': 'nf4'} <- quantization_config
nothing: a reward model's folder has its tokenizer (reward_model=FOLDER) <- reward_processing_classes
reward_model= with the folder of `ludic train-rm`, or a hub id <- reward_model
trainer={'lr': 1e-5, 'betas': [0.9, 0.99], 'lr_scheduler_type': 'cosine'} <- optimizers optimizer_cls_and_kwargs
nothing: batches are packed by the library <- data_collator
rows with `text`, with `prompt` and `completion`, or with `messages` <- formatting_func
callbacks=[...] of ludic.training.Callback <- compute_metrics preprocess_logits_for_metrics
ludic.training.Trainer with an algorithm of your own (docs/training.md) <- compute_loss_func
ludic.rollouts, or a protocol of your own (docs/rollouts.md) <- rollout_func
task= with a class of your own (docs/quickstart.md#a-multi-turn-environment) <- environment_factory
GRPO(model, reward, rows, tools=[...]), or rows with a column `tools` to fine-tune on <- tools
""")
"""Argument of TRL's trainers -> the argument to write in Python."""

BETA_NAMES = ("init_kl_coeff", "init_kl_coef", "kl_penalty_beta", "beta")
"""Names of beta in flat recipe files, the one that counts first."""

MAXENT_ONLY = _read("""
algorithm_args.tau <- maxent_tau
algorithm_args.q_temperature <- maxent_q_temperature
algorithm_args.q_epsilon <- maxent_q_epsilon
algorithm_args.length_normalize_reference <- maxent_length_normalize_ref
algorithm_args.clip_coeff <- maxent_clip_objective_coef
algorithm_args.clip_baseline <- maxent_clip_adv_baseline
controllers.entropy.target <- maxent_target_weight_entropy
controllers.entropy.start <- maxent_target_weight_entropy_start
controllers.entropy.final <- maxent_target_weight_entropy_final
controllers.entropy.horizon <- maxent_target_weight_entropy_horizon
controllers.entropy.lr <- maxent_tau_lr
controllers.entropy.least <- maxent_tau_min
controllers.entropy.most <- maxent_tau_max
controllers.entropy.warmup_steps <- maxent_tau_warmup_steps
""")
"""Keys of MaxEnt alone; with the objective of GRPO they are an error."""

META: Mapping[str, str] = {
    **{f"controller_meta_{name}": name for name in ("method", "lr", "tau_lr", "beta_lr", "beta_grad_clip", "update_interval")},
    **{f"controller_meta_{name}": name for name in ("optimizer", "truncation_steps", "use_hessian")},
    "controller_meta_analytic_steps": "truncation_steps",
}
"""Settings of `controllers.meta`, which `controller_meta_enabled` switches on."""

SEED: Mapping[str, str] = {
    **{f"info_seed_{name}": name for name in ("num_seeds", "temperature", "pooling")},
    "info_seed_lambda": "coeff",
    "info_seed_prompt_template": "template",
    "info_seed_loss_type": "loss",
}
"""Settings of `info_seed`, which `info_seed_enabled` switches on."""

FLAT_REASONS = _read("""
there is one loop, for every objective <- force_custom_loop
it is informational: each method has its own objective <- controller_meta_objective
its gradient is 0: the weights of answers are constants <- info_seed_alpha_entropy
the reference scores the micro-batches of the training step <- maxent_logprob_chunk_size maxent_score_slice_prefetch
    maxent_prompt_cache_size
every token of an answer is scored <- maxent_score_tail_tokens
an answer is never weighed with another step's reference <- maxent_allow_stale_reference_logprobs
weights that cannot be computed are an error <- maxent_allow_empty_weight_fallback
reference.source=adapters_off is the policy without adapters; a policy is no reference of itself <- maxent_share_reference_model
max_steps says how long to train <- num_train_epochs
write ludic train --resume RUN <- resume_from_checkpoint
write ludic train --resume RUN, or model=FOLDER for its weights alone <- init_from_checkpoint
it is the file that is run (report_header) <- recipe_path
nothing is uploaded without callbacks.push_to_hub <- hub_model_id hub_strategy push_to_hub
rollouts.jsonl has the answers (rollout.log_every) <- log_completions
metrics are over all ranks <- log_like_grpo
task.args.config holds for both <- eval_dataset_config
task.args.prompt_column holds for both <- eval_dataset_prompt_column
task.args.answer_column holds for both <- eval_dataset_solution_column
write ludic eval <- benchmarks
the document's advantages are centred, not scaled (algorithm_args.group_normalize_adv) <- scale_rewards
an answer without log-probabilities is an error <- vllm_logprob_fail_after vllm_logprob_fallback
they are always returned <- vllm_return_logprobs return_reward
weights are always sent (trainer.sync_every_steps) <- vllm_sync_weights
lost answers are counted, and their groups dropped <- vllm_max_completion_rounds vllm_retry_sleep
answers come from the server alone <- vllm_backfill_with_model
an answer ends with the end token; `</answer>` as a stop would cut the tag off <- vllm_stop_sequences gen_stop_sequences
the client of the server has no such setting <- vllm_best_of vllm_frequency_penalty vllm_presence_penalty
ludic serve has it <- vllm_gpu_memory_utilization
an answer with another client's tag is always an error <- vllm_client_tag_fail_fast
the state is in the checkpoint, and in the run's folder <- controller_state_path
a resumed run goes on with its state <- controller_overwrite_from_config
it is ludic train <- command
""")
"""As `REASONS`, for a flat recipe file alone, where these take precedence."""


_OPEN = ("algorithm_args", "model_init_kwargs", "report_args", "task.args")


def explain(name: str, known: Sequence[str]) -> str | None:
    """What replaces a name of another library, to end an error with; None if it is in no table.
    `known`: the settings of the command."""
    found = [path for table in (SETTINGS, VERL, OPENRLHF, MAXENT_ONLY) if name in table for path in table[name].split(",")]
    for path in found:
        section = path.rpartition(".")[0]
        is_open = section in _OPEN and section in known and (section != "task.args" or "algorithm_args" in known)
        if path in known or is_open:
            return f"it is called {path}"
    for before, table in (("", OTHERS), ("write ", INSTEAD), ("", REASONS), ("", FLAT_REASONS), ("in Python: ", ARGUMENTS)):
        if name in table:
            return before + table[name]
    if found:
        return f"it is {found[-1]}, a setting of another command"
    while "." in name:
        name = name.rpartition(".")[0]
        if name in OTHERS:
            return OTHERS[name]
    return None
