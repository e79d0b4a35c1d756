"""Attention of packed groups in two passes against one with a dense mask, forward and backward.

Letters: T packed tokens, n heads, k key/value heads, d head size.
"""

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.gpu.shared_prompts_check import packed
from tests.interpreter import needs_triton, run_interpreted
from verl_megatron.models.attention_kernels import (
    Plain,
    Spans,
    cudnn_calls,
    kernels_for,
    merge_,
    merge_by_torch_,
    merge_by_triton_,
)
from verl_megatron.models.shared_prompt_attention import attention

# Groups of a prompt and its responses, and tokens of other rows.
CASES = {
    "groups of several sizes": ([(5, (3, 1, 4)), (7, (2, 6))], [4]),
    "a prompt of one token": ([(1, (3, 5))], []),
    "responses of one token": ([(6, (1, 1, 1))], [1]),
    "one response": ([(9, (4,))], []),
    "rows only": ([], [3, 1, 8]),
}


def dense(query: Tensor, key: Tensor, value: Tensor, groups, rows, *, scale: float) -> Tensor:
    """One attention over all tokens, with a mask that is written out token by token."""
    sequences = [(("prompt", group), tokens) for group, (tokens, _) in enumerate(groups)]
    for group, (_, responses) in enumerate(groups):
        sequences += [(("response", group, number), tokens) for number, tokens in enumerate(responses)]
    sequences += [(("row", number), tokens) for number, tokens in enumerate(rows)]
    places = [(owner, at) for owner, tokens in sequences for at in range(tokens)]
    mask = torch.zeros(len(places), len(places), dtype=torch.bool)
    for q, (owner, at) in enumerate(places):
        for k, (other, before) in enumerate(places):
            is_own_prompt = owner[0] == "response" and other == ("prompt", owner[1])
            mask[q, k] = is_own_prompt or (owner == other and before <= at)
    heads = query.size(1) // key.size(1)
    k, v = (x.repeat_interleave(heads, 1) for x in (key, value))
    q, k, v = (x.transpose(0, 1) for x in (query, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(0, 1)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)], ids=str)
@pytest.mark.parametrize(("groups", "rows"), list(CASES.values()), ids=list(CASES))
def test_output_and_gradients_are_those_of_a_dense_mask(groups, rows, heads):
    own, shared = packed(groups, rows)
    generator = torch.Generator().manual_seed(1)
    tokens, d = sum(own.queries), 8
    inputs = [torch.randn(tokens, n, d, generator=generator) for n in (heads[0], heads[1], heads[1])]
    factor = torch.randn(tokens, heads[0], d, generator=generator)
    found, wanted = [], []
    for results, dtype in ((found, torch.float32), (wanted, torch.float64)):
        q, k, v = (x.to(dtype, copy=True).requires_grad_() for x in inputs)
        if dtype == torch.float32:
            out = attention(q, k, v, (own, shared), scale=0.4)
        else:
            out = dense(q, k, v, groups, rows, scale=0.4)
        (out * factor.to(dtype)).sum().backward()
        results += [out.detach(), q.grad, k.grad, v.grad]
    for ours, theirs in zip(found, wanted, strict=True):
        largest = max(1.0, theirs.abs().max().item())  # gradients are sums over tokens and heads
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-6, atol=1e-6 * largest)


def test_large_scores_do_not_overflow():
    """Scores of several hundred: the passes' maxima are far apart, and one of them has all the weight."""
    groups = [(4, (3, 2))]
    own, shared = packed(groups, [])
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(9, 2, 8, generator=generator) for _ in range(3))
    out = attention(q, k, v, (own, shared), scale=100.0)
    want = dense(q.double(), k.double(), v.double(), groups, [], scale=100.0)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-3)  # float32 of scores near 1,000


def test_a_cpu_computes_in_plain_pytorch_and_in_float32_at_least():
    own, shared = packed([(5, (3, 4))], [])
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(12, 2, 8, generator=generator).bfloat16() for _ in range(3))
    assert kernels_for(q).__name__ == "Plain"
    out = attention(q, k, v, (own, shared), scale=0.4)
    want = attention(q.double(), k.double(), v.double(), (own, shared), scale=0.4)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), want, rtol=2**-7, atol=2**-7)  # rounded twice: parts, result


@pytest.mark.parametrize(
    ("capability", "cudnn", "why"),
    [
        ((8, 0), (9, 19, 0), "a GPU of compute capability 8.0"),
        ((9, 0), (9, 5, 1), "cuDNN 9.5.1, and its kernels are used from 9.6 on"),
        ((9, 0), (9, 6, 0), "Transformer Engine's calls cannot be used: AttributeError"),
        ((9, 0), None, "Transformer Engine's calls cannot be used: ModuleNotFoundError"),
    ],
)
def test_why_cudnn_is_not_used(monkeypatch, capability, cudnn, why):
    """torch is not asked for its version: it may have another cuDNN than Transformer Engine."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cudnn, "version", None)
    extensions = SimpleNamespace(fused_attn=SimpleNamespace()) if cudnn else None
    utils = SimpleNamespace(get_cudnn_version=lambda: cudnn)
    modules = {"": SimpleNamespace(), ".pytorch": SimpleNamespace()}
    modules |= {".pytorch.cpp_extensions": extensions, ".pytorch.utils": utils}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"transformer_engine{name}", module)
    assert str(cudnn_calls.__wrapped__(torch.device("cuda", 0))).startswith(why)


def test_spans_of_a_pass_say_who_attends_to_whom():
    own, shared = packed([(5, (3, 1))], [2])
    assert isinstance(own, Spans) and own.causal and own.queries == own.keys == [5, 3, 1, 2]
    assert shared is not None and (shared.prompts, shared.responses) == ([5], [4])


def test_merged_passes_are_one_pass_over_all_keys():
    """Also where the log-sum-exps of a view's rows lie across."""
    generator = torch.Generator().manual_seed(4)
    q, (k, v) = torch.randn(7, 3, 8, generator=generator), torch.randn(2, 10, 3, 8, generator=generator)
    cu = torch.zeros(2, dtype=torch.int32)  # Plain reads the lists
    parts = [Spans(queries=[7], keys=[n], cu_queries=cu, cu_keys=cu, causal=False) for n in (4, 6, 10)]
    out, z = Plain.forward(q, k[:4], v[:4], parts[0], 0.4)
    other, other_z = Plain.forward(q, k[4:], v[4:], parts[1], 0.4)
    merge_(out, z, other, other_z.t().contiguous().t())
    for ours, whole in zip((out, z), Plain.forward(q, k, v, parts[2], 0.4), strict=True):
        torch.testing.assert_close(ours, whole, rtol=1e-6, atol=1e-6)


@needs_triton
def test_the_kernel_in_tritons_interpreter():
    run_interpreted(__file__)


def interpret():
    """In a process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    generator = torch.Generator().manual_seed(5)
    for heads, size in ((4, 16), (5, 24), (1, 64)):
        out, other = torch.randn(2, 9, heads, size, generator=generator)
        z, other_z = 10 * torch.randn(2, 9, heads, generator=generator)
        ours, ours_z = out.clone(), z.clone()
        merge_by_triton_(ours[2:], ours_z.t()[:, 2:], other[2:], other_z.t()[:, 2:].contiguous())
        merge_by_torch_(out[2:], z.t()[:, 2:], other[2:], other_z.t()[:, 2:])
        torch.testing.assert_close((ours, ours_z), (out, z), rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    interpret()
    print("interpreted")
