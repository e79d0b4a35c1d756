"""What vLLM's scheduler asks of the model is the same while its cache manager is asked less often."""

import random
from types import SimpleNamespace

import pytest
import torch

from verl_megatron.examples.toy import make_toy
from verl_megatron.rollout.sampling import Sampling
from verl_megatron.rollout.vllm_decoding.bookkeeping import Bookkeeping
from verl_megatron.rollout.vllm_decoding.requests import sampling_params

pytest.importorskip("vllm")
BLOCK, BLOCKS, SAMPLES = 8, 36, 12  # the cache holds about seven samples


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    make_toy(folder := tmp_path_factory.mktemp("toy"))
    return folder / "model"


def make_scheduler(model, *, is_async: bool):
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    config = VllmConfig(
        model_config=ModelConfig(model=str(model), max_model_len=64, skip_tokenizer_init=True),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=SAMPLES,
            max_num_batched_tokens=64,
            max_model_len=64,
            is_encoder_decoder=False,
            async_scheduling=is_async,
        ),
    )
    config.cache_config.num_gpu_blocks = BLOCKS
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    cache = KVCacheConfig(
        num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    return (AsyncScheduler if is_async else Scheduler)(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
    )


def make_requests():
    """Samples of two prompts and of lengths that end anywhere in a block."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    for number in range(SAMPLES):
        prompt = [number % 2 + 3] * (5 + number // 2)
        params = sampling_params(Sampling(max_tokens=40, ignore_eos=True), seed=0, max_tokens=20 + 2 * number)
        yield Request(
            request_id=str(number),
            prompt_token_ids=prompt,
            sampling_params=params,
            pooling_params=None,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
        )


def steps_of(scheduler, *, in_flight: int):
    """Schedule and answer steps until all samples have ended; yields what each asks of the model."""
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import RequestStatus

    for request in make_requests():
        scheduler.add_request(request)
    waiting = []
    for step in range(400):
        if step == 25:
            scheduler.finish_requests(["3"], RequestStatus.FINISHED_ABORTED)
        asked = scheduler.schedule()
        cached = asked.scheduled_cached_reqs
        yield (
            dict(asked.num_scheduled_tokens),
            [(new.req_id, new.block_ids, new.num_computed_tokens) for new in asked.scheduled_new_reqs],
            list(zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens)),
            cached.num_output_tokens,
            sorted(cached.resumed_req_ids),
            sorted(asked.finished_req_ids),
        )
        names = list(asked.num_scheduled_tokens)
        draw = random.Random(step)
        whole = [not scheduler.requests[name].is_prefill_chunk for name in names]
        tokens = [[draw.randrange(3, 30)] if is_whole else [] for is_whole in whole]
        found = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=tokens,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=None,
        )
        waiting.append((asked, found))
        if len(waiting) >= in_flight:
            scheduler.update_from_output(*waiting.pop(0))
        if not scheduler.has_unfinished_requests():
            return
    pytest.fail("samples never end")


@pytest.mark.parametrize("is_async", [False, True])
def test_steps_are_those_of_vllm(model, is_async):
    scheduler = make_scheduler(model, is_async=is_async)
    expected = list(steps_of(scheduler, in_flight=1 + is_async))
    assert sum(bool(resumed) for *_, resumed, _ in expected), "samples were preempted"
    lighter = make_scheduler(model, is_async=is_async)
    manager, asked = lighter.kv_cache_manager, []
    allocate_slots = manager.allocate_slots
    manager.allocate_slots = lambda *args, **options: (asked.append(1), allocate_slots(*args, **options))[1]
    books = Bookkeeping(
        SimpleNamespace(
            output_processor=SimpleNamespace(process_outputs=pytest.fail),
            engine_core=SimpleNamespace(engine_core=SimpleNamespace(scheduler=lighter)),
        )
    )
    with books.in_use():
        assert list(steps_of(lighter, in_flight=1 + is_async)) == expected
    scheduled = sum(len(tokens) for tokens, *_ in expected)
    assert len(asked) < scheduled / 2
    assert manager.usage == scheduler.kv_cache_manager.usage == 0
