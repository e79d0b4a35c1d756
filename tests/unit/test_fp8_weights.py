"""fp8 weights against rounding to the nearest of all fp8 numbers, and what is refused."""

from dataclasses import replace
from math import prod

import pytest
import torch

from parallel.layout import Layout
from parallel.reshard.plan import compile_plan
from parallel.reshard.staged import groups_of, part_of
from parallel.weights.rules import megatron_shards, vllm_parameters, vllm_shards
from tests.job_files import write_job
from tests.planned import H200, run_config, run_of
from tests.tiny import tiny_architecture
from tests.unit.test_checks import good
from verl_megatron.algorithms.correction import correction_of
from verl_megatron.checks import rollout as checks
from verl_megatron.checks.settings import check_config
from verl_megatron.config import TrainerConfig
from verl_megatron.planner.rollout.decoding import rollout_seconds
from verl_megatron.planner.rollout.serving import arriving_bytes, own_rollout_bytes
from verl_megatron.planner.weight_sync import reshard_seconds
from verl_megatron.rollout.vllm_weights import fp8
from verl_megatron.rollout.vllm_weights.fp8 import (
    FP8,
    Fp8Weight,
    check_fp8,
    fp8_problems,
    is_quantized,
    quantize,
    split_parameters,
    staged,
)

FP8_NUMBERS = torch.arange(256, dtype=torch.uint8).view(FP8).double()
FINITE = FP8_NUMBERS[FP8_NUMBERS.isfinite()].unique()  # in order
SIXTEENS = dict(hidden_size=32, head_dim=16, num_heads=4, num_kv_heads=2, intermediate_size=48)


def nearest(values: torch.Tensor) -> torch.Tensor:
    """The fp8 number nearest to each float32 value; of two, the one whose last bit is 0."""
    distance = (values.double().unsqueeze(-1) - FINITE).abs()
    bits = FINITE.to(FP8).view(torch.uint8)
    return FINITE[(distance * 2**30 + (bits & 1)).argmin(-1)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_each_row_has_its_own_scale_and_rounds_to_the_nearest_number(dtype, monkeypatch):
    monkeypatch.setattr(fp8, "PIECE", 3 * 40)  # several pieces, the last one smaller
    torch.manual_seed(3)
    values = (torch.randn(17, 40) * torch.logspace(-6, 2, 17)[:, None]).to(dtype)
    values[4] = 0
    weight, scale = torch.empty(17, 40, dtype=FP8), torch.full((17, 1), torch.nan)
    quantize(values, weight, scale)
    most = values.double().abs().amax(1, keepdim=True)
    torch.testing.assert_close(scale.double(), (most / 448).clamp(min=1 / (448 * 512)), rtol=1e-6, atol=0)
    expected = nearest((values.float() / scale).clamp(-448, 448))
    assert torch.equal(weight.double(), expected)
    assert (weight[4].double() == 0).all() and (weight[6:].double().abs().amax(1) == 448).all()
    error = (weight.double() * scale.double() - values.double()).abs().amax(1, keepdim=True)
    assert (error <= most / 27 + 1e-5).all()  # half a step of the largest numbers is 16 of 448


def test_values_go_into_vllms_transposed_parameter_in_place():
    parameter = torch.zeros(32, 48, dtype=torch.uint8).view(FP8).t()  # [K, N] = [48, 32], as vLLM has it
    found, weights = split_parameters(
        {"norm.weight": torch.ones(4), "o_proj.weight": parameter, "o_proj.weight_scale": torch.zeros(32, 1)}
    )
    assert found.keys() == {"norm.weight"} and weights.keys() == {"o_proj.weight"}
    values = torch.randn(32, 48).bfloat16()
    target = staged(weights)
    assert target.shapes == {(0, "o_proj.weight"): (32, 48)}
    target.write({(0, "o_proj.weight"): values})
    scale = weights["o_proj.weight"].scale_N1
    torch.testing.assert_close((parameter.float() * scale.t()).t(), values.float(), rtol=0.07, atol=1e-2)
    assert weights["o_proj.weight"].weight_NK.data_ptr() == parameter.data_ptr()


@pytest.mark.parametrize(
    ("weight", "scale"),
    [
        (torch.zeros(16, 32).to(FP8), torch.zeros(16, 1)),  # not transposed
        (torch.zeros(16, 32).to(FP8).t(), torch.zeros(1)),  # one scale for all
        (torch.zeros(16, 32).to(FP8).t(), None),
    ],
)
def test_another_form_is_refused(weight, scale):
    parameters = {"a.weight": weight} | ({} if scale is None else {"a.weight_scale": scale})
    with pytest.raises(ValueError, match="vLLM holds a.weight as .*set rollout.weight_dtype=auto"):
        split_parameters(parameters)


def test_what_vllm_cannot_hold_in_fp8_is_refused_by_name():
    arch = tiny_architecture(**SIXTEENS | dict(intermediate_size=96))
    assert fp8_problems(arch, 1, torch.bfloat16) == fp8_problems(arch, 2, torch.float16) == []
    (problem,) = fp8_problems(arch, 1, torch.float32)
    assert "rollout.weight_dtype=fp8" in problem and "set rollout.dtype=bfloat16" in problem
    (problem,) = fp8_problems(arch, 4, torch.bfloat16)
    assert "model.layers.0.mlp.down_proj.weight is 32 x 24 on a rank; use another rollout.tp" in problem
    with pytest.raises(ValueError, match="cannot share memory"):
        check_fp8(arch, 1, torch.bfloat16, aliases=True)


def test_all_linear_layers_and_nothing_else_are_quantized():
    names = {p.name for p in vllm_parameters(tiny_architecture("qwen2", num_layers=1), 1, 0)}
    assert {name for name in names if is_quantized(name)} == {
        f"model.layers.0.{name}.weight"
        for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    }


def test_groups_fill_the_limit_and_a_larger_parameter_is_alone():
    shapes = {(chunk, "abcde"[chunk]): (rows, 10) for chunk, rows in enumerate((2, 3, 9, 1, 5))}
    groups = ["".join(dict(group).values()) for group in groups_of(shapes, 120, element_bytes=2)]
    assert groups == ["ab", "c", "de"]
    assert list(groups_of({}, 120, element_bytes=2)) == []


@pytest.mark.parametrize("peer_memory", [False, True])
def test_the_parts_of_a_plan_are_the_plan(peer_memory):
    arch = tiny_architecture("qwen3", tied=True, **SIXTEENS)
    ranks = (0, 1, 2, 3)
    plan = compile_plan(
        source=megatron_shards(arch, Layout(tp=2, pp=2, ranks=ranks), spec="te"),
        destination=vllm_shards(arch, Layout.parse("tp4", ranks=ranks)),
        element_bytes=2,
        window_bytes=2048,
        peer_memory=peer_memory,
    )
    shapes = {(0, p.name): p.shape for p in vllm_parameters(arch, 4, 0)}
    parts = [part_of(plan, group) for group in groups_of(shapes, 4096, element_bytes=2)]
    assert len(parts) > 3 and sum(len(part.padding) for part in parts) == len(plan.padding) > 0
    whole = sorted(map(str, plan.transfers()))
    assert sorted(str(transfer) for part in parts for transfer in part.transfers()) == whole
    assert all(max(part.staged_bytes.values()) <= 2048 for part in parts)


def test_weights_know_their_bytes():
    assert Fp8Weight(torch.zeros(16, 32).to(FP8), torch.zeros(16, 1)).nbytes == 16 * 32 + 4 * 16


def test_settings_that_contradict_fp8_weights_are_refused(tmp_path, monkeypatch):
    write_job(tmp_path)
    fp8 = dict(rollout__weight_dtype="fp8", rollout__dtype="bfloat16")
    assert check_config(good(tmp_path, **fp8), world_size=4) == []
    for changes, words in (
        (dict(reshard__mode="swap"), ["reshard.mode=swap", "use reshard.mode=keep, or weight_dtype=auto"]),
        (dict(rollout__dtype="float32"), ["vLLM's are float32; set rollout.dtype=bfloat16"]),
        (dict(rollout__top_p=0.9), ["auto (truncate, because rollout.weight_dtype=fp8)", "top_p=0.9"]),
    ):
        said = "; ".join(check_config(good(tmp_path, **fp8 | changes), world_size=4))
        assert all(word in said for word in words), said
    monkeypatch.setattr(checks, "installed", {"vllm": "0.25.1"}.get)
    (problem,) = check_config(good(tmp_path, **fp8), world_size=4)
    assert "needs vllm 0.26 or later, and 0.25.1 is installed" in problem


def test_the_gap_of_fp8_weights_is_corrected_unless_asked_otherwise():
    config = TrainerConfig()
    found = {}
    for config.algorithm.correction in ("auto", "none", "mask"):
        for config.rollout.weight_dtype in ("auto", "fp8"):
            found[config.algorithm.correction, config.rollout.weight_dtype] = correction_of(config)
    assert found["auto", "fp8"] == "truncate" and found["auto", "auto"] == "none"
    assert found["none", "fp8"] == "none" and found["mask", "fp8"] == "mask"
    config.algorithm.correction, config.algorithm.old_logprobs = "auto", "sampler"
    assert correction_of(config) == "none"


@pytest.mark.parametrize("tp", [1, 4])
def test_plans_count_bytes_weight_by_weight_and_read_less(tp):
    """1 byte an element of linear layers and 4 a channel; 2 bytes an element of the rest."""
    config = run_config("tp4", rollout=tp)
    plain = run_of(config, 4)
    fp8 = run_of(replace(config, rollout=replace(config.rollout, weight_dtype="fp8")), 4)
    expected = 0
    for each in vllm_parameters(plain.actor.arch, tp, 0):
        is_fp8 = "_proj.weight" in each.name
        expected += prod(each.shape) * (1 if is_fp8 else 2) + 4 * each.shape[0] * is_fp8
    assert own_rollout_bytes(fp8, 0) == expected
    assert arriving_bytes(fp8) == own_rollout_bytes(plain, 0)
    cache = 10 * 2**30
    assert rollout_seconds(fp8, H200, cache) < 0.9 * rollout_seconds(plain, H200, cache)
    assert reshard_seconds(fp8, H200) > 0
