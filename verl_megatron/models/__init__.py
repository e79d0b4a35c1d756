"""Megatron-Core models: layer specifications, attention and heads."""

from parallel import device

device.prepare()  # before any module of this package imports Megatron-Core
