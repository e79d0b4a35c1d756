"""Settings of verl's PPO trainer and what stands for them here."""

from verl_megatron.config.names import Table, row
from verl_megatron.config.verl_run_names import RUN

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
        row(
            "data.return_raw_chat data.return_raw_input_ids data.return_full_prompt",
            "",
            "prompts are kept as they are",
        ),
        row("data.reward_fn_key", "", "other columns reach the function as extra"),
        row("data.image_key data.video_key data.return_multi_modal_inputs", "", "models see text only"),
        row(
            "data.dataloader_num_workers data.filter_overlong_prompts_workers data.use_shm",
            "",
            "files are read once, before the run",
        ),
        row("data.custom_cls data.datagen", "", "data is a file of rows"),
        row("data.sampler", "data.curriculum", "sources whose samples differ in score come more often"),
        row("data.validation_shuffle", "", "validation prompts keep their order"),
        row(
            "data.tokenizer critic.model.tokenizer_path reward_model.model.input_tokenizer",
            "",
            "each model's folder has its tokenizer",
        ),
        row(
            "data.apply_chat_template_kwargs arr.model.custom_chat_template",
            "",
            "the tokenizer's chat template is used as it is",
        ),
    ),
    "Models and layouts": (
        row("arr.model.path", "actor.path", "also the reference's"),
        row("critic.model.path", "critic.path", "empty: the actor's"),
        row("reward_model.model.path", "reward.path", "added to the function's score"),
        row("reward_model.enable", "reward.path", "empty: no reward model"),
        row(
            "arr.model.trust_remote_code data.trust_remote_code", "", "no code of a model folder is ever run"
        ),
        row("arr.model.use_remove_padding arr.actor.use_remove_padding", "", "always so"),
        row(
            "arr.model.use_fused_kernels arr.model.fused_kernel_options arr.model.use_liger "
            "arr.actor.use_fused_kernels arr.actor.use_torch_compile arr.ref.use_torch_compile",
            "",
            "kernels are chosen by `engine.transformer_impl`",
        ),
        row(
            "arr.actor.entropy_from_logits_with_chunking arr.actor.entropy_checkpointing "
            "arr.ref.entropy_from_logits_with_chunking arr.ref.entropy_checkpointing",
            "",
            "logits are split over tp and micro-batches",
        ),
        row("arr.model.enable_gradient_checkpointing", "engine.recompute", "`none`, `selective`, `full`"),
        row("critic.model.enable_gradient_checkpointing", "engine.recompute", "of all models"),
        row("arr.model.enable_activation_offload", "engine.recompute", "activations are computed again"),
        row(
            "arr.model.lora_rank arr.model.lora_alpha arr.model.target_modules arr.model.exclude_modules "
            "arr.model.lora arr.model.lora_adapter_path critic.model.lora",
            "",
            "all weights are trained",
        ),
        row("arr.model.override_config", "", "the model is as its config.json says"),
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
            "critic.megatron.tensor_model_parallel_size critic.megatron.pipeline_model_parallel_size "
            "critic.megatron.virtual_pipeline_model_parallel_size critic.megatron.sequence_parallel",
            "critic.layout",
            "such as `tp2pp2vpp2sp`",
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
            "reward_model.megatron.pipeline_model_parallel_size "
            "reward_model.megatron.virtual_pipeline_model_parallel_size "
            "reward_model.megatron.context_parallel_size reward_model.megatron.sequence_parallel",
            "reward.layout",
            "such as `tp2pp2cp2sp`",
        ),
        row(
            "arr.ref.ulysses_sequence_parallel_size reward_model.ulysses_sequence_parallel_size",
            "actor.layout reward.layout",
            "such as `tp2cp2`",
        ),
        row("arr.actor.megatron.use_distributed_optimizer", "engine.distributed_optimizer"),
        row(
            "arr.actor.megatron.param_offload arr.actor.fsdp_config.param_offload",
            "`reshard.mode=swap`",
            "true: the nearest, one copy of the weights, which stays on the GPU; false: leave it out",
        ),
        row(
            "arr.actor.megatron.grad_offload arr.actor.fsdp_config.grad_offload",
            "`reshard.offload=grads`",
            "true: of actor and critic; false: leave it out",
        ),
        row(
            "arr.actor.megatron.optimizer_offload arr.actor.fsdp_config.optimizer_offload",
            "`reshard.offload=optimizer`",
            "true: `all` offloads gradients, too; false: leave it out",
        ),
        row(
            "arr.ref.megatron.param_offload critic.megatron.param_offload "
            "reward_model.megatron.param_offload arr.ref.fsdp_config.param_offload "
            "critic.model.fsdp_config.param_offload reward_model.model.fsdp_config.param_offload",
            "",
            "weights stay on the GPU; a frozen model's can be fp8, as in `reference.dtype`",
        ),
        row(
            "arr.actor.megatron.use_dist_checkpointing arr.actor.megatron.use_mbridge "
            "arr.actor.megatron.dist_checkpointing_path arr.actor.megatron.vanilla_mbridge",
            "",
            "Hugging Face folders are read directly",
        ),
        row("arr.actor.megatron.override_transformer_config.recompute_granularity", "engine.recompute"),
        row(
            "arr.actor.optim.override_optimizer_config.optimizer_cpu_offload",
            "`reshard.offload=steps`",
            "the step itself is the GPU's",
        ),
        row(
            "arr.actor.megatron.override_transformer_config arr.actor.megatron.override_ddp_config "
            "arr.actor.megatron.override_mcore_model_config arr.actor.optim.override_optimizer_config",
            "",
            "Megatron-Core's own settings follow from section engine",
        ),
        row(
            "arr.actor.megatron.expert_model_parallel_size arr.actor.megatron.expert_tensor_parallel_size",
            "",
            "models are dense",
        ),
        row("arr.actor.megatron.dtype", "engine.dtype"),
        row("arr.actor.megatron.seed", "run.seed"),
        row(
            "arr.actor.fsdp_config arr.ref.fsdp_config critic.model.fsdp_config "
            "reward_model.model.fsdp_config",
            "engine.sharding",
            "`full` is FSDP of weights, gradients and optimizer, without further settings",
        ),
        row(
            "arr.actor.strategy arr.ref.strategy critic.strategy reward_model.strategy",
            "",
            "Megatron-Core only; `engine.sharding=full` shards as FSDP does",
        ),
        row("arr.nccl_timeout critic.nccl_timeout reward_model.nccl_timeout", "`run.stall_timeout_s`"),
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
            "arr.rollout.log_prob_micro_batch_size_per_gpu arr.rollout.log_prob_micro_batch_size "
            "arr.ref.log_prob_micro_batch_size_per_gpu arr.ref.log_prob_micro_batch_size "
            "critic.ppo_micro_batch_size_per_gpu critic.ppo_micro_batch_size "
            "critic.forward_micro_batch_size_per_gpu critic.forward_micro_batch_size "
            "reward_model.micro_batch_size_per_gpu reward_model.micro_batch_size",
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
        row("arr.actor.optim.min_lr", "engine.min_lr_ratio", "a share of the peak"),
        row("arr.actor.optim.lr_decay_steps", "", "the schedule ends with `run.iterations`"),
        row("arr.actor.optim.optimizer arr.actor.optim.optimizer_impl", "", "always AdamW"),
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
        row("arr.actor.policy_loss", "", "objectives with covariances are not there"),
        row("algorithm.use_pf_ppo algorithm.pf_ppo", "", "samples are not drawn again by their scores"),
        row("algorithm.filter_groups.enable", "algorithm.dynamic_sampling", "missing groups are filled up"),
        row("algorithm.filter_groups.max_num_gen_batches", "algorithm.max_sampling_rounds"),
        row("algorithm.filter_groups.metric", "", "groups are compared by score"),
        row(
            "reward_model.overlong_buffer.len reward_model.overlong_buffer.penalty_factor",
            "reward.overlong_tokens reward.overlong_penalty",
        ),
        row(
            "reward_model.reward_kwargs.overlong_buffer_cfg.len "
            "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor",
            "reward.overlong_tokens reward.overlong_penalty",
        ),
        row(
            "reward_model.overlong_buffer.enable reward_model.reward_kwargs.overlong_buffer_cfg.enable",
            "`reward.overlong_tokens`",
            "0: off",
        ),
        row("algorithm.lam", "algorithm.gae_lambda", "default 0.95 here, 1.0 in verl"),
        row("algorithm.norm_adv_by_std_in_grpo", "algorithm.scale_by_std"),
        row(
            "arr.actor.ppo_mini_batch_size critic.ppo_mini_batch_size",
            "`algorithm.num_mini_batches`",
            "a number of steps: train_batch_size / ppo_mini_batch_size",
        ),
        row("arr.actor.ppo_epochs critic.ppo_epochs", "`algorithm.epochs`", "the same for both models"),
        row("critic.enable", "algorithm.name", "only `ppo` has a critic"),
        row("arr.actor.shuffle critic.shuffle", "", "mini-batches take the samples in order"),
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
            "arr.actor.loss_agg_mode critic.loss_agg_mode",
            "`algorithm.normalizer`",
            "`token-mean`: `token_mean`; `seq-mean-token-mean`: `sequence_mean`; "
            "`seq-mean-token-sum-norm`: `sequence_sum`",
        ),
        row(
            "arr.actor.use_kl_loss", "`algorithm.kl_in=loss`", "true: with a coefficient; false: leave it out"
        ),
        row("arr.actor.kl_loss_coef", "`algorithm.kl_coef`", "with `algorithm.kl_in=loss`"),
        row(
            "arr.actor.kl_loss_type",
            "algorithm.kl_estimator",
            "`low_var_kl` is `k3`, `mse` is `k2`; `kl` (k1) is refused: in a loss its gradient is 0",
        ),
        row(
            "algorithm.use_kl_in_reward",
            "`algorithm.kl_in=reward`",
            "true: with a coefficient; false: leave it out",
        ),
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
    **RUN,
}
