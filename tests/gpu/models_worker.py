"""Both layer specs and fp8 on GPUs against Hugging Face, under every layout that fits the ranks.

Training equals that of one rank.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.groups import ProcessGroups
from parallel.layout import Layout
from parallel.rank_set import world
from parallel.weights.architecture import read_architecture
from tests.parity.shared_prompts import grouped, run_once
from tests.parity.training import with_experience
from tests.parity.world import make_batch, say, share_of, shared_folder, write_once
from verl_megatron.algorithms.losses import policy_loss
from verl_megatron.algorithms.normalizers import LossScale
from verl_megatron.algorithms.objectives import clip
from verl_megatron.algorithms.tokens import PolicyTokens
from verl_megatron.config import AlgorithmConfig, EngineConfig
from verl_megatron.roles.engine import Engine, EngineOptions

SIZES = dict(
    hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=4, head_dim=64
)
FAILURES: list[str] = []  # told at the end: one run on GPUs shows them all
LAYOUTS = {
    1: ["tp1"],
    2: ["tp2", "tp2sp", "pp2", "tp1", "cp2", "pp2vpp2"],
    4: ["tp4sp", "tp2pp2", "tp2pp2sp", "pp4", "tp2", "cp2tp2sp"],
}


def hf_log_probs(model, batch) -> list[torch.Tensor]:
    """By sample: log p of each token from the second on, in float32."""
    samples = []
    for ids, mask in zip(batch.generated_ids, batch.attention_mask):
        ids = ids[mask].cuda()
        with torch.no_grad():
            log_p = torch.log_softmax(model(ids[None]).logits[0].float(), -1)
        samples.append(log_p[:-1].gather(1, ids[1:, None]).squeeze(1).cpu())
    return samples


def error_of(results, mine, truth) -> torch.Tensor:
    """[2] float64: summed absolute difference and number of compared tokens."""
    total, count = 0.0, 0
    for b, sample in enumerate(mine.sample_id.tolist() if results is not None else []):
        asked = mine.response_mask[b].nonzero().squeeze(1)
        total += (results["logprobs"][b, asked] - truth[sample][asked - 1]).abs().sum().item()
        count += len(asked)
    return torch.tensor([total, count], dtype=torch.float64)


def rounded_to_fp8(x: torch.Tensor) -> torch.Tensor:
    """With one scale for the tensor, taken from its largest element."""
    scale = torch.finfo(torch.float8_e4m3fn).max / x.abs().amax().float()
    return ((x.float() * scale).to(torch.float8_e4m3fn).float() / scale).to(x.dtype)


def with_fp8_layers(model):
    """The model itself, the inputs and the weights of its layers' products rounded from now on."""
    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = rounded_to_fp8(module.weight.data)
            module.register_forward_pre_hook(lambda _, inputs: (rounded_to_fp8(inputs[0]), *inputs[1:]))
    return model


def mean_error(rough, batch, truth) -> float:
    """Mean absolute error of a rounded Hugging Face model's log-probs."""
    pairs = zip(truth, hf_log_probs(rough, batch), batch.response_mask)
    gaps = [(fine - coarse)[mask[1 : len(fine) + 1]].abs() for fine, coarse, mask in pairs]
    return torch.cat(gaps).mean().item()


def computed_in() -> list[tuple[str, str]]:
    """Specs and dtypes of this device; a CPU without transformer-engine still runs the rest of the file."""
    if not torch.cuda.is_available():
        return [("local", "float32"), ("local", "bfloat16")]
    return [("local", "float32"), ("local", "bfloat16"), ("te", "bfloat16")] + [("te", "fp8")] * (
        torch.cuda.get_device_capability() >= (8, 9)
    )


def report(what: str, error: float, limit: float) -> None:
    say(f"{what}: {error:.1e} (limit {limit:.1e})")
    if not error <= limit:
        FAILURES.append(what)


def check_family(folder: Path, family: str) -> None:
    """Largest mean error of log-probs: 1e-4 for float32 and the local spec.

    For bfloat16 and fp8: one and a half times Hugging Face's own when rounded so.
    """
    model = write_once(folder, family, **SIZES).cuda()
    arch = read_architecture(folder)
    batch = make_batch(arch.vocab_size)
    truth = hf_log_probs(model, batch)

    limits = {"float32": 1e-4, "bfloat16": 1.5 * mean_error(model.bfloat16(), batch, truth)}
    limits["fp8"] = 1.5 * mean_error(with_fp8_layers(model), batch, truth)
    for text in LAYOUTS[dist.get_world_size()]:
        layout = Layout.parse(text, tuple(range(dist.get_world_size())))
        groups = ProcessGroups(layout, world())
        for spec, dtype in computed_in():
            engine = Engine(
                arch=arch,
                folder=str(folder),
                groups=groups,
                head="lm",
                options=EngineOptions(config=EngineConfig(transformer_impl=spec, dtype=dtype), seed=1),
            )
            mine, micro = share_of(batch, layout, 64)
            total, count = world().all_sum(error_of(engine.infer(mine, micro), mine, truth)).tolist()
            report(f"{family} {layout} {spec} {dtype}: mean log-prob error", total / count, limits[dtype])
            kept = [
                vars(module)["_fp8_workspaces"]
                for chunk in engine.chunks
                for module in chunk.modules()
                if "_fp8_workspaces" in vars(module)
            ]
            if bool(kept) != (spec == "te") or any(kept):
                FAILURES.append(
                    f"{family} {layout} {spec} {dtype}: transformer-engine still holds fp8 copies of "
                    f"the weights, or holds them elsewhere now"
                )


def train(folder: Path, text: str, config: EngineConfig) -> list[float]:
    """Losses of five steps towards fixed samples."""
    arch, layout = read_architecture(folder), Layout.parse(text, tuple(range(dist.get_world_size())))
    engine = Engine(
        arch=arch,
        folder=str(folder),
        groups=ProcessGroups(layout, world()),
        head="lm",
        options=EngineOptions(config=config, seed=1),
    )
    engine.prepare_training(lr=1e-3, total_steps=5)
    batch = make_batch(arch.vocab_size)
    batch.logprobs, batch.advantages = -5.0 * batch.response_mask, 1.0 * batch.response_mask
    algorithm, losses = AlgorithmConfig(clip_ratio_high=10.0, clip_ratio_low=0.99), []

    def loss(outputs, micro):
        tokens = PolicyTokens.of(micro)
        return policy_loss(outputs["logprobs"], outputs["entropy"], tokens, clip.objective, algorithm, 0.0)

    mine, micro = share_of(batch, layout, 64)
    for _ in range(5):
        sums = engine.train_step(
            mine,
            micro,
            loss,
            fields=("logprobs", "advantages"),
            scale=LossScale(int(batch.response_mask.sum())),
        )
        losses.append(sums.reduce(world())["policy/loss"])
    return losses


def check_training(folder: Path) -> None:
    """Against the same arithmetic with data parallelism alone, and that against float32."""
    exact = train(folder, "tp1", EngineConfig(transformer_impl="local", dtype="float32"))
    limits = {
        ("local", "float32"): (2e-3, 2e-3),
        ("te", "bfloat16"): (8e-2, 3e-2),
        ("te", "fp8"): (1e-1, 1e-1),
    }  # from float32, between layouts

    def compare(what: str, got: list[float], want: list[float], limit: float) -> None:
        report(
            f"train {what}: losses {got[0]:.4f} -> {got[-1]:.4f}, relative difference",
            max(abs(a / b - 1) for a, b in zip(got, want)),
            limit,
        )

    for spec, dtype in (pair for pair in computed_in() if pair in limits):
        from_exact, between = limits[spec, dtype]
        usual = train(folder, "tp1", EngineConfig(transformer_impl=spec, dtype=dtype))
        compare(f"{spec} {dtype} from float32", usual, exact, from_exact)
        for text in LAYOUTS[dist.get_world_size()]:
            for recompute in ("none", "full") if spec == "te" else ("selective",):
                compare(
                    f"{text} {spec} {dtype} recompute {recompute}",
                    train(
                        folder, text, EngineConfig(transformer_impl=spec, dtype=dtype, recompute=recompute)
                    ),
                    usual,
                    between,
                )


def check_shared_prompts(folder: Path) -> None:
    """Micro-batches whose groups share their prompts: as far from rows in float32 as rows are, or half more.

    For results of a forward pass and for gradients, by their norms.
    """
    vocab_size = read_architecture(folder).vocab_size
    batch = with_experience(grouped(vocab_size))

    def run(text: str, **settings) -> tuple[Tensor, Tensor]:
        config = EngineConfig(clip_grad=0.0, distributed_optimizer=False, **settings)
        layout = Layout.parse(text, tuple(range(dist.get_world_size())))
        results, _, gradients = run_once(folder, "lm", layout, batch, config)
        return results["logprobs"], torch.cat([x.flatten().float() for x in gradients.values()])

    exact = run("tp1", transformer_impl="local", dtype="float32")
    for spec, dtype in computed_in():
        rows = run("tp1", transformer_impl=spec, dtype=dtype)
        for text in (text for text in LAYOUTS[dist.get_world_size()] if "cp" not in text):
            found = run(
                text, transformer_impl=spec, dtype=dtype, shared_prompts=True, tokens_per_micro_batch=40
            )
            for what, got, usual, want in zip(("log-probs", "gradients"), found, rows, exact, strict=True):
                limit = 1.5 * float((usual - want).norm() / want.norm()) + 1e-5
                error = float((got - want).norm() / want.norm())
                report(f"shared prompts {text} {spec} {dtype}: {what}, relative error", error, limit)


if __name__ == "__main__":
    torch.backends.cuda.matmul.allow_tf32 = False
    folder = shared_folder()
    for name in ("qwen2_tied_yarn", "qwen3", "llama_tied_llama3"):
        check_family(folder / name, name)
    check_training(folder / "qwen3")
    check_shared_prompts(folder / "qwen3")
    assert not FAILURES, "\n".join(FAILURES)
    say("all passed")
    os._exit(0)
