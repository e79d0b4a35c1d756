"""Plants faults in the worlds of a run; Python imports this file by itself.

WRONG_WEIGHTS is what is wrong with those of the rollout. skipped: the second version's largest tensor does
not arrive; stale: none of it does; changed: an element changes while samples are generated; unsent: training
sends the first version again; error: training fails as it sends the fourth one, at its first start.

KILLS says where worlds are killed, at their first start, such as "train=5 rollout:1=3": training before the
update of iteration 5; a rollout world at the order of iteration 3, with async.buffer=window as its third
sample is finished; a scoring world at its third job. Training waits for all worlds before it begins.
"""

import importlib.machinery
import itertools
import os
import signal
import sys

KILLS = dict(each.split("=") for each in os.environ.get("KILLS", "").split())


def kills(owner: type, method: str, number_of=None) -> None:
    """Kill this process before a call of a method: the one with this number, or the call of this number."""
    original, calls = getattr(owner, method), itertools.count(1)

    def killing(self, *arguments, **named):
        role = sys.orig_argv[sys.orig_argv.index("--role") + 1]
        starts = {os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ.get("VERL_MEGATRON_START", "0")}
        number = number_of(*arguments, **named) if number_of else next(calls)
        if starts == {"0"} and KILLS.get(role) == str(number):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *arguments, **named)

    setattr(owner, method, killing)


def admit_all(module) -> None:
    """Let training wait for all worlds where it would wait for one."""
    module.Fleet.admit_any = lambda self: self.admit(until=lambda: len(self.links) == len(self.worlds))


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


WRONG = {
    "verl_megatron.separate.order_server": change_rollout,
    "parallel.reshard.versions": change_training,
}
KILLED = {
    "verl_megatron.learner": lambda module: kills(module.Learner, "learn", lambda *_, step: step),
    "verl_megatron.separate.order_server": lambda module: kills(
        module.OrderServer, "_carry_out", lambda number, order, waited_s: order.iteration
    ),
    "verl_megatron.separate.window.stream_server": lambda module: kills(module.StreamServer, "_score"),
    "verl_megatron.separate.scoring.server": lambda module: kills(module.ScoringServer, "_do"),
    "verl_megatron.separate.fleet": admit_all,
}


def change(module) -> None:
    name = module.__name__
    if "WRONG_WEIGHTS" in os.environ and name in WRONG:
        WRONG[name](module, os.environ["WRONG_WEIGHTS"])
    if KILLS and name in KILLED:
        KILLED[name](module)


class After:
    """Changes modules once they are loaded."""

    def find_spec(self, name, path=None, target=None):
        if name not in WRONG.keys() | KILLED.keys():
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec


if "WRONG_WEIGHTS" in os.environ or KILLS:
    sys.meta_path.insert(0, After())
