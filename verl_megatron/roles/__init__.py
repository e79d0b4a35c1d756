"""Models of a run: the Megatron-Core engine and the roles that use it."""

from parallel import device

device.prepare()  # before any module of this package imports Megatron-Core
