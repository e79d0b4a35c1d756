"""The size of vLLM's KV cache: what the memory holds, and no more than all samples fill."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from verl_megatron.rollout.vllm_cache import no_larger_than_needed

abstract = pytest.importorskip("vllm.v1.executor.abstract")
GIB = 1 << 30


@dataclass
class Spec:
    """What vLLM says of a layer's cache."""

    block_size: int
    page_size_bytes: int


class Executor(abstract.Executor):
    """An executor whose worker has a GPU with 8 GiB free."""

    def __init__(self, layers: dict[str, Spec], max_model_len: int):
        self.layers = layers
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=max_model_len))

    def collective_rpc(self, method, *given, **named):
        return {"determine_available_memory": [8 * GIB], "get_kv_cache_spec": [self.layers]}[method]

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


def test_the_cache_is_never_larger_than_the_memory():
    with no_larger_than_needed(10_000, adaptive=False):
        assert Executor({"0": Spec(16, 1 << 20)}, 4096).determine_available_memory() == [8 * GIB]
