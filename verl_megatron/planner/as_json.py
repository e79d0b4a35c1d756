"""Plans as JSON."""

from dataclasses import asdict

from verl_megatron.planner.machine import Machine
from verl_megatron.planner.search.candidates import Candidate, Search


def as_json(result: Search, machine: Machine) -> dict:
    """Return all candidates that fit, and the reasons against the others; bytes and seconds."""
    causes = {}
    for cause, group in result.refused_by_cause().items():
        causes[cause] = {
            "candidates": len(group),
            "nearest": {"settings": group[0].settings, "problem": asdict(group[0].problems[0])},
        }
    return {
        "machine": asdict(machine),
        "fitting": [_candidate(candidate) for candidate in result.fitting],
        "refused": causes,
    }


def _candidate(candidate: Candidate) -> dict:
    memory, time = candidate.memory, candidate.seconds
    return {
        "settings": candidate.settings,
        "line": candidate.line,
        "iteration_seconds": time.iteration,
        "seconds": time.seconds,
        "model_flops": time.flops,
        "mfu": time.mfu(),
        "peak_bytes": memory.peak_bytes,
        "fullest_phase": memory.peak.fullest,
        "host_bytes": memory.host_bytes,
        "kv_cache_bytes": memory.kv_cache_bytes,
        "memory": [{"ranks": kind.ranks, "phases": kind.phases} for kind in memory.kinds],
    }
