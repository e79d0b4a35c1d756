"""Companions of torch for CUDA beside its CPU build are not found by anyone."""

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
    unusable.hide_companions()
    assert importlib.util.find_spec("torchvision") is None
    with pytest.raises(ModuleNotFoundError):
        import torchvision  # noqa: F401  # pyright: ignore[reportMissingImports]
    assert "torchaudio" not in sys.modules and "triton" not in sys.modules


def test_nothing_is_hidden_from_a_build_for_cuda(monkeypatch):
    installed(monkeypatch, torch="2.13.0", torchvision="0.28.0")
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    unusable.hide_companions()
    assert "torchvision" not in sys.modules
