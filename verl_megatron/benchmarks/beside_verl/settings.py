"""The job as settings of each program."""

from collections.abc import Sequence
from typing import Any

from verl_megatron.benchmarks.beside_verl.job import Job
from verl_megatron.benchmarks.scaling.runs import MEASURING

KL_COEF = 0.001  # to the reference: in the loss of GRPO, in the reward of PPO
FUSIONS = ("apply_rope_fusion", "bias_activation_fusion", "bias_dropout_fusion")
# Variables of verl's process: no downloads, no services, and the loopback without a proxy.
VERL_ENVIRONMENT = {
    **dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"), "1"),
    **dict.fromkeys(("VLLM_NO_USAGE_STATS", "DO_NOT_TRACK", "PYTHONUNBUFFERED", "HYDRA_FULL_ERROR"), "1"),
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # as in our runs
    **dict.fromkeys(("RAY_USAGE_STATS_ENABLED", "RAY_ENABLE_UV_RUN_RUNTIME_ENV", "RAY_DEDUP_LOGS"), "0"),
    **dict.fromkeys(("no_proxy", "NO_PROXY"), "*"),
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # it would end workers by a share of memory that loading exceeds
}


def our_settings(job: Job, name: str, given: Sequence[str]) -> dict[str, Any]:
    """Return what `verl-megatron train` needs besides the recipe of `RECIPES` and the user's settings.

    Args:
        name: of the run, and of its folder.
        given: SECTION.SETTING=VALUE of the user, which take the place of ours.
    """
    layout = f"tp{job.tp}sp" if job.tp > 1 else "tp1"
    settings = MEASURING | {
        "actor.path": str(job.folder / "model"),
        "actor.layout": layout,
        "data.train": str(job.folder / "train.jsonl"),
        "data.shuffle": False,
        "data.prompts_per_iteration": job.prompts,
        "data.samples_per_prompt": job.samples,
        "data.max_prompt_tokens": job.prompt_tokens,
        "reward.function": f"{job.folder}/reward.py:score",
        "rollout.tp": job.rollout_tp,
        "rollout.min_tokens": 0,  # all are as long as max_tokens: MEASURING ignores the end token
        "rollout.max_tokens": job.response_tokens,
        "rollout.gpu_memory_utilization": job.gpu_memory_utilization,
        "rollout.max_num_seqs": 256,
        "engine.tokens_per_micro_batch": job.tokens,
        "engine.lr_warmup_steps": 0,
        "engine.recompute": "none",
        "algorithm.num_mini_batches": job.steps,
        "algorithm.kl_coef": KL_COEF,
        "reshard.mode": "keep",
        "reshard.offload": "none",
        "run.iterations": job.iterations,
        "run.track_metrics": "[console,jsonl]",
        "run.output_dir": job.folder / name,
    }
    settings |= {"critic.layout": layout} if job.algorithm == "ppo" else {}
    taken = {setting.partition("=")[0] for setting in given}
    return {setting: value for setting, value in settings.items() if setting not in taken}


def verl_settings(job: Job) -> dict[str, Any]:
    """Return the settings of `verl.trainer.main_ppo`, as verl 0.9 names them.

    Megatron-Core through Megatron-Bridge, without recomputation and offload, with CUDA graphs in vLLM.
    """
    actor = "actor_rollout_ref.actor"
    settings = _data(job) | _trainer(job) | _rollout(job)
    settings |= {
        "actor_rollout_ref.model.path": job.folder / "verl_model",
        "actor_rollout_ref.model.use_remove_padding": True,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": True,
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": job.tokens,
        f"{actor}.entropy_coeff": 0,
        f"{actor}.calculate_entropy": False,
        f"{actor}.optim.lr": 1e-6,
    }
    settings |= _updates(actor, job) | _megatron(f"{actor}.megatron", job)
    if job.algorithm == "grpo":
        return settings | {
            "algorithm.adv_estimator": "grpo",
            "algorithm.use_kl_in_reward": False,
            f"{actor}.use_kl_loss": True,
            f"{actor}.kl_loss_coef": KL_COEF,
            f"{actor}.kl_loss_type": "low_var_kl",
        }
    critic = {
        "algorithm.adv_estimator": "gae",
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_ctrl.kl_coef": KL_COEF,
        "critic.model.path": job.folder / "verl_model",
        "critic.model.use_remove_padding": True,
        "critic.model.enable_gradient_checkpointing": False,
        # verl 0.9 reads neither ppo_max_token_len_per_gpu nor forward_max_token_len_per_gpu of a critic
        "+critic.ppo_infer_max_token_len_per_gpu": job.tokens,
        "critic.optim.lr": 1e-5,
    }
    return settings | critic | _updates("critic", job) | _megatron("critic.megatron", job)


def _data(job: Job) -> dict[str, Any]:
    return {
        "model_engine": "megatron",
        "data.train_files": job.folder / "verl_train.parquet",
        "data.val_files": job.folder / "verl_train.parquet",
        "data.train_batch_size": job.prompts,
        "data.max_prompt_length": job.prompt_tokens,
        "data.max_response_length": job.response_tokens,
        "data.shuffle": False,
        "data.filter_overlong_prompts": False,
        "data.truncation": "left",
        "data.dataloader_num_workers": 0,
        "reward.num_workers": 2,
        "reward.custom_reward_function.path": job.folder / "verl_reward.py",
        "reward.custom_reward_function.name": "compute_score",
    }


def _trainer(job: Job) -> dict[str, Any]:
    return {
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": job.gpus,
        "trainer.total_training_steps": job.iterations,
        "trainer.total_epochs": job.iterations,
        "trainer.save_freq": -1,
        "trainer.test_freq": -1,
        "trainer.val_before_train": False,
        "trainer.resume_mode": "disable",
        "trainer.logger": "[console,file]",
        "trainer.project_name": "beside",
        "trainer.experiment_name": "verl",
        "trainer.default_local_dir": job.folder / "verl_checkpoints",
        "trainer.balance_batch": True,
        "+ray_kwargs.ray_init.include_dashboard": False,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 2,
    }


def _rollout(job: Job) -> dict[str, Any]:
    rollout = {
        "name": "vllm",
        "n": job.samples,
        "ignore_eos": True,
        "tensor_model_parallel_size": job.rollout_tp,
        "gpu_memory_utilization": job.gpu_memory_utilization,
        "enforce_eager": False,
        "free_cache_engine": True,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "max_model_len": job.prompt_tokens + job.response_tokens,
        "log_prob_use_dynamic_bsz": True,
        "log_prob_max_token_len_per_gpu": job.tokens,
        "load_format": "dummy",  # the actor's weights come before the first rollout
        "agent.num_workers": 4,
        "checkpoint_engine.update_weights_bucket_megabytes": 2048,
    }
    return {f"actor_rollout_ref.rollout.{name}": value for name, value in rollout.items()}


def _updates(role: str, job: Job) -> dict[str, Any]:
    return {
        f"{role}.ppo_mini_batch_size": job.prompts // job.steps,
        f"{role}.ppo_epochs": 1,
        f"{role}.use_dynamic_bsz": True,
        f"{role}.ppo_max_token_len_per_gpu": job.tokens,
    }


def _megatron(place: str, job: Job) -> dict[str, Any]:
    transformer = f"+{place}.override_transformer_config"
    return {
        f"{place}.tensor_model_parallel_size": job.tp,
        f"{place}.sequence_parallel": job.tp > 1,
        f"{place}.use_mbridge": True,
        f"{place}.vanilla_mbridge": False,  # Megatron-Bridge
        f"{place}.use_remove_padding": True,
        f"{place}.param_offload": False,
        f"{place}.optimizer_offload": False,
        f"{transformer.removeprefix('+')}.attention_backend": "fused",
        # without apex the output layer has none
        f"{transformer}.gradient_accumulation_fusion": False,
        **{f"{transformer}.{fusion}": True for fusion in FUSIONS},
    }


def as_arguments(settings: dict[str, Any]) -> list[str]:
    """Return SECTION.SETTING=VALUE for each."""
    return [f"{name}={value}" for name, value in settings.items()]
