"""Attention of packed groups on a GPU against plain PyTorch, then its speed beside other ways.

python tests/gpu/shared_prompts_check.py [--only-check]
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

sys.path.insert(0, str(Path(__file__).parents[2]))  # for a script, Python looks in the script's folder only
from tests.gpu.kernels_check import check_then_time, milliseconds
from verl_megatron.data.micro_batch import SharedPrompts
from verl_megatron.models.attention_kernels import Cudnn, Flash, Kernels, Spans, kernels_for, merge_
from verl_megatron.models.shared_prompt_attention import attention

Groups = list[tuple[int, tuple[int, ...]]]  # tokens of a prompt and of each of its responses
CASES: list[tuple[Groups, list[int]]] = [
    ([(300, (130, 1, 77, 400)), (65, (20, 200))], [90]),
    ([(1, (3, 5))], []),
    ([(70, (1,))], []),
    ([(700, (1, 1, 1))], [1]),
    ([], [300, 1, 20]),
    ([(512, (512,) * 4)] * 2, []),
]
HEADS = [((4, 4), 128), ((32, 8), 128), ((6, 1), 64), ((4, 2), 80), ((4, 2), 16)]
SHAPES = {"4 x (512 + 512)": (512, (512,) * 4), "8 x (4096 + 512)": (4096, (512,) * 8)}
# Two roundings to bfloat16, of each pass and of their sum, relative to the largest element.
TOLERANCE = 2**-6


def packed(
    groups: Groups, rows: list[int], device: torch.device | str = "cpu"
) -> tuple[Spans, SharedPrompts | None]:
    """The sequences of packed groups and other rows: all of them, and what the groups share."""
    prompts = [prompt for prompt, _ in groups]
    responses = [sum(tokens) for _, tokens in groups]
    lengths = prompts + [tokens for _, group in groups for tokens in group] + rows

    def ends(counts: list[int]) -> Tensor:
        return torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)

    own = Spans(queries=lengths, keys=lengths, cu_queries=ends(lengths), cu_keys=ends(lengths), causal=True)
    shared = SharedPrompts(prompts, responses, ends(prompts), ends(responses)) if groups else None
    return own, shared


def draw(tokens: int, heads: tuple[int, int], head_size: int, device: torch.device) -> list[Tensor]:
    """Queries, keys, values, and the gradient of the output."""
    generator = torch.Generator(device).manual_seed(1)
    return [
        torch.randn(tokens, n, head_size, generator=generator, device=device).bfloat16()
        for n in (heads[0], heads[1], heads[1], heads[0])
    ]


def results(
    given: list[Tensor],
    dtype: torch.dtype,
    spans: tuple[Spans, SharedPrompts | None],
    kernels: type[Kernels] | None = None,
) -> list[Tensor]:
    """Output and gradients, computed in `dtype`."""
    q, k, v = (x.to(dtype, copy=True).requires_grad_() for x in given[:3])
    out = attention(q, k, v, spans, scale=q.size(-1) ** -0.5, kernels=kernels)
    return [x.double() for x in (out.detach(), *torch.autograd.grad(out, (q, k, v), given[3].to(dtype)))]


def check(device: torch.device) -> None:
    check_merge(device)
    for groups, rows in CASES:
        for heads, head_size in HEADS:
            spans = packed(groups, rows, device)
            given = draw(sum(spans[0].queries), heads, head_size, device)
            want = results(given, torch.float32, spans)
            for kernels in kernels_here(device):
                found = results(given, torch.bfloat16, spans, kernels)
                pairs = zip(found, want, strict=True)
                errors = [float((ours - true).abs().max() / true.abs().max()) for ours, true in pairs]
                case = (kernels.__name__, groups, rows, heads, head_size)
                print(*case, *(f"{error:.1e}" for error in errors), flush=True)
                assert max(errors) <= TOLERANCE, (case, errors)


def kernels_here(device: torch.device) -> list[type[Kernels]]:
    """Those that a run uses on this machine, then FlashAttention's."""
    used = kernels_for(draw(1, (4, 4), 128, device)[0])
    assert used in (Cudnn, Flash), "a GPU's kernels are what is checked"
    return list(dict.fromkeys([used, Flash]))


def check_merge(device: torch.device) -> None:
    """On the GPU as on a CPU, where z comes in both orders of its dimensions."""
    for queries, heads, size in ((20_000, 32, 128), (3_000, 5, 40), (3_000, 1, 64)):
        generator = torch.Generator().manual_seed(heads)
        out, other = (torch.randn(queries, heads, size, generator=generator).bfloat16() for _ in range(2))
        z, other_z = (30 * torch.randn(queries, heads, generator=generator) for _ in range(2))
        there = [x.to(device) for x in (out, z, other, other_z)]
        merge_(out, z.t(), other, other_z.t())
        merge_(there[0], there[1].t(), there[2], there[3].t().contiguous())
        torch.testing.assert_close(there[0].cpu(), out, rtol=2**-7, atol=2**-7)
        torch.testing.assert_close(there[1].cpu(), z)


def flexible(groups: Groups, device: torch.device | str = "cpu") -> Callable[..., Tensor]:
    """`attention` of packed groups as PyTorch's FlexAttention computes it, with one block mask."""
    mask = block_mask(groups, device)
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = compiled(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)
        assert isinstance(out, Tensor), "not with its log-sum-exp"
        return out[0].transpose(0, 1)

    return attend


def block_mask(groups: Groups, device: torch.device | str) -> BlockMask:
    """Blocks of packed groups in which a token sees another one."""
    lengths = packed(groups, [])[0].queries
    prompts = range(len(groups))
    prompt_of = [-1 for _ in prompts] + [i for i in prompts for _ in groups[i][1]]  # -1: is a prompt
    counts = torch.tensor(lengths, device=device)
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=device), counts)
    prompt = torch.repeat_interleave(torch.tensor(prompt_of, device=device), counts)

    def sees(batch, head, query, key) -> Tensor:
        own = (sequence[query] == sequence[key]) & (query >= key)
        return own | (prompt[query] == sequence[key])

    return create_block_mask(sees, None, None, sum(lengths), sum(lengths), device=str(device))


def time_all(device: torch.device, *, groups: int) -> None:
    """Milliseconds of a layer's attention of Llama 3 8B, forward, and forward and backward."""
    for name, (prompt, responses) in SHAPES.items():
        rows = [prompt + tokens for tokens in responses] * groups
        shared: Groups = [(prompt, responses)] * groups
        whole, parts = packed([], rows, device), packed(shared, [], device)
        ways: dict[str, tuple[int, Callable[..., Tensor]]] = {}
        for what, spans in (("rows", whole), ("shared prompts", parts)):
            for kernels in kernels_here(device):
                run = partial(_attend, spans=spans, kernels=kernels)
                ways[f"{what}, {kernels.__name__}"] = sum(spans[0].queries), run
        ways["FlexAttention"] = sum(parts[0].queries), flexible(shared, device)
        given = draw(ways["FlexAttention"][0], (32, 8), 128, device)[:3]
        start = time.perf_counter()
        found = ways["FlexAttention"][1](*given, scale=128**-0.5).float()
        seconds = time.perf_counter() - start
        wanted = _attend(*given, scale=128**-0.5, spans=parts, kernels=kernels_here(device)[0]).float()
        assert (found - wanted).abs().max() <= TOLERANCE * wanted.abs().max(), "another result"
        for how, (tokens, attend) in ways.items():
            given = draw(tokens, (32, 8), 128, device)
            q, k, v = (x.requires_grad_() for x in given[:3])

            def forward(inputs=(q, k, v), attend=attend) -> Tensor:
                return attend(*inputs, scale=128**-0.5)

            def both(inputs=(q, k, v), forward=forward, grad=given[3]) -> None:
                torch.autograd.grad(forward(), inputs, grad)

            print(
                f"{groups} of {name}: {how:<22} {tokens:>7,} tokens {milliseconds(forward):8.3f} ms forward "
                f"{milliseconds(both):8.3f} ms with backward",
                flush=True,
            )
        once = milliseconds(partial(block_mask, shared, device))
        print(f"FlexAttention: {seconds:.1f} s to compile; {once:.1f} ms for a block mask", flush=True)


def _attend(q, k, v, *, scale: float, spans, kernels: type[Kernels]) -> Tensor:
    return attention(q, k, v, spans, scale=scale, kernels=kernels)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=2, help="prompts of the timed micro-batches")
    check_then_time(parser, "checks of shared prompts", check, time_all)
