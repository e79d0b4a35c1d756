"""Text reports of plans."""

from collections.abc import Iterable, Sequence
from math import ceil

from parallel.weights.architecture import read_architecture
from verl_megatron.config import TrainerConfig
from verl_megatron.model_specs import is_separate
from verl_megatron.planner.comparison import Compared
from verl_megatron.planner.machine import GIB, Machine, find_machine
from verl_megatron.planner.memory import PARTS, MemoryPlan, RankKind, plan_memory, problems_of
from verl_megatron.planner.planned_run import PlannedRun
from verl_megatron.planner.rollout.decoding import samples_at_once
from verl_megatron.planner.search.candidates import MARGIN, Candidate, Search, search
from verl_megatron.planner.search.choices import spelled
from verl_megatron.planner.seconds import TimePlan, plan_seconds

PHASES_SHOWN = ("rollout", "log_probs", "values", "critic_update", "actor_update")
MFU_MEANING = (
    "MFU: matrix products and the causal half of attention, a backward pass twice, over all phases"
    " in which models compute and the vendor's bfloat16 rate;"
    " without input embedding, logits of tokens nobody asks about, recomputation and generation"
)


WRONG_BY = 0.12  # largest relative error of planned memory in measured runs (tests/unit/test_planner.py)
DOES_NOT_FIT = "It does not fit:"  # first line of that part of a report


def report(config: TrainerConfig, *, world_size: int, gpu: str = "h200", ranks_per_host: int = 8) -> str:
    """Report memory by phase and rank, predicted seconds and whether the run fits; if not, settings that do.

    Args:
        config: settings that `check_config` accepted; of the models' folders only config.json is read.
        gpu: a built-in machine, or the .json file that verl-megatron benchmark calibrate wrote.

    Raises:
        ValueError: an unknown machine, or an invalid model folder or layout.
    """
    machine = find_machine(gpu)
    run = PlannedRun.of(config, world_size=world_size, ranks_per_host=ranks_per_host, read=read_architecture)
    memory = plan_memory(run, machine)
    problems = problems_of(run, machine, memory)
    lines = [headline(run, machine), "", *memory_lines(memory, machine), ""]
    if problems:
        others = alternatives(config, world_size=world_size, machine=machine, ranks_per_host=ranks_per_host)
        lines += [DOES_NOT_FIT, *(f"  {problem}" for problem in problems)]
        lines += (
            ["These settings do, best first:", *(f"  {line}" for line in others)]
            if others
            else ["No layout does: use more GPUs, shorter samples or smaller models."]
        )
    else:
        spare = machine.gpu_bytes - memory.peak_bytes
        narrowly = (
            ""
            if spare >= WRONG_BY * memory.peak_bytes
            else f" narrowly (plans of measured runs were wrong by up to {WRONG_BY:.0%})"
        )
        lines += [
            *seconds_lines(run, plan_seconds(run, machine, memory), memory),
            "",
            f"It fits{narrowly}: {spare / GIB:.1f} GiB stay free on the fullest GPU.",
        ]
    if config.engine.transformer_impl == "local":
        lines.append("engine.transformer_impl=local is planned like te; it is slower and needs more memory.")
    return "\n".join(lines)


def headline(run: PlannedRun, machine: Machine) -> str:
    """Summarize the planned run in one line."""
    roles = ", ".join(f"{role.name} {role.layout}" for role in run.roles)
    rollout = f"{run.replicas} x tp{run.config.rollout.tp}"
    if is_separate(run.config):
        rollout += f" on ranks {run.config.rollout.devices}"
    for planned in run.scoring:
        ranks = str(planned.world.ranks[0]) + f"-{planned.world.ranks[-1]}" * (len(planned.world.ranks) > 1)
        scorers = ", ".join(f"{role.name} {role.layout}" for role in planned.roles)
        rollout += f"; {scorers} on ranks {ranks}"
    samples = f"{run.samples} samples of {run.prompt_tokens} + {lengths_text(run)} tokens"
    return (
        f"{run.gpus} x {machine.name}, {run.ranks_per_host} a host: {roles}; vLLM {rollout};"
        f" {samples} in {run.config.algorithm.num_mini_batches} mini-batches"
    )


def lengths_text(run: PlannedRun) -> str:
    """Format the tokens of a response: all as many, or a mean and the most."""
    most = run.config.rollout.max_tokens
    return f"{most}" if run.lengths is None else f"{run.response_tokens:.0f} (at most {most})"


def memory_lines(memory: MemoryPlan, machine: Machine) -> list[str]:
    """Format the fullest rank by phase and part, all kinds of ranks by phase, and the host."""
    peak = memory.peak
    present = {part for parts in peak.phases.values() for part, size in parts.items() if size}
    used = [part for part in PARTS if part in present]
    lines = [
        f"{f'GiB on {named(peak)}':<26}{_cells(used, 14)}"
        f"{'together':>12}{'of ' + format(machine.gpu_bytes / GIB, '.1f'):>12}"
    ]
    for phase, parts in peak.phases.items():
        sizes = _cells((f"{parts.get(part, 0) / GIB:.1f}" for part in used), 14)
        lines.append(
            f"{phase:<26}{sizes}{peak.total(phase) / GIB:>12.1f}"
            f"{peak.total(phase) / machine.gpu_bytes:>12.0%}"
        )
    if len(memory.kinds) > 1:
        lines += ["", f"{'GiB by rank':<26}{_cells(memory.phases, 15)}"]
        for kind in memory.kinds:
            totals = (f"{kind.total(phase) / GIB:.1f}" * (phase in kind.phases) for phase in memory.phases)
            lines.append(f"{named(kind):<26}{_cells(totals, 15)}")
    if budgets := budget_lines(memory):
        lines += ["", *budgets]
    return lines + [
        "",
        f"host memory {memory.host_bytes / GIB:,.0f} of {machine.host_bytes / GIB:,.0f} GiB;"
        f" KV cache {max(0.0, memory.kv_cache_bytes) / GIB:.1f} GiB a rank",
    ]


def budget_lines(memory: MemoryPlan) -> list[str]:
    """Format the micro-batches that were fitted to the memory: a line, or none."""
    budgets = [f"{tokens:,} tokens ({name})" for name, tokens in memory.budgets.items()]
    return [f"engine.dynamic_batching: micro-batches of up to {', '.join(budgets)}"] * bool(budgets)


def _cells(texts: Iterable[str], width: int) -> str:
    """Format columns of a table, right-aligned."""
    return "".join(text.rjust(width) for text in texts)


def seconds_lines(run: PlannedRun, time: TimePlan, memory: MemoryPlan) -> list[str]:
    """Format an iteration's phases, its rollout throughput and its MFU."""
    phases = " ".join(f"{phase} {seconds:.2f}" for phase, seconds in time.seconds.items())
    generated = run.generated_samples * run.response_tokens / time.seconds["rollout"]
    mfu = ", ".join(f"{phase} {time.mfu(phase):.1%}" for phase in time.flops)
    both = f", rollout beside the rest; {waiting(time)}" if time.overlaps else ""
    drafts = "" if run.config.rollout.speculative == "off" else ", without rollout.speculative's drafts"
    return [
        f"seconds predicted: {time.iteration:.1f} an iteration ({phases}{both})",
        f"rollout: {generated:,.0f} tokens/s, {samples_together(run, memory.kv_cache_bytes)}{drafts};"
        f" MFU {time.mfu():.1%} ({mfu})",
    ]


def waiting(time: TimePlan) -> str:
    """Format the share of an iteration for which each world waits for the others."""
    worlds = {"training": time.training, "rollout": time.seconds["rollout"]} | time.scoring
    shares = {name: 1 - seconds / time.iteration for name, seconds in worlds.items()}
    waits = [f"{name} waits {share:.0%}" for name, share in shares.items() if share >= 0.005]
    return ", ".join(waits) or "neither waits"


def samples_together(run: PlannedRun, kv_cache_bytes: float) -> str:
    """Format how many of a replica's samples decode concurrently at full length, and what limits them."""
    samples, at_once = ceil(run.generated_samples / run.replicas), samples_at_once(run, kv_cache_bytes)
    text = f"{at_once} of a replica's {samples} samples at once"
    if at_once > samples:
        return f"{at_once} samples of a replica at once, of several iterations"
    if at_once < min(samples, run.config.rollout.max_num_seqs):
        follows = run.config.rollout.dynamic_batching
        limit = (
            "rollout.dynamic_batching keeps room in the KV cache" if follows else "the KV cache holds no more"
        )
        return f"{text} ({limit}: rollout.gpu_memory_utilization, on a CPU rollout.kv_cache_mib)"
    return text if at_once == samples else f"{text} (rollout.max_num_seqs)"


def search_text(result: Search, *, best: int, machine: Machine) -> str:
    """Format a search result.

    It has a table of the best candidates, memory and seconds of the first by phase, the reasons why others do
    not fit, and recipe lines of the best three.
    """
    shown = result.fitting[:best]
    lines = _best_lines(shown, machine) if shown else []
    if result.refused:
        lines += _refused_lines(result, machine)
    lines += (
        ["", "recipe lines:", *recipe_lines(result)]
        if shown
        else ["", "nothing fits: use more GPUs, shorter samples or smaller models"]
    )
    return "\n".join(lines)


def _best_lines(shown: Sequence[Candidate], machine: Machine) -> list[str]:
    """Format the best candidates, and the first of them by phase."""
    first, separate = shown[0], is_separate(shown[0].run.config)
    phases = [phase for phase in PHASES_SHOWN if phase in first.seconds.seconds]
    lines = [
        f"{'':>3} {'actor layout':<18}{'rollout':<11}"
        + _cells(phases, 14)
        + f"{'iteration s':>13}{'MFU':>7}{'GiB':>7}  {'fullest':<14}"
        + f"{'GPUs':<12}{'who waits':<40}" * separate
        + "also set",
        *(f"{place:>3} {_row(candidate, phases)}" for place, candidate in enumerate(shown, 1)),
        "",
        MFU_MEANING,
    ]
    if separate:
        scoring = " + those that score" * bool(first.run.scoring)
        lines.append(f"GPUs: those that train{scoring} + those that generate; MFU counts all of them")
    if any(
        machine.gpu_bytes - candidate.memory.peak_bytes < WRONG_BY * candidate.memory.peak_bytes
        for candidate in shown
    ):
        lines.append(
            f"Above {machine.gpu_bytes / (1 + WRONG_BY) / GIB:.0f} GiB it fits narrowly:"
            f" plans of measured runs were wrong by up to {WRONG_BY:.0%}"
        )
    return [
        *lines,
        "",
        "the first:",
        *memory_lines(first.memory, machine),
        *seconds_lines(first.run, first.seconds, first.memory),
    ]


def _refused_lines(result: Search, machine: Machine) -> list[str]:
    """Format the reasons why candidates do not fit."""
    lines = [
        "",
        f"{len(result.refused)} of {result.tried} do not fit {machine.gpu_bytes / GIB:.1f} GiB"
        f" ({machine.name}) with {MARGIN:.0%} to spare, by the first reason:",
    ]
    for cause, group in result.refused_by_cause().items():
        nearest, problem = group[0], group[0].problems[0]
        where = " ".join(
            f"{name}={spelled(value)}"
            for name, value in nearest.settings.items()
            if not name.startswith("critic.") and not name.endswith(".stage_layers")
        )
        lines.append(
            f"  {cause}: {len(group)}; nearest with {problem.needed_bytes / GIB:,.1f} GiB"
            f" of {problem.room_bytes / GIB:,.1f}: {where}"
        )
    return lines


def alternatives(
    config: TrainerConfig, *, world_size: int, machine: Machine, ranks_per_host: int
) -> list[str]:
    """Return recipe lines of the best fitting runs with these models.

    Empty if none fits, or if devices and stages permit no other layout.
    """
    try:
        return recipe_lines(
            search(config, world_size=world_size, machine=machine, ranks_per_host=ranks_per_host)
        )
    except ValueError:
        return []


def recipe_lines(result: Search, count: int = 3) -> list[str]:
    """Return the settings of the best candidates as arguments of verl_megatron.train."""
    return [candidate.line for candidate in result.fitting[:count]]


def comparison_lines(compared: list[Compared]) -> list[str]:
    """Format planned and measured values and the plan's error."""
    lines = [f"{'phase':<16}{'planned':>10}{'measured':>10}{'':<5}{'error':>8}"]
    return lines + [
        f"{each.what:<16}{each.planned:>10.2f}{each.measured:>10.2f} {each.unit:<4}{each.error:>+8.1%}"
        for each in compared
    ]


def _gpus(run: PlannedRun) -> str:
    """Format the GPUs of each kind of world: those that train, score and generate."""
    scoring = sum(len(planned.world.ranks) for planned in run.scoring)
    sizes = [run.world_size, scoring, run.gpus - run.world_size - scoring]
    return "+".join(str(size) for size in sizes if size)


def _row(candidate: Candidate, phases: list[str]) -> str:
    run, time, peak = candidate.run, candidate.seconds, candidate.memory.peak
    rollout = f"{run.replicas} x tp{run.config.rollout.tp}"
    seconds = _cells((f"{time.seconds[phase]:.1f}" for phase in phases), 14)
    rest = " ".join(
        f"{name}={spelled(value)}"
        for name, value in candidate.settings.items()
        if not name.endswith((".layout", ".stage_layers", "rollout.tp"))
    )
    rest += " uneven stages" * bool(candidate.run.actor.layout.stage_layers)
    return (
        f"{run.actor.layout!s:<18}{rollout:<11}{seconds}{time.iteration:>13.1f}{time.mfu():>7.1%}"
        f"{candidate.memory.peak_bytes / GIB:>7.1f}  {peak.fullest:<14}"
        + f"{_gpus(run):<12}{waiting(time):<40}" * is_separate(run.config)
        + rest
    )


def named(kind: RankKind) -> str:
    """Format the ranks of a kind: "rank 3" or "ranks 0-3,8-11"."""
    parts, ranks = [], list(kind.ranks)
    while ranks:
        length = next((i for i in range(1, len(ranks)) if ranks[i] != ranks[0] + i), len(ranks))
        parts.append(f"{ranks[0]}-{ranks[length - 1]}" if length > 1 else f"{ranks[0]}")
        ranks = ranks[length:]
    return f"rank{'s' if len(kind.ranks) > 1 else ''} {','.join(parts)}"
