"""Engines, requests and state that the processes of test_rollout.py share. Import it before vLLM."""

import gc
import os
import random
import sys
import time
from pathlib import Path

folder = Path(sys.argv[-1])
# An engine alone would also wait for a store of the launcher's, which is not at the address of its own.
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")
TORCHRUN = {name: os.environ.pop(name, "") for name in LAUNCHER}

import numpy  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from verl_megatron.config import RolloutConfig  # noqa: E402
from verl_megatron.rollout.sampling import Request, Sampling, sample_seed  # noqa: E402
from verl_megatron.rollout.vllm import VLLMActor  # noqa: E402


def make_prompt(i: int) -> list[int]:
    return [1] + [3 + (7 * i + j * j) % 140 for j in range(2 + (147 if i % 4 == 3 else i))]


CONFIG = RolloutConfig(max_num_seqs=8, kv_cache_mib=32)
# Blocks of 128 tokens for three to seven samples, depending on tp.
FOLLOWING = RolloutConfig(max_num_seqs=8, kv_cache_mib=1, dynamic_batching=True)
SAMPLING = Sampling(temperature=0.7, max_tokens=24, ignore_eos=True)
# Prompts of 3 to 149 tokens, two samples each; the long ones fill a block of the prefix cache.
PROMPTS = [make_prompt(i) for i in range(16)]
REQUESTS = [Request(sample, PROMPTS[sample // 2], sample_seed(5, 1, sample)) for sample in range(32)]
STARTED = time.monotonic()


def actor_of(name, tp=1, *, config=CONFIG, **options):
    actor = VLLMActor(folder / name, tp, config=config, max_model_len=256, **options)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"{time.monotonic() - STARTED:.1f} s: engine {name} is up", flush=True)
    return actor


def tokens_of(samples):
    return {str(sample.sample_id): sample.token_ids for sample in samples}


def process_state():
    generators = torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()
    return (
        generators,
        gc.isenabled(),
        dict(os.environ),
        torch.get_num_threads(),
        torch.set_num_threads,
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
    )


def seven(tensor):
    """A trainer's buffer of the same layout, filled with something that no initialisation writes."""
    return torch.full_like(tensor, 7.0)


def write_all(target, source):
    """All of source's parameters into target's, in place."""
    written = target.weight_target()
    for name, tensor in source.weight_target().items():
        written.pop(name).copy_(tensor)
    assert not written, written.keys()
