"""Plans against what was measured, what a search offers, and what is refused."""

from dataclasses import dataclass, replace

import pytest

from tests.planned import H200, actor_alone, run_config, run_of
from verl_megatron.config import TrainerConfig
from verl_megatron.planner.activations import training_bytes
from verl_megatron.planner.machine import GIB
from verl_megatron.planner.memory import plan_memory
from verl_megatron.planner.planned_run import PlannedRun
from verl_megatron.planner.rollout.serving import own_rollout_bytes, serving_bytes
from verl_megatron.planner.seconds import plan_seconds
from verl_megatron.planner.training import infer_seconds, layer_flops, passes, step_seconds

# ---- what was measured -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """A run on H200s, its first iteration left out."""

    gpus: int
    config: TrainerConfig
    gib: dict[str, float]  # in use at the end of a phase on the fullest GPU
    seconds: dict[str, float]
    iteration: float | None = None


def grpo_config(
    layout: str, prompts: int, *, mode: str = "keep", offload: str = "none", **settings
) -> TrainerConfig:
    """The 8B GRPO recipe: 8 answers to each prompt."""
    config = run_config(layout, samples=prompts, **settings)
    config.algorithm.name, config.algorithm.kl_coef, config.algorithm.kl_in = "grpo", 0.001, "loss"
    config.data.samples_per_prompt = 8
    config.reshard.mode, config.reshard.offload = mode, offload
    return config


def shared_prompts(layout: str, *, rollout: int, dtype: str = "bfloat16", **settings) -> TrainerConfig:
    """64 prompts of 512 tokens, each of them once, and 4 answers to each; in fp8 also the KV cache."""
    config = grpo_config(layout, 64, rollout=rollout, share=0.3, dtype=dtype, **settings)
    config.data.samples_per_prompt, config.engine.shared_prompts = 4, True
    config.algorithm.reuse_logprobs = True
    config.rollout.kv_cache_dtype = "fp8" if dtype == "fp8" else "auto"
    return config


def full_sharding() -> TrainerConfig:
    """`bash tests/gpu/check.sh full` on one GPU."""
    settings = dict(rollout=1, share=0.25, recompute="full", sharding="full", tokens_per_micro_batch=8192)
    config = grpo_config("tp1", 8, offload="steps", **settings)
    config.algorithm.kl_coef, config.algorithm.num_mini_batches = 0, 1
    config.engine.shared_prompts, config.rollout.max_num_seqs = True, 64
    config.algorithm.reuse_logprobs = True
    return config


def fp8_rollout(config: TrainerConfig) -> TrainerConfig:
    config.rollout.weight_dtype = "fp8"
    return config


def long_samples() -> TrainerConfig:
    """recipes/llama3.1_8b_grpo_16k.sh on two GPUs, 15,360 tokens of prompt and 1,024 of response."""
    config = grpo_config(
        "tp2sp",
        4,
        offload="optimizer",
        model="llama3.1-8b",
        rollout=2,
        share=0.59,
        tokens_per_micro_batch=16384,
    )
    config.data.max_prompt_tokens, config.rollout.max_tokens, config.algorithm.num_mini_batches = (
        15360,
        1024,
        2,
    )
    return config


def ppo_in_turns(samples: int, *, mode: str, mini_batches: int) -> TrainerConfig:
    """Actor and critic of 8B on two GPUs."""
    config = run_config("tp2sp", samples=samples, rollout=2, share=0.25)
    config.algorithm.num_mini_batches, config.reshard.mode, config.reshard.offload = mini_batches, mode, "all"
    return config


def with_critic(config: TrainerConfig, model: str) -> TrainerConfig:
    config.critic.path = model
    return config


def long_responses() -> TrainerConfig:
    """The 8B PPO recipe with 1,024 samples of 512 + 1,024 tokens."""
    config = run_config("pp2vpp4", samples=1024, rollout=1, share=0.52, tokens_per_micro_batch=8192)
    config.rollout.max_tokens, config.rollout.max_num_seqs, config.reshard.offload = 1024, 256, "optimizer"
    return config


# The first three are means of iterations 2-5 of recipes/llama3_8b_ppo.sh with 256 samples of 512 + 512
# tokens, the others medians (tests/gpu/check.sh: ppo, grpo, offload, long). weights_awake was read after the
# reshard, which then came last in an iteration and woke vLLM's weights only.
MEASURED = {
    "tp2pp2": Measured(
        gpus=4,
        config=run_config("tp2pp2sp", rollout=2, share=0.4),
        gib=dict(rollout=136.6, log_probs=81.1, critic_update=98.0, actor_update=98.0, weights_awake=88.1),
        seconds=dict(log_probs=4.4, values=1.9, critic_update=6.3, actor_update=7.2),
    ),
    "tp2dp2": Measured(
        gpus=4,
        config=run_config("tp2sp", rollout=4, share=0.2),
        gib=dict(log_probs=105.8, critic_update=121.2, actor_update=123.1, weights_awake=108.6),
        seconds=dict(rollout=4.8, log_probs=3.9, values=1.8, critic_update=5.9, actor_update=6.3),
        iteration=22.9,
    ),
    "1,024 samples, pp2vpp4dp2": Measured(
        gpus=4,
        config=long_responses(),
        gib=dict(rollout=127.9, log_probs=87.6, critic_update=123.8, actor_update=123.8),
        seconds=dict(rollout=22.4, log_probs=21.6, values=10.1, critic_update=30.8, actor_update=35.1),
        iteration=121.9,
    ),
    "tp2": Measured(
        gpus=2,
        config=with_critic(run_config("tp2sp", rollout=2, share=0.25), "llama3-1b"),
        gib=dict(log_probs=93.9, critic_update=96.2, actor_update=112.4, weights_awake=100.2),
        seconds=dict(rollout=6.9, log_probs=8.2, values=0.9, critic_update=2.4, actor_update=13.4),
        iteration=32.0,
    ),
    "in turns, swap": Measured(
        gpus=2,
        config=ppo_in_turns(64, mode="swap", mini_batches=2),
        gib=dict(rollout=64.6, log_probs=71.8, critic_update=102.2, actor_update=117.2),
        seconds=dict(rollout=2.97, log_probs=1.91, values=0.93, critic_update=2.88),
    ),
    "in turns, keep": Measured(
        gpus=2,
        config=ppo_in_turns(256, mode="keep", mini_batches=4),
        gib=dict(rollout=64.0, log_probs=71.6, critic_update=102.0, actor_update=117.0),
        seconds=dict(rollout=7.6, log_probs=7.6, values=3.7, critic_update=11.3),
    ),
    "grpo, dp2, share": Measured(
        gpus=2,
        config=grpo_config("tp1", 16, mode="share", offload="all", rollout=1, tokens_per_micro_batch=4096),
        gib=dict(rollout=93.1, log_probs=82.8, actor_update=130.6),
        seconds=dict(rollout=3.68, log_probs=3.31, actor_update=5.69),
        iteration=15.2,
    ),
    "grpo, pp2vpp4, swap": Measured(
        gpus=2,
        config=grpo_config(
            "pp2vpp4", 16, mode="swap", offload="grads", rollout=2, tokens_per_micro_batch=4096
        ),
        gib=dict(rollout=124.9, log_probs=69.3, actor_update=105.0),
        seconds=dict(log_probs=3.67, actor_update=6.11),  # the host disturbed the rollout
        iteration=14.2,
    ),
    "grpo, tp2": Measured(
        gpus=2,
        config=grpo_config("tp2sp", 8, rollout=2, share=0.2),
        gib=dict(log_probs=83.4, actor_update=99.9),
        seconds=dict(rollout=2.54, log_probs=1.91, actor_update=3.23),
        iteration=7.84,
    ),
    # tools/bench/offload.py: iterations in which the rollout was not disturbed.
    "grpo, tp2, 256 samples": Measured(
        gpus=2,
        config=grpo_config("tp2sp", 32, rollout=2, share=0.3),
        gib=dict(rollout=124.3, log_probs=83.0, actor_update=100.0),
        seconds=dict(rollout=5.10, log_probs=7.63, actor_update=11.73),
        iteration=24.7,
    ),
    "grpo, tp2, 256 samples, all away": Measured(
        gpus=2,
        config=grpo_config("tp2sp", 32, rollout=2, share=0.3, offload="all"),
        gib=dict(rollout=64.8, log_probs=68.0, actor_update=100.0),
        seconds=dict(rollout=5.10, log_probs=7.90, actor_update=11.73, reshard=1.16),
        iteration=26.1,
    ),
    # `benchmark verl`: iterations after the second, 2026-11-26 and 27
    "shared prompts, tp2": Measured(
        gpus=2,
        config=shared_prompts("tp2sp", rollout=2, tokens_per_micro_batch=8192),
        gib=dict(actor_update=102.8),
        seconds=dict(rollout=5.53, log_probs=4.64, actor_update=8.07),
        iteration=18.4,
    ),
    "shared prompts, dp2": Measured(
        gpus=2,
        config=shared_prompts("tp1", rollout=1, mode="share", offload="grads", tokens_per_micro_batch=4096),
        gib=dict(actor_update=124.6),
        seconds=dict(rollout=5.23, log_probs=4.19, actor_update=7.79),
        iteration=17.5,
    ),
    "shared prompts, tp2, fp8": Measured(
        gpus=2,
        config=shared_prompts("tp2sp", rollout=1, dtype="fp8", tokens_per_micro_batch=16384),
        gib=dict(actor_update=120.2),
        seconds=dict(rollout=5.10, log_probs=3.24, actor_update=5.71),
        iteration=14.4,
    ),
    "shared prompts, tp2, fp8 also in vLLM": Measured(
        gpus=2,
        config=fp8_rollout(shared_prompts("tp2sp", rollout=1, dtype="fp8", tokens_per_micro_batch=20480)),
        gib=dict(actor_update=129.6),
        seconds=dict(rollout=4.23, log_probs=3.10, actor_update=5.60),
        iteration=13.3,
    ),
    "shared prompts, pp2vpp4, fp8 also in vLLM": Measured(
        gpus=2,
        config=fp8_rollout(shared_prompts("pp2vpp4", rollout=1, dtype="fp8", tokens_per_micro_batch=8192)),
        gib=dict(actor_update=125.5),
        seconds=dict(rollout=4.23, log_probs=3.15, actor_update=6.06),
        iteration=13.8,
    ),
    "shared prompts, tp2dp2": Measured(
        gpus=4,
        config=shared_prompts("tp2sp", rollout=2, tokens_per_micro_batch=8192),
        gib=dict(actor_update=82.0),
        seconds=dict(rollout=3.47, log_probs=2.36, actor_update=4.24),
        iteration=10.4,
    ),
    "shared prompts, tp2dp2, fp8 also in vLLM": Measured(
        gpus=4,
        config=fp8_rollout(shared_prompts("tp2sp", rollout=1, dtype="fp8", tokens_per_micro_batch=20480)),
        gib=dict(actor_update=108.4),
        seconds=dict(rollout=3.01, log_probs=1.57, actor_update=2.94),
        iteration=8.0,
    ),
    "full sharding, one GPU": Measured(
        gpus=1,
        config=full_sharding(),
        gib=dict(rollout=65.8, log_probs=42.6, actor_update=134.4),
        seconds=dict(rollout=3.68, actor_update=7.22),
        iteration=11.3,
    ),
    "grpo, samples of 16,384": Measured(
        gpus=2,
        config=long_samples(),
        gib=dict(rollout=119.5, log_probs=82.7, actor_update=116.6),
        seconds=dict(rollout=10.3, log_probs=18.9, actor_update=29.5),
        iteration=60.6,
    ),
}


@pytest.mark.parametrize(
    ("name", "phase"), [(name, phase) for name, run in MEASURED.items() for phase in run.gib]
)
def test_memory_is_within_ten_percent_of_the_measured(name, phase):
    measured = MEASURED[name]
    run = run_of(measured.config, measured.gpus)
    memory = plan_memory(run, H200)
    unused = unused_share(run) if phase == "rollout" else 0.0  # measured while the cache filled the share
    assert (memory.phase_bytes(phase) + unused) / GIB == pytest.approx(measured.gib[phase], rel=0.10)


def unused_share(run: PlannedRun) -> float:
    """Bytes of vLLM's share that its cache leaves."""
    share = run.config.rollout.gpu_memory_utilization * H200.gpu_bytes
    return share - sum(serving_bytes(run, H200, own_rollout_bytes(run, 0)).values())


@pytest.mark.parametrize(
    ("name", "phase"), [(name, phase) for name, run in MEASURED.items() for phase in run.seconds]
)
def test_seconds_are_within_fifteen_percent_of_the_measured(name, phase):
    measured = MEASURED[name]
    run = run_of(measured.config, measured.gpus)
    assert plan_seconds(run, H200, plan_memory(run, H200)).seconds[phase] == pytest.approx(
        measured.seconds[phase], rel=0.15
    )


@pytest.mark.parametrize("name", [name for name, run in MEASURED.items() if run.iteration])
def test_an_iteration_is_within_fifteen_percent_of_the_measured(name):
    measured = MEASURED[name]
    run = run_of(measured.config, measured.gpus)
    assert plan_seconds(run, H200, plan_memory(run, H200)).iteration == pytest.approx(
        measured.iteration, rel=0.15
    )


# tools/bench/weight_sync.py: an actor alone, GiB with vLLM's weights awake and asleep. The last has no
# optimizer: it is not trained.
WEIGHT_SYNCS = [
    ("llama3-8b", "tp2sp", 2, "keep", True, (81.0, 73.3)),
    ("llama3-8b", "tp2sp", 2, "share", True, (73.8, 73.0)),
    ("llama3-70b", "tp2pp2sp", 4, "swap", False, (39.6, 39.4)),
]


@pytest.mark.parametrize(("model", "layout", "gpus", "mode", "trainable", "measured"), WEIGHT_SYNCS)
def test_the_memory_of_a_weight_sync(model, layout, gpus, mode, trainable, measured):
    awake, asleep = measured
    config = run_config(layout, model=model, rollout=gpus)
    config.reshard.mode = mode
    run = actor_alone(config, gpus)
    run = replace(run, roles=(replace(run.actor, trainable=trainable),))
    memory = plan_memory(run, H200)
    assert memory.phase_bytes("weights_awake") / GIB == pytest.approx(awake, rel=0.10)
    assert memory.idle_bytes / GIB == pytest.approx(asleep, rel=0.10)


# README, reshard: vLLM's own copy in GiB in the modes keep, share and swap.
OWN_COPIES = [
    ("llama3-8b", "tp2pp2", 4, 4, (3.74, 3.49, 0.00)),
    ("llama3-8b", "tp2", 2, 2, (7.48, 0.75, 0.00)),
    ("llama3-8b", "tp2", 4, 4, (3.74, 3.25, 0.00)),
    ("llama3-8b", "tp4", 2, 4, (7.48, 7.48, 3.74)),
    ("llama3-8b", "pp4", 4, 4, (3.74, 3.74, 0.49)),
    ("llama3-8b", "tp2pp2vpp2", 2, 4, (7.48, 4.11, 3.74)),
    ("qwen2.5-1.5b", "tp2pp2", 4, 4, (0.73, 0.70, 0.06)),
]


@pytest.mark.parametrize(("model", "layout", "rollout", "gpus", "copies"), OWN_COPIES)
def test_what_vllm_holds_of_its_own(model, layout, rollout, gpus, copies):
    """Memory that vLLM holds of its own.

    Not planned: swap's gaps between parameters (0.3 GiB for TP4 to TP2), and slots whose queries happen to
    stand before their keys (Qwen, share).
    """
    for mode, expected in zip(("keep", "share", "swap"), copies):
        config = run_config(layout, model=model, rollout=rollout)
        config.reshard.mode = mode
        run = actor_alone(config, gpus)
        own = max(own_rollout_bytes(run, stage) for stage in range(run.actor.layout.pp))
        assert own / GIB == pytest.approx(expected, abs={"keep": 0.01, "share": 0.04, "swap": 0.31}[mode])


# tools/bench/engine.py on two H200, an 8B model: 32 samples of 512 + 512 tokens a data-parallel rank, seconds
# of log-probs and of a step, GiB that a step takes on its way.
ENGINES = [
    ("tp1", "bfloat16", 4096, 0.800, 2.663, 18.5),
    ("tp1", "fp8", 4096, 0.870, 1.934, 28.8),
    ("tp2sp", "bfloat16", 8192, 0.467, 1.479, 18.1),
    ("pp2", "bfloat16", 4096, 0.477, 1.564, 17.3),
    ("pp2vpp4", "bfloat16", 4096, 0.448, 1.491, 19.8),
]


@pytest.mark.parametrize(("layout", "dtype", "tokens", "log_probs", "step", "gib"), ENGINES)
def test_an_engine_alone(layout, dtype, tokens, log_probs, step, gib):
    config = run_config(
        layout, samples=64 if layout == "tp1" else 32, dtype=dtype, tokens_per_micro_batch=tokens
    )
    config.algorithm.num_mini_batches = 1
    run = actor_alone(config, 2)
    actor = replace(run.actor, trainable=True)
    assert infer_seconds(run, H200, [actor]) == pytest.approx(log_probs, rel=0.15)
    assert step_seconds(run, H200, actor) == pytest.approx(step, rel=0.15)
    assert max(training_bytes(run, actor, stage) for stage in range(actor.layout.pp)) / GIB == pytest.approx(
        gib, rel=0.12
    )


def test_layers_of_transformer_engine_reach_the_measured_share():
    """56 % MFU of both passes: Llama-8B layers, 4096 tokens on one GPU, gradient accumulation included."""
    run = run_of(run_config("tp1", samples=4, tokens=2048, rollout=1), 1)
    layers = replace(run.actor, head="token")
    (one,) = passes(run, H200, layers)
    flops = 3 * 32 * run.packed_tokens * sum(layer_flops(run, layers))
    assert flops / (one.forward + one.backward) / H200.peak_flops == pytest.approx(0.56, rel=0.10)


@pytest.mark.parametrize(("gpus", "log_probs", "step"), [(1, 0.42, 1.91), (2, 0.46, 1.89)])
def test_passes_of_fully_sharded_weights_take_as_long_as_measured(gpus, log_probs, step):
    """8B with recomputation, 16 samples of 512 + 512 tokens a GPU, in two micro-batches (docs/memory.md)."""
    config = run_config("tp1", samples=16 * gpus, rollout=1, recompute="full", sharding="full")
    config.engine.tokens_per_micro_batch, config.algorithm.num_mini_batches = 8192, 1
    run = actor_alone(config, gpus)
    assert infer_seconds(run, H200, [run.actor]) == pytest.approx(log_probs, rel=0.07)
    assert step_seconds(run, H200, run.actor) == pytest.approx(step, rel=0.05)
