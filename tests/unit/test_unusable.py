"""What is installed and of no use is not found by anyone."""

import importlib
import importlib.util
import sys

import pytest

from parallel.runtime import unusable


def installed(monkeypatch, **versions: str) -> None:
    monkeypatch.setattr(unusable, "_version", lambda name: versions.get(name, ""))
    for name in unusable.COMPANIONS:
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_a_companion_for_cuda_is_hidden_from_a_cpu_build(monkeypatch):
    installed(monkeypatch, torch="2.13.0+cpu", torchvision="0.28.0", torchaudio="2.11.0+cpu")
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    unusable.hide_unusable()
    assert importlib.util.find_spec("torchvision") is None
    with pytest.raises(ModuleNotFoundError):
        import torchvision  # noqa: F401  # pyright: ignore[reportMissingImports]
    assert "torchaudio" not in sys.modules and "triton" not in sys.modules


def test_nothing_is_hidden_from_a_build_for_cuda(monkeypatch):
    installed(monkeypatch, torch="2.13.0", torchvision="0.28.0")
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    unusable.hide_unusable()
    assert "torchvision" not in sys.modules


def test_transformer_engine_imports_no_jax(monkeypatch, tmp_path):
    package = tmp_path / "transformer_engine"
    (package / "jax").mkdir(parents=True)
    (package / "jax/__init__.py").write_text("raise AssertionError('JAX is imported')")
    (package / "__init__.py").write_text(
        "try:\n    from . import jax\nexcept ImportError:\n    has_jax = False\n"
    )
    modules = {name: module for name, module in sys.modules.items() if "transformer_engine" not in name}
    monkeypatch.setattr(sys, "modules", modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    unusable.hide_unusable()
    assert not importlib.import_module("transformer_engine").has_jax
