"""Slow replicas are named once, after some iterations in a row."""

from tests.one_rank import ONE_RANK
from verl_megatron.observe.metrics import Sums
from verl_megatron.observe.rates import Rates


def reviewed(rates: Rates, made: dict[str, tuple[float, float]]) -> float | None:
    for name, (tokens, seconds) in made.items():
        rates.add(name, tokens=tokens / 2, seconds=seconds / 2)
        rates.add(name, tokens=tokens / 2, seconds=seconds / 2)
    rates.review(sums := Sums())
    return sums.reduce(ONE_RANK).get("async/slowest_replica")


def test_a_slow_replica_is_named_once(capsys):
    rates = Rates(ONE_RANK)
    fast = {"replica 0": (800.0, 2.0), "replica 1": (300.0, 1.0)}
    for iteration in range(6):
        assert reviewed(rates, fast | {"replica 2": (280.0, 2.0)}) == 0.4
        said = capsys.readouterr().out
        assert said.count("replica 2 makes 140 tokens/s, the others 350:") == (iteration == 2)
    assert reviewed(rates, fast) == 0.75 and not capsys.readouterr().out


def test_chance_is_not_slowness(capsys):
    rates = Rates(ONE_RANK)
    assert reviewed(rates, {}) is None and reviewed(rates, {"replica 0": (5.0, 1.0)}) is None
    for _ in range(4):
        assert reviewed(rates, {"replica 0": (100.0, 1.0), "replica 1": (10.0, 1.0)}) == 0.1
        assert reviewed(rates, {"replica 0": (100.0, 1.0), "replica 1": (90.0, 1.0)}) == 0.9
        assert reviewed(rates, {"replica 0": (0.0, 1.0), "replica 1": (0.0, 1.0)}) == 0.0
    assert not capsys.readouterr().out
