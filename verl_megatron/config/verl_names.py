"""Settings of verl's PPO trainer and what stands for them here."""

from verl_megatron.config.names import Table, row

VERL: Table = {
    "Data": (
        row("data.train_files data.val_files", "data.train data.validation"),
        row("data.train_batch_size data.gen_batch_size", "`data.prompts_per_iteration`", "prompts, in both"),
        row("data.val_batch_size", "", "all validation prompts are generated at once"),
        row("data.val_max_samples", "data.validation_samples", "0 instead of -1"),
        row("data.train_max_samples", "", "shorten the file"),
        row("data.max_prompt_length", "data.max_prompt_tokens"),
        row("data.max_response_length", "rollout.max_tokens"),
        row("data.filter_overlong_prompts", "`data.overlong=drop`"),
        row("data.truncation", "data.overlong", "`error` or `drop`; prompts are never truncated"),
        row("data.seed", "run.seed"),
        row("data.return_raw_chat data.return_raw_input_ids", "", "prompts are kept as they are"),
        row("data.reward_fn_key", "", "other columns reach the function as extra"),
        row("data.image_key data.video_key", "", "models see text only"),
        row("data.dataloader_num_workers data.use_shm", "", "files are read once, before the run"),
        row("data.custom_cls.path", "", "data is a file of rows"),
    ),
    "Models and layouts": (
        row("arr.model.path", "actor.path", "also the reference's"),
        row("critic.model.path", "critic.path", "empty: the actor's"),
        row("reward_model.model.path", "reward.path", "added to the function's score"),
        row("reward_model.enable", "reward.path", "empty: no reward model"),
        row("arr.model.trust_remote_code", "", "no code of a model folder is ever run"),
        row("arr.model.use_remove_padding arr.model.use_fused_kernels", "", "always so"),
        row("arr.model.enable_gradient_checkpointing", "engine.recompute", "`none`, `selective`, `full`"),
        row("critic.model.enable_gradient_checkpointing", "engine.recompute", "of all models"),
        row("arr.model.lora_rank arr.model.lora_alpha", "", "all weights are trained"),
        row("arr.model.use_shm arr.model.external_lib", "", "weights are read by byte range"),
        row(
            "arr.actor.megatron.tensor_model_parallel_size arr.actor.megatron.pipeline_model_parallel_size",
            "actor.layout",
            "such as `tp2pp2`; dp is what remains",
        ),
        row(
            "arr.actor.megatron.virtual_pipeline_model_parallel_size",
            "actor.layout",
            "such as `tp2pp2vpp2`: model chunks per rank",
        ),
        row(
            "arr.actor.megatron.context_parallel_size arr.actor.ulysses_sequence_parallel_size",
            "actor.layout",
            "such as `tp2cp2`",
        ),
        row("arr.actor.megatron.sequence_parallel", "actor.layout", "`sp` at its end"),
        row(
            "critic.megatron.tensor_model_parallel_size critic.megatron.pipeline_model_parallel_size",
            "critic.layout",
            "such as `tp2pp2`",
        ),
        row(
            "critic.megatron.context_parallel_size critic.ulysses_sequence_parallel_size",
            "critic.layout",
            "such as `tp2cp2`",
        ),
        row(
            "arr.ref.megatron.tensor_model_parallel_size arr.ref.megatron.pipeline_model_parallel_size",
            "actor.layout",
            "also the reference's; on ranks of its own `reference.layout`",
        ),
        row(
            "reward_model.megatron.tensor_model_parallel_size "
            "reward_model.megatron.pipeline_model_parallel_size",
            "reward.layout",
            "such as `tp2pp2`",
        ),
        row("arr.actor.megatron.use_distributed_optimizer", "engine.distributed_optimizer"),
        row(
            "arr.actor.megatron.param_offload",
            "`reshard.mode=swap`",
            "the nearest: one copy of the weights, which stays on the GPU",
        ),
        row("arr.actor.megatron.grad_offload", "`reshard.offload=grads`", "of actor and critic"),
        row(
            "arr.actor.megatron.optimizer_offload",
            "`reshard.offload=optimizer`",
            "`all` offloads gradients, too",
        ),
        row(
            "arr.actor.megatron.use_dist_checkpointing arr.actor.megatron.use_mbridge",
            "",
            "Hugging Face folders are read directly",
        ),
        row("arr.actor.megatron.override_transformer_config.recompute_granularity", "engine.recompute"),
        row(
            "arr.actor.optim.override_optimizer_config.optimizer_cpu_offload",
            "`reshard.offload=steps`",
            "the step itself is the GPU's",
        ),
        row("arr.actor.megatron.seed", "run.seed"),
        row(
            "arr.actor.fsdp_config arr.actor.fsdp_config.param_offload",
            "`engine.sharding=full`",
            "weights, gradients and optimizer; `reshard.offload` takes gradients and moments off the GPU",
        ),
        row("arr.actor.strategy critic.strategy", "", "Megatron-Core only"),
        row("arr.hybrid_engine", "`rollout.devices`", "`false`: ranks that only generate"),
    ),
    "Micro-batches": (
        row(
            "arr.actor.ppo_max_token_len_per_gpu critic.ppo_max_token_len_per_gpu "
            "critic.forward_max_token_len_per_gpu arr.ref.log_prob_max_token_len_per_gpu "
            "arr.rollout.log_prob_max_token_len_per_gpu reward_model.forward_max_token_len_per_gpu",
            "`engine.tokens_per_micro_batch`",
            "tokens; a micro-batch holds cp times as many",
        ),
        row(
            "arr.actor.ppo_micro_batch_size_per_gpu arr.actor.ppo_micro_batch_size "
            "arr.rollout.log_prob_micro_batch_size_per_gpu arr.ref.log_prob_micro_batch_size_per_gpu "
            "critic.ppo_micro_batch_size_per_gpu critic.forward_micro_batch_size_per_gpu "
            "reward_model.micro_batch_size_per_gpu",
            "`engine.tokens_per_micro_batch`",
            "tokens, not samples",
        ),
        row(
            "arr.actor.use_dynamic_bsz critic.use_dynamic_bsz arr.ref.log_prob_use_dynamic_bsz "
            "arr.rollout.log_prob_use_dynamic_bsz reward_model.use_dynamic_bsz",
            "`engine.dynamic_batching`",
            "micro-batches are always packed by tokens; this also fits their size to the memory",
        ),
        row(
            "micro_batch_size_per_device actor.micro_batch_size_per_device",
            "`engine.tokens_per_micro_batch`",
            "tokens, not samples; a sample has at most `data.max_prompt_tokens` + `rollout.max_tokens`",
        ),
        row(
            "rollout.batch_size_per_device",
            "`rollout.max_num_seqs`",
            "samples that a replica decodes at once; `data.prompts_per_iteration` counts prompts of all",
        ),
        row("trainer.balance_batch", "", "always so"),
        row("arr.actor.use_prefix_grouper", "engine.shared_prompts"),
    ),
    "Optimizer": (
        row("arr.actor.optim.lr critic.optim.lr", "actor.lr critic.lr"),
        row(
            "arr.actor.optim.lr_warmup_steps critic.optim.lr_warmup_steps",
            "`engine.lr_warmup_steps`",
            "optimizer steps here, iterations in verl",
        ),
        row("arr.actor.optim.lr_warmup_steps_ratio", "engine.lr_warmup_steps", "steps, not a share"),
        row(
            "arr.actor.optim.warmup_style arr.actor.optim.lr_decay_style arr.actor.optim.lr_scheduler_type",
            "`engine.lr_decay_style`",
            "`constant`, `linear`, `cosine`",
        ),
        row("arr.actor.optim.min_lr_ratio", "engine.min_lr_ratio"),
        row("arr.actor.optim.weight_decay", "engine.weight_decay", "one value for actor and critic"),
        row("arr.actor.optim.clip_grad arr.actor.grad_clip critic.grad_clip", "`engine.clip_grad`"),
        row("arr.actor.optim.betas", "engine.adam_betas"),
        row("arr.actor.optim.total_training_steps", "run.iterations", "iterations of the whole run"),
    ),
    "Algorithm": (
        row(
            "algorithm.adv_estimator",
            "algorithm.name",
            "`gae` is `ppo`; `grpo`, `rloo`, `opo`, `remax` and `reinforce_plus_plus` are the same",
        ),
        row(
            "arr.actor.policy_loss.loss_mode",
            "algorithm.objective",
            "`vanilla` is `clip`, `gspo` is `gspo_token`, `cispo` is the same",
        ),
        row("algorithm.filter_groups.enable", "algorithm.dynamic_sampling", "missing groups are filled up"),
        row("algorithm.filter_groups.max_num_gen_batches", "algorithm.max_sampling_rounds"),
        row("algorithm.filter_groups.metric", "", "groups are compared by score"),
        row(
            "reward_model.overlong_buffer.len reward_model.overlong_buffer.penalty_factor",
            "reward.overlong_tokens reward.overlong_penalty",
        ),
        row("reward_model.overlong_buffer.enable", "reward.overlong_tokens", "0: off"),
        row("algorithm.lam", "algorithm.gae_lambda", "default 0.95 here, 1.0 in verl"),
        row("algorithm.norm_adv_by_std_in_grpo", "algorithm.scale_by_std"),
        row(
            "arr.actor.ppo_mini_batch_size critic.ppo_mini_batch_size",
            "`algorithm.num_mini_batches`",
            "a number of steps: train_batch_size / ppo_mini_batch_size",
        ),
        row("arr.actor.ppo_epochs critic.ppo_epochs", "`algorithm.epochs`", "the same for both models"),
        row("arr.actor.shuffle", "", "mini-batches take the samples in order"),
        row(
            "arr.actor.clip_ratio",
            "`algorithm.clip_ratio_low` and `algorithm.clip_ratio_high`",
        ),
        row(
            "arr.actor.clip_ratio_low arr.actor.clip_ratio_high",
            "algorithm.clip_ratio_low algorithm.clip_ratio_high",
        ),
        row("arr.actor.clip_ratio_c", "algorithm.dual_clip", "default 0 (off) here, 3 in verl"),
        row("critic.cliprange_value", "algorithm.cliprange_value", "default 0.2 here, 0.5 in verl"),
        row("arr.actor.entropy_coeff", "algorithm.entropy_coef"),
        row(
            "arr.actor.loss_agg_mode",
            "algorithm.normalizer",
            "`token-mean`: `token_mean`; `seq-mean-token-mean`: `sequence_mean`; "
            "`seq-mean-token-sum-norm`: `sequence_sum`",
        ),
        row("arr.actor.use_kl_loss", "`algorithm.kl_in=loss`", "with a coefficient"),
        row("arr.actor.kl_loss_coef", "`algorithm.kl_coef`", "with `algorithm.kl_in=loss`"),
        row(
            "arr.actor.kl_loss_type",
            "algorithm.kl_estimator",
            "`low_var_kl` is `k3`, `mse` is `k2`; `kl` (k1) is refused: in a loss its gradient is 0",
        ),
        row("algorithm.use_kl_in_reward", "`algorithm.kl_in=reward`", "with a coefficient"),
        row("algorithm.kl_penalty", "algorithm.kl_estimator", "`kl` is `k1`"),
        row("algorithm.kl_ctrl.kl_coef", "`algorithm.kl_coef`", "with `algorithm.kl_in=reward`"),
        row(
            "algorithm.kl_ctrl.target_kl algorithm.kl_ctrl.horizon",
            "algorithm.kl_ctrl_target algorithm.kl_ctrl_horizon",
            "of a whole sample here, a mean per token in verl",
        ),
        row("algorithm.kl_ctrl.type", "algorithm.kl_ctrl_target", "0: fixed"),
        row("trainer.critic_warmup", "algorithm.critic_warmup", "n iterations here, n - 1 in verl"),
        row(
            "algorithm.rollout_correction.rollout_is algorithm.rollout_correction.rollout_is_threshold",
            "`algorithm.correction=truncate`, `algorithm.correction_high`",
            "default 2 in both, off in both",
        ),
        row(
            "algorithm.rollout_correction.rollout_rs algorithm.rollout_correction.rollout_rs_threshold",
            "`algorithm.correction=mask`, `algorithm.correction_high`",
            "masked tokens count in the normalizer here, not in verl",
        ),
        row(
            "algorithm.rollout_correction.bypass_mode",
            "`algorithm.old_logprobs`",
            "`sampler` is true, `recompute` false",
        ),
        row(
            "arr.actor.tis_imp_ratio_cap",
            "`algorithm.correction_high`",
            "with `algorithm.correction=truncate`",
        ),
    ),
    "Rollout": (
        row("arr.rollout.n", "data.samples_per_prompt"),
        row("arr.rollout.tensor_model_parallel_size", "rollout.tp"),
        row("arr.rollout.response_length", "rollout.max_tokens"),
        row("arr.rollout.prompt_length", "data.max_prompt_tokens"),
        row("arr.rollout.free_cache_engine", "rollout.sleep", "weights and KV cache"),
        row("arr.rollout.val_kwargs.temperature", "data.validation_temperature", "0: greedy"),
        row(
            "arr.rollout.val_kwargs.do_sample",
            "data.validation_temperature",
            "0: greedy, verl's default; here the default is 1",
        ),
        row("arr.rollout.val_kwargs.n", "", "one response to each validation prompt"),
        row("arr.rollout.do_sample", "rollout.temperature", "rollouts are always sampled"),
        row(
            "arr.rollout.max_num_batched_tokens arr.rollout.enable_chunked_prefill "
            "arr.rollout.enable_prefix_caching",
            "",
            "vLLM's defaults",
        ),
        row(
            "arr.rollout.max_model_len",
            "",
            "it is `data.max_prompt_tokens` + `rollout.max_tokens`",
        ),
        row("arr.rollout.load_format", "", "vLLM gets its weights from the actor"),
        row("arr.rollout.name arr.rollout.mode", "", "always vLLM, in the ranks of the run"),
        row("arr.rollout.multi_turn.enable arr.rollout.agent.num_workers", "", "one turn a sample"),
        row("arr.rollout.calculate_log_probs", "", "always so"),
    ),
    "Asynchronous": (
        row(
            "async_training.trigger_parameter_sync_step",
            "async.sync_interval",
            "iterations between weight syncs, with `async.buffer=window`",
        ),
        row(
            "async_training.staleness_threshold",
            "async.max_staleness",
            "a number of weight syncs, where verl has a share of samples",
        ),
        row("async_training.partial_rollout", "async.partial", "`finish` is false"),
        row("async_training.require_batches", "`data.prompts_per_iteration`", "of an optimizer step"),
    ),
    "Rewards": (
        row(
            "custom_reward_function.path custom_reward_function.name",
            "`reward.function`",
            "as `path.py:name`, also by data_source: `{SOURCE:path.py:name,default:math}`",
        ),
        row(
            "reward_model.reward_manager",
            "",
            "functions run in worker processes, or on a server: `http://...`",
        ),
        row("reward_model.launch_reward_fn_async", "", "always so"),
        row("reward_model.sandbox_fusion.url", "`reward.function=code`", "a sandbox on the same host"),
    ),
    "Trainer": (
        row("trainer.total_training_steps", "run.iterations"),
        row("trainer.total_epochs", "run.iterations", "epochs × prompts / `data.prompts_per_iteration`"),
        row(
            "trainer.save_freq trainer.test_freq",
            "run.save_interval run.validate_interval",
            "0 instead of -1",
        ),
        row(
            "trainer.val_before_train trainer.val_only",
            "",
            "validated first, where there is `data.validation`",
        ),
        row("trainer.resume_mode", "run.resume", "`auto` is `newest`, `disable` is `never`"),
        row("trainer.resume_from_path", "run.output_dir", "its newest checkpoint"),
        row(
            "trainer.max_actor_ckpt_to_keep trainer.max_critic_ckpt_to_keep",
            "`run.keep_last_k`",
            "2 by default",
        ),
        row("trainer.default_local_dir", "run.output_dir"),
        row("trainer.logger", "run.track_metrics"),
        row(
            "trainer.project_name trainer.experiment_name", "`run.output_dir`", "its last part names the run"
        ),
        row(
            "trainer.nnodes trainer.n_gpus_per_node",
            "`NNODES`, `GPUS`",
            "environment of recipes and launchers; `--ranks` of `verl-megatron train`",
        ),
        row("trainer.log_val_generations", "", "all are kept: validation/step_N.jsonl"),
        row("trainer.device", "", "GPUs where there are some, else the CPU"),
        row("trainer.ray_wait_register_center_timeout ray_init.num_cpus", "", "there is no Ray driver"),
        row("arr.actor.checkpoint.save_contents", "run.export", "at the end of the run"),
        row("trainer.esi_redundant_time", "", "SIGTERM saves; see GRACE_S"),
    ),
}
