"""Model of larger sizes, fitted to the measured ones; no number in this file is measured.

The layout of the largest measured size is kept; data parallelism and replicas of vLLM grow. A phase takes

    seconds(n) = s · Σ c_k · x_k(n) + max(0, known(n) - known(N))

with terms x_k and constants c_k >= 0 fitted to the measured sizes. The factor s makes the model exact at the
largest measured size N, and `known` are costs that small sizes do not show. Terms, in this order, as many as
the measured sizes can distinguish:

    work    samples of a GPU / (1 - bubble share); for the weight sync 1
    start   1 (rollout: the steps of a token, whatever the number of samples)
    tensor  samples of a tensor-parallel group, times (t-1)/t: the data its ranks exchange; for the weight
            sync the bytes that a rank receives
    sync    log2 of what grows: dp for phases in which a model computes, replicas of vLLM for a rollout,
            else n; barriers and waiting for the slowest of more ranks. If no measured size has dp (or
            replicas) above 1, it is unknown, and nothing is added.

Known from the links' rates are the reduction of gradients and the gathering of weights over r = dp·cp ranks
in every optimizer step, (r-1)/r of a rank's parameters each way (ring, without overlap), and weights from
other hosts. Also known, from timing it here, is balancing samples over data-parallel ranks, which every rank
does in Python (verl_megatron/data/packing.py). It has a phase of its own, DEALING, in modelled sizes; in
measured sizes it is part of the others.
"""

import gc
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import combinations
from math import lcm, log2

import numpy as np

from verl_megatron.benchmarks.scaling.rows import MODEL_OF, MODELLED, UPDATES, Row, bubbles_of, described
from verl_megatron.data.packing import balance
from verl_megatron.planner.machine import Machine
from verl_megatron.planner.planned_run import PlannedRole, PlannedRun
from verl_megatron.planner.training import group_rate
from verl_megatron.planner.weight_sync import moved_bytes

TERMS = ("work", "start", "tensor", "sync")
DEALING = "dealing_rows"
TIMED_S = 0.5  # a call above this is the last one timed; larger sizes are extrapolated from the last two
Deal = Callable[[int, int], float]  # seconds for samples of a mini-batch and data-parallel ranks


def terms_of(run: PlannedRun, phase: str) -> dict[str, float]:
    """Return x_k of a phase, by the names of `TERMS`."""
    own = run.samples / run.world_size
    if phase in ("reshard", "return"):
        return {"work": 1.0, "tensor": moved_bytes(run), "sync": log2(run.world_size)}
    if phase == "rollout":
        return {
            "work": own,
            "start": 1.0,
            "tensor": own * (run.config.rollout.tp - 1),
            "sync": log2(run.replicas),
        }
    role = _role_of(run, phase)
    if role is None:
        return {"work": own, "sync": log2(run.world_size)}
    layout = role.layout
    own = run.samples / (layout.dp * layout.tp * layout.pp * layout.cp)
    return {
        "work": own / (1 - bubbles_of(run)[phase]),
        "tensor": own * (layout.tp - 1),
        "sync": log2(layout.dp),
    }


def _role_of(run: PlannedRun, phase: str) -> PlannedRole | None:
    return next((role for role in run.roles if role.name == MODEL_OF.get(phase)), None)


def fit(terms: Sequence[dict[str, float]], seconds: Sequence[float]) -> dict[str, float]:
    """Fit constants c_k >= 0 by least squares over the measured sizes.

    A term that they cannot distinguish from earlier ones gets 0.
    """
    chosen: list[str] = []
    for name in TERMS:
        columns = _columns(terms, [*chosen, name])
        scale = np.abs(columns).max(axis=0)
        if scale.min() > 0 and np.linalg.matrix_rank(columns / scale, tol=1e-6) == len(chosen) + 1:
            chosen.append(name)
    best: tuple[float, dict[str, float]] | None = None
    for count in range(len(chosen), 0, -1):  # few enough to try all subsets
        for names in combinations(chosen, count):
            columns = _columns(terms, names)
            scale = columns.max(axis=0)
            constants = np.linalg.lstsq(columns / scale, np.array(seconds), rcond=None)[0] / scale
            missed = float(np.square(columns @ constants - seconds).sum())
            if (constants >= 0).all() and (best is None or missed < best[0]):
                best = missed, dict(zip(names, constants.tolist()))
    assert best is not None, "the first term alone has a constant that is not negative"
    return best[1]


def _columns(terms: Sequence[dict[str, float]], names: Sequence[str]) -> np.ndarray:
    """Return x_k of the named terms, a row per measured size and a column per name; an absent term is 0."""
    columns = np.zeros((len(terms), len(names)))
    for size, each in enumerate(terms):
        columns[size] = [each.get(name, 0.0) for name in names]
    return columns


# ---- known -------------------------------------------------------------------------------------------------


def known_seconds(run: PlannedRun, phase: str, links: Machine) -> float:
    """Return the costs that are not fitted; `links` has same_host_rate and other_host_rate."""
    if phase == "reshard":
        return moved_bytes(run) / (
            links.other_host_rate if run.resharding_crosses_hosts else links.same_host_rate
        )
    role = _role_of(run, phase) if phase in UPDATES else None
    return 0.0 if role is None else gradient_seconds(run, role, links)


def dealing_seconds(run: PlannedRun, deal: Deal) -> float:
    """Return the seconds of balancing: each model, all mini-batches, before forward passes and updates.

    The reference model reuses the actor's result.
    """
    parts = run.config.algorithm.num_mini_batches
    return sum(
        (1 + role.trainable) * parts * deal(run.samples // parts, role.layout.dp)
        for role in run.roles
        if role.name != "reference"
    )


def gradient_seconds(run: PlannedRun, role: PlannedRole, links: Machine) -> float:
    """Return the seconds of an iteration's gradient and weight collectives.

    Either reductions of float32 gradients (a ring moves (r-1)/r of them) and gathers of weights, or
    all-reduces (twice that).
    """
    layout, config = role.layout, run.config
    replicas = layout.dp * layout.cp
    rate = group_rate(run, links, span=layout.tp * replicas, stride=layout.tp)
    bytes_each_step = max(role.elements) * (
        (4 + run.element_bytes) if config.engine.distributed_optimizer else 8
    )
    return (
        config.algorithm.epochs
        * config.algorithm.num_mini_batches
        * bytes_each_step
        * (replicas - 1)
        / replicas
        / rate
    )


class Dealing:
    """Seconds of `balance` by size, timed on this machine while it is quick, the shorter of two calls.

    Beyond that they grow with a power of samples · dp, estimated from the timed sizes and at most 1:
    `balance` joins lists of dp bins sample by sample. Ask for sizes in increasing order.
    """

    def __init__(self, work: Callable[[list[int], int], object] = balance):
        self._work = work
        self._timed: dict[tuple[int, int], float] = {}

    def __call__(self, rows: int, dp: int) -> float:
        if (rows, dp) not in self._timed:
            if max(self._timed.values(), default=0.0) > TIMED_S:
                return self._beyond(rows * dp)
            self._timed[rows, dp] = min(self._once(rows, dp), self._once(rows, dp))
        return self._timed[rows, dp]

    def _once(self, rows: int, dp: int) -> float:
        gc.freeze()  # as in a run: the collector skips earlier objects
        start = time.perf_counter()
        self._work([1024] * rows, dp)
        seconds = time.perf_counter() - start
        gc.unfreeze()
        return seconds

    def _beyond(self, product: int) -> float:
        products = np.array([rows * dp for rows, dp in self._timed])
        seconds = np.array(list(self._timed.values()))
        largest = products.argmax()
        told_apart = seconds > TIMED_S / 1000
        power = (
            np.polyfit(np.log(products[told_apart]), np.log(seconds[told_apart]), 1)[0]
            if len(set(products[told_apart])) > 1
            else 1.0
        )
        return float(seconds[largest] * (product / products[largest]) ** min(max(power, 0.0), 1.0))


# ---- larger sizes ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Measured sizes, smallest first, and the inputs of the model for larger ones."""

    runs: Sequence[PlannedRun]
    rows: Sequence[Row]
    links: Machine
    ranks_per_host: int
    strong: bool = False

    def sizes(self, largest: int) -> list[int]:
        """Return the modelled sizes, all above the measured ones.

        The first is the smallest number of whole hosts that is a multiple of the largest measured size; the
        others double it.
        """
        first = lcm(self.rows[-1].gpus, self.ranks_per_host)
        doubled = (first * 2**power for power in range(31))
        return [gpus for gpus in doubled if self.rows[-1].gpus < gpus <= largest]

    def run_on(self, gpus: int) -> PlannedRun:
        """Return the largest measured run with more data parallelism.

        Raises:
            ValueError: models on separate devices, or more data-parallel ranks than samples of a mini-batch.
        """
        config = deepcopy(self.runs[-1].config)
        sections = ("actor", "critic", "reference", "reward", "teacher")
        if any(getattr(config, name).devices for name in sections):
            raise ValueError("models that stand on devices of their own have no larger size")
        if not self.strong:
            config.data.prompts_per_iteration = config.data.prompts_per_iteration * gpus // self.rows[-1].gpus
        run = _grown(self.runs[-1], config, gpus, self.ranks_per_host)
        parts, widest = (
            run.samples // config.algorithm.num_mini_batches,
            max(role.layout.dp for role in run.roles),
        )
        if parts < widest:
            raise ValueError(
                f"{gpus} GPUs have {widest} data-parallel ranks for {parts} rows of a mini-batch"
            )
        return run

    def model(self, largest: int, planned: Callable[[PlannedRun], dict[str, float]]) -> tuple[list[Row], str]:
        """Return rows up to `largest` GPUs, and the reason if they end earlier.

        Args:
            planned: the planner's function for a run's seconds by phase.
        """
        deal, rows = Dealing(), []
        dealt = dealing_seconds(self.runs[-1], deal)
        constants = {phase: self._constants(phase) for phase in self.rows[-1].seconds}
        if not (sizes := self.sizes(largest)):
            return (
                [],
                f"up to --to {largest} no more than {self.rows[-1].gpus} GPUs are both a multiple of "
                f"{self.rows[-1].gpus} and whole hosts of {self.ranks_per_host}",
            )
        for gpus in sizes:
            try:
                run = self.run_on(gpus)
            except ValueError as error:
                return rows, str(error)
            seconds = {phase: self._seconds(run, phase, constants[phase]) for phase in constants}
            seconds[DEALING] = max(0.0, dealing_seconds(run, deal) - dealt)
            rows.append(Row(source=MODELLED, seconds=seconds, planned=planned(run), **described(run)))
        return rows, ""

    def _constants(self, phase: str) -> dict[str, float]:
        """Return the constants c_k of a phase, fitted to all measured sizes."""
        terms = [terms_of(run, phase) for run in self.runs]
        return fit(terms, [row.seconds[phase] for row in self.rows])

    def _seconds(self, run: PlannedRun, phase: str, constants: dict[str, float]) -> float:
        """Return the seconds of a phase on a larger size."""
        base, measured = self.runs[-1], self.rows[-1].seconds[phase]
        fitted = _fitted_seconds(run, phase, constants)
        fitted_base = _fitted_seconds(base, phase, constants)
        more = known_seconds(run, phase, self.links) - known_seconds(base, phase, self.links)
        return (measured * fitted / fitted_base if fitted_base else measured) + max(0.0, more)


def _fitted_seconds(run: PlannedRun, phase: str, constants: dict[str, float]) -> float:
    """Return Σ c_k · x_k of a phase."""
    terms = terms_of(run, phase)
    return sum(constant * terms[name] for name, constant in constants.items())


def _grown(run: PlannedRun, config, gpus: int, ranks_per_host: int) -> PlannedRun:
    """Return the same models on `gpus` GPUs; a layout's explicit dp is adjusted."""
    archs = {role.name: role.arch for role in run.roles}
    archs.setdefault("critic", archs["actor"])
    paths = {
        config.actor.path: archs["actor"],
        config.critic.path: archs["critic"],
        config.reward.path: archs.get("reward"),
        config.teacher.path: archs.get("teacher"),
    }
    for name in ("actor", "critic", "reward", "teacher"):
        model = getattr(config, name)
        layout = next((role.layout for role in run.roles if role.name == name), None)
        if layout is not None:
            sizes = (
                "".join(
                    f"{axis}{getattr(layout, axis)}"
                    for axis in ("tp", "pp", "cp")
                    if getattr(layout, axis) > 1
                )
                or "tp1"
            )
            model.layout = (
                sizes
                + (f"vpp{layout.vpp}" if layout.vpp > 1 else "")
                + ("sp" if layout.sequence_parallel else "")
            )
    return PlannedRun.of(
        config, world_size=gpus, ranks_per_host=ranks_per_host, read=lambda path: paths[path]
    )
