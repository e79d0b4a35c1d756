"""The size of vLLM's KV cache: what the memory holds, and no more than all samples fill."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from tests.planned import H200, run_config, run_of
from verl_megatron.config import RolloutConfig, TrainerConfig
from verl_megatron.model_specs import samples_at_most
from verl_megatron.planner.rollout.serving import BLOCK_TOKENS, kv_bytes_per_token, kv_cache_bytes
from verl_megatron.rollout.vllm_cache import limited, no_larger_than_needed

abstract = pytest.importorskip("vllm.v1.executor.abstract")
GIB = 1 << 30


@dataclass
class Spec:
    """What vLLM says of a layer's cache."""

    block_size: int
    page_size_bytes: int


class Executor(abstract.Executor):
    """An executor whose worker has a GPU with 8 GiB free."""

    def __init__(self, layers: dict[str, Spec], max_model_len: int, free: int = 8 * GIB):
        self.layers, self.free = layers, free
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=max_model_len))

    def collective_rpc(self, method, *given, **named):
        return {"determine_available_memory": [self.free], "get_kv_cache_spec": [self.layers]}[method]

    _init_executor = check_health = lambda self: None


@pytest.mark.parametrize(
    ("samples", "tokens", "adaptive", "blocks"),
    [
        (4, 100, False, 4 * (7 + 1) + 1),  # an empty block, and one ahead of each sample
        (4, 96, False, 4 * (6 + 1) + 1),
        (3, 96, True, 5 * (6 + 1) + 1),  # 60 % of the cache hold them
    ],
)
def test_the_cache_holds_all_samples_and_no_more(samples, tokens, adaptive, blocks):
    layers = {"0": Spec(16, 4096), "1": Spec(16, 4096)}
    executor = Executor(layers, tokens)
    with no_larger_than_needed(samples, adaptive=adaptive):
        assert executor.determine_available_memory() == [2 * 4096 * blocks]
    assert executor.determine_available_memory() == [8 * GIB], "other engines are as they were"


FILE = {"data__validation": "val.jsonl"}


@pytest.mark.parametrize(
    ("given", "validation", "samples"),
    [
        ({}, 0, 64),  # 256 samples for four replicas
        ({"rollout__max_num_seqs": 48}, 0, 48),
        ({"data__prompts_per_iteration": 65}, 0, 65),
        ({"data__prompts_per_iteration": 63, "data__samples_per_prompt": 3}, 0, 48),
        ({"algorithm__name": "remax", "data__samples_per_prompt": 1}, 0, 32),  # a greedy one beside each
        (FILE, 100, 64),
        (FILE, 401, 101),
        (FILE, 4000, 256),
        (FILE | {"data__validation_samples": 402}, 4000, 101),
        (FILE | {"data__validation_samples": 4000}, 401, 101),
        (FILE | {"data__validation_samples": 402}, None, 101),
        (FILE, None, 256),  # a plan does not read the file
        ({}, None, 64),
        ({"data__validation_samples": 402}, None, 64),  # of no file
        ({"rollout__devices": "4-7"}, 0, 256),  # of several iterations
    ],
)
def test_a_replica_has_its_share_of_an_iteration_or_a_validation(given, validation, samples):
    config = TrainerConfig()
    config.data.prompts_per_iteration, config.data.samples_per_prompt = 64, 4
    config.rollout.max_num_seqs = 256
    for name, value in given.items():
        section, _, setting = name.partition("__")
        setattr(getattr(config, section), setting, value)
    assert samples_at_most(config, replicas=4, validation=validation) == samples


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize(("samples", "tokens"), [(3, 19), (256, 512), (1000, 500)])
def test_a_plan_counts_the_same_bytes(samples, tokens, adaptive):
    config = run_config("tp1", samples=samples, tokens=tokens, rollout=1, share=1.0)
    config.rollout.dynamic_batching = adaptive
    run = run_of(config, 2)
    each = samples_at_most(config, replicas=2, validation=0)
    layers = {
        str(n): Spec(BLOCK_TOKENS, BLOCK_TOKENS * kv_bytes_per_token(run) // run.actor.arch.num_layers)
        for n in range(run.actor.arch.num_layers)
    }
    executor = Executor(layers, run.prompt_tokens + run.response_tokens, free=1 << 50)
    roomy = replace(H200, gpu_bytes=float(1 << 50))
    with no_larger_than_needed(each, adaptive=adaptive):
        assert [kv_cache_bytes(run, roomy, 0.0)] == executor.determine_available_memory()


def test_the_cache_is_never_larger_than_the_memory():
    with no_larger_than_needed(10_000, adaptive=False):
        assert Executor({"0": Spec(16, 1 << 20)}, 4096).determine_available_memory() == [8 * GIB]


@pytest.mark.parametrize(
    ("setting", "samples", "most"),
    [(256, None, 256), (256, 48, 64), (256, 64, 64), (256, 1, 1), (256, 300, 256), (100, 90, 100)],
)
def test_an_engine_captures_graphs_for_few_numbers_of_samples(setting, samples, most):
    assert limited(RolloutConfig(max_num_seqs=setting), samples=samples).max_num_seqs == most
