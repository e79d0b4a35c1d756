"""Settings of verl that are not about models and their updates: rollout, rewards and the run."""

from verl_megatron.config.names import Table, row

RUN: Table = {
    "Rollout": (
        row("arr.rollout.n critic.rollout_n", "`data.samples_per_prompt`"),
        row(
            "arr.rollout.temperature arr.rollout.top_p arr.rollout.top_k arr.rollout.ignore_eos "
            "arr.rollout.gpu_memory_utilization arr.rollout.max_num_seqs arr.rollout.enforce_eager "
            "arr.rollout.dtype",
            "rollout.temperature rollout.top_p rollout.top_k rollout.ignore_eos "
            "rollout.gpu_memory_utilization rollout.max_num_seqs rollout.enforce_eager rollout.dtype",
        ),
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
        row(
            "arr.rollout.val_kwargs.top_p arr.rollout.val_kwargs.top_k",
            "",
            "validation takes `rollout.top_p` and `rollout.top_k`, as training does",
        ),
        row("arr.rollout.val_kwargs.n", "", "one response to each validation prompt"),
        row("arr.rollout.do_sample", "rollout.temperature", "rollouts are always sampled"),
        row(
            "arr.rollout.max_num_batched_tokens arr.rollout.enable_chunked_prefill "
            "arr.rollout.enable_prefix_caching arr.rollout.cudagraph_capture_sizes "
            "arr.rollout.engine_kwargs arr.rollout.disable_log_stats arr.rollout.multi_stage_wake_up",
            "",
            "vLLM's defaults",
        ),
        row(
            "arr.rollout.max_model_len",
            "",
            "it is `data.max_prompt_tokens` + `rollout.max_tokens`",
        ),
        row(
            "arr.rollout.load_format arr.rollout.layered_summon arr.rollout.layer_name_map",
            "",
            "vLLM gets its weights from the actor",
        ),
        row("arr.rollout.name arr.rollout.mode", "", "always vLLM, in the ranks of the run"),
        row("arr.rollout.multi_turn arr.rollout.agent data.tool_config_path", "", "one turn a sample"),
        row(
            "arr.rollout.data_parallel_size arr.rollout.pipeline_model_parallel_size "
            "arr.rollout.expert_parallel_size",
            "",
            "there are as many replicas of `rollout.tp` ranks as fit",
        ),
        row("arr.rollout.quantization", "`rollout.weight_dtype=fp8`", "fp8 alone"),
        row(
            "arr.rollout.update_weights_bucket_megabytes "
            "arr.rollout.checkpoint_engine.update_weights_bucket_megabytes",
            "`reshard.window_mib`",
        ),
        row("arr.rollout.over_sample_rate", "", "`async.buffer=window` does not wait for long samples"),
        row("arr.rollout.skip_rollout arr.rollout.skip_dump_dir", "", "every iteration generates"),
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
            "as `FILE.py:NAME`, also by data_source: `{SOURCE:FILE.py:NAME,default:math}`",
        ),
        row(
            "reward_model.reward_manager reward_manager",
            "",
            "functions run in worker processes, or on a server: `http://...`",
        ),
        row("reward_model.launch_reward_fn_async", "", "always so"),
        row("reward_model.rollout", "", "the reward model is a classifier in Megatron-Core, without vLLM"),
        row("reward_model.enable_resource_pool", "reward.devices", "ranks of the reward model"),
        row("reward_model.max_length", "", "whole samples are scored"),
        row("reward_model.sandbox_fusion", "`reward.function=code`", "a sandbox on the same host"),
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
        row(
            "trainer.log_val_generations trainer.validation_data_dir",
            "",
            "all are kept: validation/step_N.jsonl",
        ),
        row("trainer.rollout_data_dir", "rollout.record_interval", "records are in samples/ of the run"),
        row(
            "arr.actor.profiler arr.ref.profiler arr.rollout.profiler critic.profiler "
            "reward_model.profiler global_profiler arr.rollout.trace",
            "`run.track_metrics`",
            "`profile` and `timeline` are entries",
        ),
        row("trainer.device", "", "GPUs where there are some, else the CPU"),
        row(
            "trainer.ray_wait_register_center_timeout ray_init ray_kwargs trainer.use_legacy_worker_impl",
            "",
            "there is no Ray driver",
        ),
        row("arr.actor.checkpoint.save_contents", "run.export", "at the end of the run"),
        row("arr.actor.checkpoint.load_contents", "", "all of a checkpoint is read"),
        row("arr.actor.checkpoint.async_save", "run.async_save"),
        row("trainer.default_hdfs_dir", "", "copy the run's folder"),
        row("trainer.del_local_ckpt_after_load", "run.keep_last_k", "checkpoints to keep"),
        row("trainer.esi_redundant_time", "", "SIGTERM saves; see GRACE_S"),
    ),
}
