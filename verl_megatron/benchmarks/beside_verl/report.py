"""The table of `benchmark verl`."""

from collections.abc import Sequence

from verl_megatron.benchmarks.beside_verl.job import Job
from verl_megatron.benchmarks.beside_verl.runs import OUR_PHASES, Measured, total


def planned(name: str, seconds: dict[str, float]) -> Measured:
    """Return a line of the table from the planner's seconds by phase."""
    by_phase = {phase: total(seconds, parts) for phase, parts in OUR_PHASES.items()}
    whole = by_phase | {"iteration": sum(seconds.values())}
    return Measured(name=f"plan of {name}", seconds=whole, memory_gib=None)


def table(job: Job, lines: Sequence[Measured], *, device: str) -> str:
    """Return the job and the seconds by phase as Markdown; the ratio is verl's iteration over a line's."""
    columns = [phase for phase in OUR_PHASES if max(_column(lines, phase))] + ["iteration"]
    verl = next((line.seconds["iteration"] for line in lines if line.name == "verl"), None)
    head = ["", *columns, "ratio", "memory, GiB"]
    rows = [head, ["---"] * len(head)]
    for line in lines:
        cells = [f"{line.seconds[column]:.2f}" for column in columns]
        ratio = f"{verl / line.seconds['iteration']:.2f}" if verl else "–"
        memory = f"{line.memory_gib:.1f}" if line.memory_gib is not None else "–"
        rows.append([line.name, *cells, ratio, memory])
    text = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return (
        f"{job.algorithm.upper()} on {job.gpus} x {device}, TP{job.tp} -> TP{job.rollout_tp}: {job.prompts} "
        f"prompts x {job.samples} samples of {job.prompt_tokens} + {job.response_tokens} tokens, {job.steps} "
        f"optimizer steps, micro-batches of {job.tokens} tokens. Seconds, medians of "
        f"{job.iterations} iterations without the first two.\n\n{text}\n"
    )


def _column(lines: Sequence[Measured], phase: str) -> list[float]:
    return [line.seconds[phase] for line in lines]
