"""The models of a run: one engine, and what each role asks of it."""

from parallel import device

device.prepare()  # before any module of this package imports Megatron-Core
