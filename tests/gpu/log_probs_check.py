"""Log-probabilities of logits on a GPU against float64, then the speed of PyTorch and the kernels.

python tests/gpu/log_probs_check.py [--only-check]
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))  # for a script, Python looks in the script's folder only
from tests.gpu.kernels_check import check_then_time, milliseconds
from verl_megatron.data.packing import LOGIT_CHUNK_BYTES
from verl_megatron.models import log_prob_kernels as kernels
from verl_megatron.models.log_prob_kernels import GRAD, STATS, Tuning
from verl_megatron.models.log_probs import TILE, Softmax, token_log_probs

# Letters: N tokens, H hidden size, V vocabulary rows.

VOCABULARIES = (64128, 128256)  # Llama 3's, whole and on each of two ranks
# Of a gradient of size 1: exponents of about 20 in float32, whose powers of two the hardware takes to 2
# ulp; one rounding to bfloat16.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-8}


@dataclass
class Case:
    """Random logits in a buffer with `padding` more columns, and labels; one in four is another rank's."""

    tokens: int
    columns: int
    padding: int
    dtype: torch.dtype
    temperature: float | None  # None: each token has its own
    seed: int
    device: torch.device
    given: float | Tensor = field(init=False, repr=False)  # the temperature, or [N] float32 of each token
    logits_NV: Tensor = field(init=False, repr=False)
    labels_N: Tensor = field(init=False, repr=False)

    def __post_init__(self):
        generator = torch.Generator(self.device).manual_seed(self.seed)
        shape = dict(device=self.device, generator=generator)
        self.wide = (3 * torch.randn(self.tokens, self.columns + self.padding, **shape)).to(self.dtype)
        self.logits_NV = self.wide[:, : self.columns]
        self.labels_N = torch.randint(0, self.columns, (self.tokens,), **shape)
        self.labels_N[1::4] = self.columns
        self.labels_N[3::4] = -1
        self.gradients_2N = torch.randn(2, self.tokens, **shape)
        own_N = 0.6 + torch.rand(self.tokens, **shape)
        self.given = own_N if self.temperature is None else self.temperature

    def padding_is_untouched(self) -> Callable[[], bool]:
        before = self.wide[:, self.columns :].clone()
        return lambda: torch.equal(self.wide[:, self.columns :], before)


def truth(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Float64 truth by autograd: log-probability and entropy [N], factors [4, N], gradient [N, V]."""
    logits_NV = case.logits_NV.double().detach().requires_grad_()
    scaled_NV = (logits_NV.t() / case.given).t()
    log_z_N, log_p_NV = scaled_NV.logsumexp(1), scaled_NV.log_softmax(1)
    mean_N = (log_p_NV.exp() * scaled_NV).sum(1)
    inside_N = (case.labels_N >= 0) & (case.labels_N < case.columns)
    column_N1 = case.labels_N.clamp(0, case.columns - 1).unsqueeze(1)
    logprob_N = (
        torch.where(inside_N, scaled_NV.gather(1, column_N1).squeeze(1), 0.0) - log_z_N
    )  # of another rank's label, this rank's part of it
    entropy_N = -(log_p_NV.exp() * log_p_NV).sum(1)
    logprob_grad_N, entropy_grad_N = case.gradients_2N.double()
    (logprob_grad_N * logprob_N + entropy_grad_N * entropy_N).sum().backward()
    factors_4N = torch.stack([log_z_N, mean_N, logprob_grad_N, entropy_grad_N]).detach()
    return logprob_N.detach(), entropy_N.detach(), factors_4N, logits_NV.grad


def close(what: str, ours: Tensor, theirs: Tensor, *, atol: float, rtol: float = 0.0) -> None:
    torch.testing.assert_close(
        ours.double(), theirs.double(), atol=atol, rtol=rtol, msg=lambda text: f"{what}: {text}"
    )


def check_kernels(case: Case) -> None:
    """Both kernels against float64. Sums of about 100,000 float32 numbers, a thousand at a time."""
    logprob_N, entropy_N, factors_4N, grad_NV = truth(case)
    stats_4N = kernels.stats(case.logits_NV, case.labels_N, case.given).double()
    log_z_N = stats_4N[0] + stats_4N[1].log()
    close(f"log-probability of {case}", stats_4N[3] - log_z_N, logprob_N, atol=4e-6)
    close(f"entropy of {case}", log_z_N - stats_4N[2] / stats_4N[1], entropy_N, atol=2e-5)
    around = case.padding_is_untouched()
    grad = kernels.grad_logits_(case.logits_NV, case.labels_N, case.given, factors_4N.float())
    assert around(), f"the kernel wrote beside the columns of {case}"
    close(f"gradient of {case}", grad, grad_NV, atol=1e-6, rtol=TOLERANCES[case.dtype])


def check_far_rows(device: torch.device) -> None:
    """Rows that begin beyond 2^31 logits, against the same rows alone."""
    tokens, columns = 2**31 // 128256 + 40, 128256
    logits_NV = torch.randn(64, columns, device=device, dtype=torch.bfloat16).repeat(tokens // 64 + 1, 1)[
        :tokens
    ]
    labels_N, last = torch.randint(0, columns, (tokens,), device=device), slice(tokens - 32, tokens)
    alone_NV, factors_4N = (
        logits_NV[last].clone(),
        torch.randn(4, tokens, device=device) + torch.tensor([13.0, 1.0, 0.0, 0.0], device=device)[:, None],
    )
    assert torch.equal(
        kernels.stats(logits_NV, labels_N, 1.0)[:, last], kernels.stats(alone_NV, labels_N[last], 1.0)
    ), "far rows' numbers differ"
    kernels.grad_logits_(logits_NV, labels_N, 1.0, factors_4N)
    assert torch.equal(
        logits_NV[last], kernels.grad_logits_(alone_NV, labels_N[last], 1.0, factors_4N[:, last])
    ), "far rows' gradients differ"


def check_head(
    device: torch.device, dtype: torch.dtype, *, temperature: float | Tensor, chunk_tokens: int
) -> None:
    """token_log_probs and its gradients against log_softmax of the whole logits; an odd vocabulary.

    The temperature is one number or that of each of the 300 tokens.
    """
    torch.manual_seed(3)
    hidden, weight = (
        torch.randn(300, 256, device=device).to(dtype),
        (torch.randn(4096, 256, device=device) / 8).to(dtype),
    )
    vocab_size, grads_2N = 4001, torch.randn(2, 300, device=device)
    labels = torch.randint(0, vocab_size, (300,), device=device)
    results = []
    for compute in (dtype, torch.float64):
        inputs = [x.to(compute, copy=True).requires_grad_() for x in (hidden, weight)]
        if compute == torch.float64:
            log_p = ((inputs[0] @ inputs[1][:vocab_size].t()).t() / temperature).t().log_softmax(1)
            values = log_p.gather(1, labels[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(1)
        else:
            softmax = Softmax(vocab_size=vocab_size, temperature=temperature, chunk_tokens=chunk_tokens)
            values = token_log_probs(*inputs, labels, softmax)
        (grads_2N[0] * values[0] + grads_2N[1] * values[1]).sum().backward()
        results.append([*(value.detach() for value in values), *(each.grad for each in inputs)])
    for name, ours, theirs in zip(
        ("log-probability", "entropy", "hidden states' gradient", "weight's gradient"), *results
    ):
        off = (ours.double() - theirs).norm() / theirs.norm()
        limit = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[
            dtype
        ]  # bfloat16: logits of size 6 are rounded by up to 2^-7
        assert off < limit, (
            f"{name} in {dtype} at temperature {temperature}, {chunk_tokens} tokens a chunk: off by "
            f"{off:.2e} of its norm, allowed {limit}"
        )
    assert not results[0][3][vocab_size:].any()


def check(device: torch.device) -> None:
    """All of the above; raises AssertionError."""
    seed = 0
    for columns in (*VOCABULARIES, 128255, 100):
        for dtype in TOLERANCES:
            for tokens, temperature, padding in ((37, 1.0, 0), (5, 0.7, 64), (1, 1.3, 1), (9, None, 3)):
                check_kernels(
                    Case(
                        tokens=tokens,
                        columns=columns,
                        padding=padding,
                        dtype=dtype,
                        temperature=temperature,
                        seed=(seed := seed + 1),
                        device=device,
                    )
                )
    check_far_rows(device)
    for dtype in TOLERANCES:
        each = torch.linspace(0.6, 1.6, 300, device=device)
        for temperature, chunk_tokens in ((1.0, 0), (0.7, 128), (1.0, 77), (each, 128)):
            check_head(device, dtype, temperature=temperature, chunk_tokens=chunk_tokens)


# ---- speed -----------------------------------------------------------------------------------------------

STATS_VARIANTS = [
    STATS,
    replace(STATS, stages=1),
    replace(STATS, stages=2),
    replace(STATS, stages=4),
    Tuning(block=4096, num_warps=8),
    Tuning(block=4096, num_warps=8, stages=3),
    Tuning(block=4096, num_warps=16, stages=3),
    Tuning(block=1024, num_warps=2, stages=4),
    Tuning(block=1024, num_warps=4, stages=4),
]
GRAD_VARIANTS = [
    GRAD,
    Tuning(block=2048, num_warps=4),
    Tuning(block=1024, num_warps=4),
    Tuning(block=8192, num_warps=8),
    Tuning(block=8192, num_warps=16),
]


def time_all(device: torch.device, *, hidden_size: int) -> None:
    """Chunks of bfloat16 logits, then the whole head on four.

    Lower bounds: bytes at the copy's rate, and the products alone.
    """
    rate = copy_rate(device)
    print(f"copying moves {rate / 1e6:.0f} GB/s; {hidden_size} hidden channels", flush=True)
    table = []
    for columns in VOCABULARIES:
        tokens = LOGIT_CHUNK_BYTES // 2 // columns // TILE * TILE
        case = Case(
            tokens=tokens,
            columns=columns,
            padding=0,
            dtype=torch.bfloat16,
            temperature=1.0,
            seed=0,
            device=device,
        )
        where, size = (case.logits_NV, case.labels_N, 1.0), case.logits_NV.nbytes
        factors_4N = torch.tensor([[20.0], [0.0], [0.0], [0.0]], device=device).repeat(1, tokens)
        name = f"{tokens} x {columns}"
        table.append(
            (
                f"stats, {name}",
                *time_kernel(kernels.stats_by_torch, kernels.stats_by_triton, where, STATS_VARIANTS, size),
                size / rate,
            )
        )
        both = kernels.grad_logits_by_torch_, kernels.grad_logits_by_triton_
        table.append(
            (
                f"gradient, {name}",
                *time_kernel(*both, (*where, factors_4N), GRAD_VARIANTS, 2 * size),
                2 * size / rate,
            )
        )
        table += time_head(device, tokens=4 * tokens, columns=columns, hidden_size=hidden_size, rate=rate)
    print(f"\n{'what':<34} {'PyTorch':>9} {'Triton':>9} {'floor':>9}  milliseconds")
    for what, eager, ours, floor in table:
        print(
            f"{what:<34} {'' if eager is None else f'{eager:9.3f}':>9} {ours:9.3f} {floor:9.3f}", flush=True
        )


def copy_rate(device: torch.device) -> float:
    """Bytes a millisecond, read and written."""
    source = torch.zeros(2**30, dtype=torch.int32, device=device)
    copied = torch.zeros_like(source)
    return 2 * source.nbytes / milliseconds(lambda: copied.copy_(source))


def time_kernel(
    by_torch: Callable, by_triton: Callable, arguments: tuple, variants: list[Tuning], num_bytes: int
) -> tuple[float, float]:
    """Milliseconds of PyTorch and of the first variant; all variants are printed."""
    times = []
    for tuning in variants:
        times.append(milliseconds(partial(by_triton, *arguments, tuning)))
        print(
            f"{by_triton.__name__:<24} V={arguments[0].size(1):<7} {tuning} {times[-1]:8.3f} ms "
            f"{num_bytes / times[-1] / 1e6:7.0f} GB/s",
            flush=True,
        )
    return milliseconds(partial(by_torch, *arguments)), times[0]


def time_head(
    device: torch.device, *, tokens: int, columns: int, hidden_size: int, rate: float
) -> list[tuple[str, None, float, float]]:
    """Both passes of token_log_probs; lower bounds are the products, and the logits' bytes at `rate`."""
    hidden = torch.randn(tokens, hidden_size, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(columns, hidden_size, device=device) / hidden_size**0.5).bfloat16().requires_grad_()
    labels, chunk, logit_bytes = (
        torch.randint(0, columns, (tokens,), device=device),
        tokens // 4,
        2 * tokens * columns,
    )
    part = hidden.detach()[:chunk]
    product = 4 * milliseconds(lambda: part @ weight.detach().t())

    def forward() -> Tensor:
        values = token_log_probs(hidden, weight, labels, Softmax(vocab_size=columns))
        return sum(value.sum() for value in values)

    with torch.no_grad():
        forward_ms = milliseconds(forward)
    loss = forward()
    backward_ms = milliseconds(lambda: torch.autograd.grad(loss, (hidden, weight), retain_graph=True))
    name = f"{tokens} x {columns}"
    return [
        (f"forward, {name}", None, forward_ms, product + logit_bytes / rate),
        (f"backward, {name}", None, backward_ms, 3 * product + 2 * logit_bytes / rate),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden-size", type=int, default=4096, help="of the timed head")
    check_then_time(parser, "checks of log-probabilities", check, time_all)


if __name__ == "__main__":
    main()
