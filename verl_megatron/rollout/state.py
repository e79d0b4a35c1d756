"""What a library may change in the process while it works, put back afterwards."""

import contextlib
import gc
import os
import random
from collections.abc import Iterator, Mapping

import numpy
import torch


@contextlib.contextmanager
def preserved_environment(defaults: Mapping[str, str]) -> Iterator[None]:
    """Set the variables of `defaults` that are not set; at the end the environment is as it was."""
    before = dict(os.environ)
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        for name, value in before.items():
            if os.environ.get(name) != value:
                os.environ[name] = value


@contextlib.contextmanager
def preserved_random_state() -> Iterator[None]:
    """At the end the generators of random, numpy and torch (CPU and the current GPU) are as they were."""
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    try:
        yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """No garbage collection of what exists or comes: importing or building much is a third faster without it."""
    enabled = gc.isenabled()
    gc.disable()
    gc.freeze()  # so that collections asked for by name are quick, too
    try:
        yield
    finally:
        if enabled:
            gc.enable()
