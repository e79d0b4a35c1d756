"""Arguments of TRL's trainers and what stands for them here."""

from verl_megatron.config.names import Table, row

TRL: Table = {
    "GRPO": (
        row("num_generations", "data.samples_per_prompt"),
        row(
            "per_device_train_batch_size generation_batch_size",
            "`data.prompts_per_iteration` × `data.samples_per_prompt`",
            "over all devices; TRL counts completions of one",
        ),
        row(
            "steps_per_generation",
            "algorithm.num_mini_batches",
            "optimizer steps per pass: steps_per_generation / gradient_accumulation_steps",
        ),
        row("gradient_accumulation_steps", "", "follows from `engine.tokens_per_micro_batch`"),
        row("num_iterations", "algorithm.epochs"),
        row(
            "beta",
            "`algorithm.kl_coef`",
            "with `algorithm.kl_in=loss algorithm.kl_estimator=k3`; 0: no reference model",
        ),
        row("epsilon", "`algorithm.clip_ratio_low` and `algorithm.clip_ratio_high`"),
        row("epsilon_high", "algorithm.clip_ratio_high"),
        row("delta", "algorithm.dual_clip", "it limits the ratio of negative advantages"),
        row(
            "scale_rewards",
            "algorithm.scale_by_std",
            "`group` is true, `none` is false, `batch` is not available",
        ),
        row(
            "loss_type",
            "`algorithm.normalizer`",
            "`dapo` is `token_mean`, `grpo` `sequence_mean`, `dr_grpo` `sequence_sum`; "
            "cispo is `algorithm.name=cispo`",
        ),
        row(
            "importance_sampling_level",
            "algorithm.objective",
            "`token` is `clip`, `sequence` is `gspo`",
        ),
        row(
            "vllm_importance_sampling_correction vllm_importance_sampling_mode",
            "`algorithm.correction`, `algorithm.correction_level`",
            "TRL's default is `sequence_mask`, ours `none`",
        ),
        row(
            "vllm_importance_sampling_clip_min vllm_importance_sampling_clip_max",
            "algorithm.correction_low algorithm.correction_high",
            "default 0 and 2 here, none and 3 in TRL",
        ),
        row("vllm_importance_sampling_cap", "algorithm.correction_high"),
        row("use_bias_correction_kl", "algorithm.kl_unbiased"),
        row(
            "mask_truncated_completions",
            "algorithm.mask_cut",
            "their tokens do not count in the normalizer here; they do in TRL",
        ),
        row("top_entropy_quantile", "", "all response tokens are trained on"),
        row(
            "max_prompt_length", "data.max_prompt_tokens", "longer prompts are refused or dropped, never cut"
        ),
        row("max_completion_length", "rollout.max_tokens"),
        row(
            "temperature top_p top_k",
            "rollout.temperature rollout.top_p rollout.top_k",
            "no top-k is -1 here, 0 in TRL",
        ),
        row(
            "min_p repetition_penalty generation_kwargs",
            "",
            "they change probabilities that training repeats",
        ),
        row("use_vllm vllm_mode", "", "always vLLM in the trainer's ranks"),
        row("vllm_tensor_parallel_size", "rollout.tp"),
        row("vllm_gpu_memory_utilization", "rollout.gpu_memory_utilization"),
        row("vllm_max_model_length", "", "it is `data.max_prompt_tokens` + `rollout.max_tokens`"),
        row("vllm_enable_sleep_mode", "rollout.sleep", "on by default here"),
        row(
            "reward_funcs reward_weights",
            "`reward.function`",
            "as `[a.py:f:0.8,b.py:g:0.2]`, with the weights; a model is `reward.path`",
        ),
        row("sync_ref_model ref_model_mixup_alpha ref_model_sync_steps", "", "the reference stays as it is"),
        row("shuffle_dataset", "data.shuffle"),
        row("ds3_gather_for_generation", "", "slices go straight into vLLM's weights"),
        row("remove_unused_columns", "", "other columns reach the function as extra"),
    ),
    "Asynchronous GRPO": (
        row("weight_sync_steps", "async.sync_interval", "with `rollout.devices` and `async.buffer=window`"),
        row("max_staleness", "async.max_staleness", "weight syncs"),
    ),
    "PPO": (
        row("num_ppo_epochs", "algorithm.epochs"),
        row("num_mini_batches", "algorithm.num_mini_batches"),
        row("cliprange", "`algorithm.clip_ratio_low` and `algorithm.clip_ratio_high`"),
        row("cliprange_value", "algorithm.cliprange_value"),
        row(
            "vf_coef",
            "critic.value_coef",
            "with `critic.share_trunk=true`; else the critic has `critic.lr` of its own",
        ),
        row("gamma lam", "algorithm.gamma algorithm.gae_lambda"),
        row(
            "kl_coef kl_estimator",
            "algorithm.kl_coef algorithm.kl_estimator",
            "with `algorithm.kl_in=reward`",
        ),
        row("whiten_rewards", "algorithm.whiten", "advantages are whitened, not rewards"),
        row("response_length", "rollout.max_tokens"),
        row("stop_token_id stop_token", "`rollout.stop_token_ids`", "a list"),
        row("missing_eos_penalty", "reward.missing_eos_penalty"),
        row("sft_model_path", "actor.path"),
        row("reward_model_path", "reward.path", "set `reward.function=` to leave the function out"),
        row("total_episodes", "run.iterations", "total_episodes / samples of an iteration"),
        row("local_rollout_forward_batch_size", "engine.tokens_per_micro_batch", "tokens, not samples"),
        row("num_sample_generations", "run.validate_interval", "iterations between validations"),
    ),
    "SFT": (
        row(
            "max_length max_seq_length", "`data.max_tokens`", "longer rows are refused or dropped, never cut"
        ),
        row("packing padding_free", "", "always packed, without attention between samples"),
        row("completion_only_loss assistant_only_loss", "", "always: prompts carry no loss"),
        row(
            "dataset_text_field",
            "`data.prompt_key` and `data.response_key`",
            "a prompt and a response are needed",
        ),
    ),
    "DPO and reward models": (
        row("loss_type", "dpo.loss", "`sigmoid` or `ipo`"),
        row("beta label_smoothing", "dpo.beta dpo.label_smoothing"),
        row("ref_model", "", "always the actor's initial weights"),
        row("precompute_ref_log_probs", "", "computed in each step"),
        row("center_rewards_coefficient", "", "scores are not centred"),
    ),
    "All trainers": (
        row("model_name_or_path", "actor.path"),
        row("train_dataset eval_dataset", "data.train data.validation"),
        row("learning_rate", "`actor.lr`", "and `critic.lr`"),
        row("lr_scheduler_type", "engine.lr_decay_style", "default constant here, linear in TRL"),
        row("warmup_steps", "engine.lr_warmup_steps"),
        row("warmup_ratio", "engine.lr_warmup_steps", "steps, not a share"),
        row("weight_decay max_grad_norm", "engine.weight_decay engine.clip_grad"),
        row("adam_beta1 adam_beta2", "`engine.adam_betas`", "second beta 0.95 here, 0.999 in TRL"),
        row("adam_epsilon", "engine.adam_eps"),
        row("bf16 fp16", "`engine.dtype`", "auto: bfloat16 on GPUs, with float32 master weights"),
        row("gradient_checkpointing", "engine.recompute", "off by default here"),
        row("output_dir seed data_seed", "`run.output_dir`, `run.seed`, `run.seed`"),
        row("max_steps", "run.iterations", "optimizer steps of a supervised run"),
        row("num_train_epochs", "run.iterations", "rows × epochs / rows of a step"),
        row("save_steps save_total_limit", "run.save_interval run.keep_last_k", "iterations"),
        row("eval_steps", "run.validate_interval"),
        row(
            "eval_strategy save_strategy logging_steps", "", "intervals count iterations; every one is logged"
        ),
        row("resume_from_checkpoint", "run.resume", "automatic: the newest"),
        row("load_best_model_at_end", "run.keep_best_k", "keeps the best checkpoints"),
        row("report_to", "run.track_metrics"),
        row("run_name", "run.output_dir", "its last part names the run"),
        row("log_completions", "", "validation answers are kept: validation/step_N.jsonl"),
        row("per_device_eval_batch_size", "", "all validation rows are taken at once"),
        row("deepspeed fsdp fsdp_config", "`engine.sharding=full`", "weights, gradients and optimizer"),
        row("use_peft lora_r", "", "all weights are trained"),
        row("trust_remote_code", "", "no code of a model folder is ever run"),
        row("ddp_timeout", "run.stall_timeout_s"),
        row("push_to_hub hub_model_id", "", "upload the exported folder: hf upload"),
        row("torch_compile use_liger_kernel", "", "kernels are chosen by `engine.transformer_impl`"),
    ),
}
