"""Makes a run generate with wrong weights, as WRONG_WEIGHTS says; Python imports this file by itself.

skipped: the second version's largest tensor does not arrive; stale: none of it does; changed: an element
changes while samples are generated; unsent: training sends the first version again; error: training fails
as it sends the fourth one, at its first start.
"""

import importlib.machinery
import os
import sys


def change_rollout(module, how: str) -> None:
    server, exchange, calls = module.OrderServer, module.Exchange, []
    adopt, carry_out = exchange.adopt, server._carry_out

    def wrong_adopt(self, wait):
        target = {name: tensor for (_, name), tensor in self.versions._destination.items()}
        before = {name: tensor.clone() for name, tensor in target.items()}
        sync = adopt(self, wait)
        calls.append(sync)
        if len(calls) == 2:
            largest = max(target, key=lambda name: target[name].numel())
            for name in [largest] if how == "skipped" else list(target):
                target[name].copy_(before[name])
        return sync

    def wrong_carry_out(self, number, order, waited_s):
        if order.iteration == 2:
            next(iter(self._replica.engine.weight_target().values())).view(-1)[3] += 1
        carry_out(self, number, order, waited_s)

    if how == "changed":
        server._carry_out = wrong_carry_out
    elif how in ("skipped", "stale"):
        exchange.adopt = wrong_adopt


def change_training(module, how: str) -> None:
    publish, first = module.VersionedReshard.publish, {}

    def same_again(self, version, values=None):
        if not first:
            first.update({key: tensor.clone() for key, tensor in self._source.items()})
        publish(self, version, first)

    def fail(self, version, values=None):
        if version == 4 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise ArithmeticError("a planted error")
        publish(self, version, values)

    if how in ("unsent", "error"):
        module.VersionedReshard.publish = same_again if how == "unsent" else fail


CHANGES = {
    "verl_megatron.separate.order_server": change_rollout,
    "parallel.reshard.versions": change_training,
}


class After:
    """Changes modules once they are loaded."""

    def find_spec(self, name, path=None, target=None):
        if name not in CHANGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            CHANGES[name](module, os.environ["WRONG_WEIGHTS"])

        spec.loader.exec_module = exec_module
        return spec


if "WRONG_WEIGHTS" in os.environ:
    sys.meta_path.insert(0, After())
