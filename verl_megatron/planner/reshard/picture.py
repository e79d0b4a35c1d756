"""Picture of a plan's traffic."""

from pathlib import Path

from parallel.placement import described
from verl_megatron.planner.reshard.case import PlanCase
from verl_megatron.planner.reshard.report import Flows

DRAWN_RANKS = 128  # with more, the picture shows hosts


def draw(case: PlanCase, flows: Flows, path: Path) -> None:
    """Plot the traffic: source ranks as rows, destination ranks as columns, copies on the diagonal.

    Shows ranks with lines between hosts, or hosts if there are too many ranks.
    """
    import matplotlib

    matplotlib.use("Agg")  # writes files, needs no display
    import numpy as np
    from matplotlib import pyplot

    of = 1 if case.ranks <= DRAWN_RANKS else case.ranks_per_host
    size = -(-case.ranks // of)
    sent_SD = np.zeros((size, size))  # S source, D destination; MiB
    for pair, amount in flows.total.items():
        sent_SD[pair[0] // of, pair[1] // of] += amount / 2**20
    figure, axis = pyplot.subplots(figsize=(9, 8), layout="constrained")
    image = axis.imshow(np.ma.masked_equal(sent_SD, 0), interpolation="nearest", vmin=0)
    figure.colorbar(image, label="MiB (white: nothing)", shrink=0.8)
    for edge in range(case.ranks_per_host, case.ranks, case.ranks_per_host) if of == 1 else ():
        for line in (axis.axhline, axis.axvline):
            line(edge - 0.5, color="black", linewidth=1.2)
    for src, dst in zip(*sent_SD.nonzero()) if size <= 16 else ():
        amount = sent_SD[src, dst]
        colour = "black" if amount > sent_SD.max() / 2 else "white"
        axis.text(
            dst,
            src,
            f"{amount:.3g}" if amount < 1000 else f"{amount:.0f}",
            ha="center",
            va="center",
            fontsize=8,
            color=colour,
        )
    axis.locator_params(integer=True)
    who = "rank" if of == 1 else f"host of {of} ranks"
    axis.set(xlabel=f"{who} that receives (vLLM)", ylabel=f"{who} that sends (Megatron)")
    hosts = "one host" if case.hosts == 1 else f"{case.hosts} hosts" + ", parted by lines" * (of == 1)
    order = f"ranks: {described(case.train, case.rollout)}"
    axis.set_title(
        f"{case.model}: {case.train} to {case.rollout.dp} x tp{case.rollout.tp}, {case.ranks} ranks, "
        f"{hosts}\n{order}",
        fontsize=10,
    )
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
