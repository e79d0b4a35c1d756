"""Frozen models with weights in fp8: log-probs and scores, memory, and passes beside a model in bfloat16.

Under every layout that fits the ranks. torchrun --nproc-per-node N tests/gpu/fp8_weights_worker.py
"""

import gc
import os
from pathlib import Path

import torch
import torch.distributed as dist

from parallel.groups import ProcessGroups
from parallel.layout import Layout
from parallel.rank_set import world
from parallel.weights.architecture import read_architecture
from parallel.weights.rules import Head
from tests.gpu.models_worker import FAILURES, error_of, hf_log_probs, mean_error, report, with_fp8_layers
from tests.parity.world import make_batch, say, share_of, shared_folder, write_once
from verl_megatron.config import EngineConfig
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.planner.planned_run import part_elements
from verl_megatron.roles.compute import compute_of
from verl_megatron.roles.engine import Engine, EngineOptions
from verl_megatron.roles.inference import infer_models

SIZES = dict(
    hidden_size=256, intermediate_size=1024, num_attention_heads=4, num_key_value_heads=4, head_dim=64
)
LAYOUTS = {1: ["tp1"], 2: ["tp2", "tp2sp", "pp2", "tp1"], 4: ["tp2pp2sp", "tp4"]}
# Engines by what they are called: engine.dtype, and the setting that asks for weights in fp8.
KINDS = {"bfloat16": ("bfloat16", ""), "fp8": ("fp8", ""), "fp8 weights": ("bfloat16", "reference.dtype")}
BUDGET = 64  # tokens of a micro-batch


def engine_of(kind: str, folder: Path, groups: ProcessGroups, head: Head = "lm") -> Engine:
    dtype, by = KINDS[kind]
    return Engine(
        arch=read_architecture(folder),
        folder=str(folder),
        groups=groups,
        head=head,
        options=EngineOptions(config=EngineConfig(dtype=dtype), seed=1, fp8_weights_by=by),
    )


def used_bytes() -> int:
    """Bytes of all tensors on this rank's GPU."""
    torch.cuda.synchronize()
    gc.collect()
    return torch.cuda.memory_allocated()


def fullest(size: float) -> float:
    """The largest of all ranks."""
    return float(world().all_max(torch.tensor([size], dtype=torch.float64)))


def check_log_probs(
    folder: Path, groups: ProcessGroups, batch: RolloutBatch, truth, limits: dict[str, float]
) -> None:
    """Log-probs of each kind alone, and of bfloat16 and fp8 weights in one pass, against float32."""
    mine, micro = share_of(batch, groups.layout, BUDGET)
    engines = {kind: engine_of(kind, folder, groups) for kind in KINDS}
    alone = {kind: engine.infer(mine, micro) for kind, engine in engines.items()}
    pair = ("bfloat16", "fp8 weights")
    together = dict(zip(pair, infer_models([engines[kind] for kind in pair], mine, micro, ("logprobs",))))

    def mean(results, other) -> float:
        total, count = world().all_sum(error_of(results, mine, other)).tolist()
        return total / count

    def as_truth(results) -> dict[int, torch.Tensor]:
        """Results in the form of `truth`: by sample, from the second token on."""
        rows = [] if results is None else results["logprobs"]
        return {int(sample): row[1:] for sample, row in zip(mine.sample_id, rows)}

    what = f"{groups.layout} fp8 weights"
    report(f"{what}: mean log-prob error", mean(alone["fp8 weights"], truth), limits["fp8"])
    # Both round the same weights in the same way, one as it loads them and one in each pass.
    between = mean(alone["fp8 weights"], as_truth(alone["fp8"]))
    report(f"{what}: mean difference from engine.dtype=fp8", between, 1e-4)
    for kind in pair:
        gap = mean(together[kind], as_truth(alone[kind]))
        # Padding may give other kernels, and so other roundings.
        report(f"{what}: {kind} beside the other, mean difference from alone", gap, limits["bfloat16"])
    gap = mean(alone["fp8 weights"], as_truth(alone["bfloat16"]))
    say(f"{what}: mean difference from bfloat16 {gap:.2e}")


def check_memory(folder: Path, groups: ProcessGroups, batch: RolloutBatch) -> None:
    """Bytes of the layers after a pass at most 0.6 of bfloat16's; loading never holds a bfloat16 model."""
    mine, micro = share_of(batch, groups.layout, BUDGET)
    held, peak = {}, {}
    for kind in ("bfloat16", "fp8 weights") * 2:  # the first of each also allocates workspaces of libraries
        before = used_bytes()
        torch.cuda.reset_peak_memory_stats()
        engine = engine_of(kind, folder, groups)
        peak[kind] = fullest(torch.cuda.max_memory_allocated() - before)
        engine.infer(mine, micro)
        held[kind] = fullest(used_bytes() - before)
        del engine
    arch, layout = read_architecture(folder), groups.layout
    layers = 2 * arch.num_layers // layout.pp * part_elements(arch, layout.tp).layer  # bytes in bfloat16
    rest = held["bfloat16"] - layers
    what = f"{groups.layout} fp8 weights"
    report(f"{what}: layers' bytes of bfloat16's", (held["fp8 weights"] - rest) / layers, 0.6)
    report(f"{what}: peak bytes while loading of bfloat16's", peak["fp8 weights"] / peak["bfloat16"], 0.9)


def scores_of(model, batch: RolloutBatch) -> torch.Tensor:
    """A Hugging Face reward model's score of each sample alone, [B] float64."""
    rows = zip(batch.generated_ids.cuda(), batch.attention_mask.cuda())
    with torch.no_grad():
        return torch.cat([model(ids[mask][None]).logits.flatten().cpu().double() for ids, mask in rows])


def relative(gap_B: torch.Tensor, exact_B: torch.Tensor) -> float:
    return float(gap_B.norm() / exact_B.norm())


def check_scores(
    folder: Path, groups: ProcessGroups, batch: RolloutBatch, exact_B: torch.Tensor, limit: float
) -> None:
    """Scores of a reward model against those in float32."""
    mine, micro = share_of(batch, groups.layout, BUDGET)
    results = engine_of("fp8 weights", folder, groups, "sequence").infer(mine, micro, last_token=True)
    gap_B = torch.zeros(len(batch), dtype=torch.float64)
    if results is not None:
        gap_B[mine.sample_id] = results["values"].sum(1).double() - exact_B[mine.sample_id]
    gap_B = world().all_max(gap_B.abs())
    report(f"{groups.layout} fp8 weights: relative error of scores", relative(gap_B, exact_B), limit)


def check_refusals() -> None:
    """Plain PyTorch's layers do not compute in fp8, which names the setting."""
    try:
        compute_of(EngineConfig(transformer_impl="local"), fp8_weights_by="teacher.dtype")
    except ValueError as error:
        assert "teacher.dtype=fp8 needs transformer-engine" in str(error), error
    else:
        FAILURES.append("weights in fp8 in plain PyTorch's layers")


def main() -> None:
    folder = shared_folder()
    model = write_once(folder / "lm", "qwen3", **SIZES).cuda()
    batch = make_batch(read_architecture(folder / "lm").vocab_size)
    truth = hf_log_probs(model, batch)
    limits = {"bfloat16": 1.5 * mean_error(model.bfloat16(), batch, truth)}
    limits["fp8"] = 1.5 * mean_error(with_fp8_layers(model), batch, truth)
    model = write_once(folder / "reward", "qwen3", "ForSequenceClassification", **SIZES).cuda()
    exact_B = scores_of(model, batch)
    rounded_B = scores_of(with_fp8_layers(model.bfloat16()), batch)
    limits["scores"] = 3 * relative(rounded_B - exact_B, exact_B)  # of a few samples, where luck counts
    del model
    check_refusals()
    for text in LAYOUTS[dist.get_world_size()]:
        groups = ProcessGroups(Layout.parse(text, tuple(range(dist.get_world_size()))), world())
        check_memory(folder / "lm", groups, batch)
        check_log_probs(folder / "lm", groups, batch, truth, limits)
        check_scores(folder / "reward", groups, batch, exact_B, limits["scores"])
    assert not FAILURES, "\n".join(FAILURES)
    say("all passed")


if __name__ == "__main__":
    torch.backends.cuda.matmul.allow_tf32 = False
    if torch.cuda.get_device_capability() >= (8, 9):
        main()
    else:
        say("skipped: these GPUs cannot compute in fp8")
    os._exit(0)
