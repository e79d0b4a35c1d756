"""Makes a rollout rank serve wrong weights, as WRONG_WEIGHTS says; Python imports this file by itself.

skipped: the second version's largest tensor does not arrive; stale: none of it does; changed: an element
changes while samples are generated.
"""

import importlib.machinery
import os
import sys


def change(module, how: str) -> None:
    server, calls = module._Server, []
    adopt, carry_out = server._adopt, server._carry_out

    def wrong_adopt(self):
        target = self._engine.weight_target()
        before = {name: tensor.clone() for name, tensor in target.items()}
        adopt(self)
        calls.append(self._versions.version)
        if len(calls) == 2:
            largest = max(target, key=lambda name: target[name].numel())
            for name in [largest] if how == "skipped" else list(target):
                target[name].copy_(before[name])

    def wrong_carry_out(self, number, given):
        if given[0].iteration == 2:
            next(iter(self._engine.weight_target().values())).view(-1)[3] += 1
        carry_out(self, number, given)

    if how == "changed":
        server._carry_out = wrong_carry_out
    else:
        server._adopt = wrong_adopt


class After:
    """Changes the rollout world's module once it is loaded."""

    def find_spec(self, name, path=None, target=None):
        if name != "verl_megatron.launch.rollout_world":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            change(module, os.environ["WRONG_WEIGHTS"])

        spec.loader.exec_module = exec_module
        return spec


if "WRONG_WEIGHTS" in os.environ:
    sys.meta_path.insert(0, After())
