"""Frozen models with weights in fp8, as far as a CPU shows: settings, loading and plans."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel.layout import Layout
from parallel.weights.files import CheckpointFolder
from parallel.weights.loading import load_parameters
from parallel.weights.rules import megatron_parameters
from tests.job_files import write_job
from tests.planned import H200, run_config, run_of
from tests.unit.test_checks import good
from tests.unit.test_files import ARCH, random_tensors, write_folder
from verl_megatron.checks.settings import check_config
from verl_megatron.config import EngineConfig, TrainerConfig
from verl_megatron.model_specs import models_apart, models_of
from verl_megatron.planner.memory import plan_memory
from verl_megatron.planner.planned_run import part_elements
from verl_megatron.planner.training import infer_seconds, passes
from verl_megatron.roles.compute import compute_of


class Rounded(Tensor):
    """Stands for a matrix that it holds in fp8 with one scale, and can only be written as a whole."""

    held: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, shape: tuple[int, ...]):
        return Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bfloat16)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None):
        assert func == torch.ops.aten.copy_.default, f"{func} cannot be called on rounded weights"
        own, values = args
        own.scale = values.abs().amax().float() / torch.finfo(torch.float8_e4m3fn).max
        own.held = (values.float() / own.scale).to(torch.float8_e4m3fn)

    @property
    def values(self) -> Tensor:
        return self.held.float() * self.scale


def test_weights_are_rounded_as_a_whole(tmp_path):
    """A parameter of several blocks of the files gets one scale; a bfloat16 has an error of 1/16 at most."""
    folder = CheckpointFolder(write_folder(tmp_path / "model", random_tensors()))
    layout = Layout(tp=2, ranks=(0, 1))
    parameters = megatron_parameters(ARCH, layout, 1, spec="te")
    plain: Any = {(p.chunk, p.name): torch.empty(p.shape, dtype=torch.bfloat16) for p in parameters}
    rounded: Any = {key: Rounded(tensor.shape) for key, tensor in plain.items()}
    assert load_parameters(folder, parameters, plain) == load_parameters(folder, parameters, rounded) == []
    assert max(len(p.blocks) for p in parameters) > 1
    for key, tensor in plain.items():
        error = (rounded[key].values - tensor.float()).abs()
        assert (error <= tensor.float().abs() / 16 + rounded[key].scale / 512).all(), key


def settings(**dtypes: str) -> TrainerConfig:
    config = run_config("tp2pp2sp")
    config.teacher.path = config.reward.path = "llama3-8b"
    config.teacher.layout = config.reward.layout = "tp2"
    for name, dtype in dtypes.items():
        getattr(config, name).dtype = dtype
    return config


def test_each_frozen_model_has_a_setting_of_its_own():
    for name in ("reference", "teacher", "reward"):
        specs = models_of(settings(**{name: "fp8"}))
        asked = {spec.name: spec.fp8_weights_by for spec in specs}
        assert asked == dict.fromkeys(asked, "") | {name: f"{name}.dtype"}
    config = settings(reference="fp8")
    config.reference.devices = "4-5"
    assert [spec.fp8_weights_by for spec in models_apart(config)] == ["reference.dtype"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            dict(engine__transformer_impl="local"),
            ["reference.dtype=fp8 with engine.transformer_impl=local", "use auto"],
        ),
        (
            dict(engine__dtype="float32"),
            ["reference.dtype=fp8 with engine.dtype=float32", "leave reference.dtype at auto"],
        ),
        (
            dict(engine__sharding="full", actor__layout="tp1", critic__layout="tp1"),
            ["reference.dtype=fp8 with engine.sharding=full", "use replicated"],
        ),
        (
            dict(actor__layout="tp4"),
            ["actor.layout='tp4'", "reference.dtype=fp8", "24 feed-forward channels"],
        ),
        (
            dict(reference__devices="4-7", reference__layout="tp4"),
            ["reference.layout='tp4'", "reference.dtype=fp8", "24 feed-forward channels"],
        ),
        (
            dict(algorithm__kl_coef=0.0),
            ["reference.dtype=fp8 has no effect with algorithm.kl_coef=0", "set kl_coef above 0"],
        ),
        (dict(reference__dtype="bfloat16"), ["reference.dtype='bfloat16'", "auto, fp8"]),
        (dict(teacher__dtype="fp8"), ["teacher.dtype=fp8 has no effect", "set teacher.path"]),
        (dict(reward__dtype="fp8"), ["reward.dtype=fp8 has no effect", "set reward.path"]),
    ],
)
def test_what_it_cannot_be_combined_with_is_refused_by_name(tmp_path, changes, words):
    write_job(tmp_path)
    usual = dict(reference__dtype="fp8", algorithm__kl_coef=0.1)
    assert check_config(good(tmp_path, **usual), world_size=4) == []
    (problem,) = check_config(good(tmp_path, **usual | changes), world_size=4)
    assert all(word in problem for word in words), problem


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "fp8"])
def test_without_such_a_gpu_the_setting_is_refused_by_its_name(dtype):
    with pytest.raises(ValueError, match="reference.dtype=fp8 needs transformer-engine and GPUs"):
        compute_of(EngineConfig(dtype=dtype), fp8_weights_by="reference.dtype")


def test_a_byte_of_each_layers_weight_is_saved_in_every_phase():
    plain, fp8 = (plan_memory(run_of(settings(reference=dtype), 4), H200) for dtype in ("auto", "fp8"))
    run = run_of(settings(), 4)
    layers = 16 * part_elements(run.actor.arch, 2).layer  # of a rank
    for phase in ("build", "rollout", "log_probs", "actor_update"):
        assert plain.phase_bytes(phase) - fp8.phase_bytes(phase) == pytest.approx(layers), phase


def test_beside_an_actor_that_computes_in_fp8_its_copies_are_saved_too():
    config = settings(reference="fp8")
    config.engine = replace(config.engine, dtype="fp8")
    usual = replace(config, reference=replace(config.reference, dtype="auto"))
    plain, fp8 = (plan_memory(run_of(each, 4), H200) for each in (usual, config))
    layers = 16 * part_elements(run_of(config, 4).actor.arch, 2).layer
    assert plain.phase_bytes("log_probs") - fp8.phase_bytes("log_probs") == pytest.approx(2 * layers)


def test_a_scoring_world_holds_the_smaller_weights():
    sizes = {}
    for dtype in ("auto", "fp8"):
        config = settings(reference=dtype)
        config.reference.devices = "4-5"
        sizes[dtype] = plan_memory(run_of(config, 4), H200).phase_bytes("scores")
    elements = part_elements(run_of(settings(), 4).actor.arch, 1)
    assert sizes["auto"] - sizes["fp8"] == pytest.approx(32 * elements.layer)


def test_seconds_of_a_pass_are_those_of_its_models():
    """Actor in bfloat16 and reference in fp8 alternate: on one stage the sum of both alone."""
    config = settings(reference="fp8")
    config.actor.layout = config.critic.layout = "tp2sp"
    run = run_of(config, 4)
    actor, reference = run.roles[0], next(role for role in run.roles if role.name == "reference")
    alone = [infer_seconds(run, H200, [each]) for each in (actor, reference)]
    assert infer_seconds(run, H200, [actor, reference]) == pytest.approx(sum(alone))
    assert passes(run, H200, actor)[0].forward != passes(run, H200, reference)[0].forward
