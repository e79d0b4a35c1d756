"""Kernels, peers' memory, transformer-engine, half precision and NCCL, which only GPUs reach."""

import pytest
import torch

from tests.tiny import write_sharp, write_tokenizer
from tests.worlds import run_world
from verl_megatron.doctor.finding import Case
from verl_megatron.doctor.gpus import check_cuda_ipc, check_gpus, check_shared_prompts

GPUS = torch.cuda.device_count()
RANKS = next((n for n in (4, 2, 1) if n <= GPUS), 1)  # of what runs on any number
pytestmark = pytest.mark.gpu


def needs(count: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        GPUS < count,
        reason=f"{count} GPU{'s' * (count > 1)} needed, {GPUS} found: run `python -m pytest "
        f"tests/gpu` where there are more",
    )


@needs(1)
def test_kernels_equal_torch():
    """With a second GPU also between the two."""
    assert "all kernel checks passed" in run_world(
        "tests/gpu/kernels_check.py", 1, "--only-check", timeout=300
    )


@needs(1)
def test_log_probabilities_equal_float64():
    assert "all checks of log-probabilities passed" in run_world(
        "tests/gpu/log_probs_check.py", 1, "--only-check", timeout=300
    )


@needs(1)
def test_shared_prompts_equal_plain_pytorch():
    assert "all checks of shared prompts passed" in run_world(
        "tests/gpu/shared_prompts_check.py", 1, "--only-check", timeout=300
    )


@needs(1)
@pytest.mark.alone
def test_drafts_leave_the_distribution_as_it_is(tmp_path):
    write_sharp(tmp_path / "sharp", head_dim=64)
    write_tokenizer(tmp_path / "sharp")
    assert "all checks of speculative decoding passed" in run_world(
        "tests/gpu/speculative_check.py", 1, tmp_path, timeout=600
    )


@needs(1)
@pytest.mark.alone
def test_fp8_weights_are_those_that_vllm_makes(tmp_path):
    assert "all checks of fp8 weights passed" in run_world(
        "tests/distributed/fp8_weights_worker.py", 1, tmp_path, timeout=600
    )


@needs(1)
def test_models_and_training_under_every_layout():
    assert "all passed" in run_world("tests/gpu/models_worker.py", RANKS, timeout=600)


@needs(1)
def test_frozen_models_with_weights_in_fp8():
    output = run_world("tests/gpu/fp8_weights_worker.py", RANKS, timeout=300)
    assert "all passed" in output or "cannot compute in fp8" in output


@needs(1)
def test_transformer_engine_models_load_what_is_converted(tmp_path):
    assert "all checks of conversion passed" in run_world(
        "tests/gpu/convert_worker.py", RANKS, tmp_path, timeout=600
    )


@needs(1)
def test_full_sharding_equals_replicated_weights():
    exact = {"NVIDIA_TF32_OVERRIDE": "0"}  # Transformer Engine multiplies float32 in TF32
    output = run_world("tests/parity/training_worker.py", RANKS, "full_sharding", timeout=600, env=exact)
    assert "all passed" in output


@needs(2)
def test_training_goes_on_after_memory_was_given_up():
    assert "all passed" in run_world("tests/parity/training_worker.py", RANKS, "offload", timeout=600)


@needs(2)
def test_checkpoints_beside_training():
    assert "all passed" in run_world(
        "tests/parity/checkpoint_worker.py", RANKS, "background", "bfloat16", timeout=600
    )


@needs(4)
def test_reshard_over_nccl():
    assert "all reshard checks passed" in run_world("tests/distributed/reshard_worker.py", 4, timeout=300)


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=needs(2)), pytest.param(4, marks=needs(4))])
def test_reshard_out_of_peers_memory(ranks):
    if not all(torch.cuda.can_device_access_peer(a, b) for a in range(ranks) for b in range(ranks) if a != b):
        pytest.skip(f"the first {ranks} GPUs do not reach each other's memory")
    assert "all checks of peers passed" in run_world("tests/gpu/peers_worker.py", ranks, timeout=600)


@needs(4)
def test_versions():
    assert "all checks of versions passed" in run_world(
        "tests/distributed/versions_worker.py", 4, timeout=300
    )


@needs(4)
def test_a_dead_peer_is_an_error_on_all_others():
    output = run_world("tests/distributed/versions_worker.py", 4, "dying", timeout=300)
    assert output.count("saw that a peer is gone") == 3, output


@needs(1)
def test_the_doctor_finds_these_gpus_well(tmp_path):
    """torch computes on each, a process reads another one's GPU memory, and attention's kernels are known."""
    case = Case(folder=tmp_path)
    checks = (check_gpus, check_cuda_ipc, check_shared_prompts)
    found = [each for check in checks for each in check(case)]
    assert [each.status for each in found] == ["ok"] * 4, found
    print(found[-1].found)
