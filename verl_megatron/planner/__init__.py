"""Planner: memory and time of a run predicted from its settings, without GPU or weights, in seconds.

`report` formats a plan, `check_fits` rejects runs that do not fit, `search` ranks layouts.
"""

from verl_megatron.planner.comparison import compare
from verl_megatron.planner.machine import MACHINES, Machine, find_machine
from verl_megatron.planner.memory import plan_memory
from verl_megatron.planner.planned_run import PlannedRun
from verl_megatron.planner.preflight import check_fits, machine_here
from verl_megatron.planner.rollout.lengths import Lengths
from verl_megatron.planner.rollout.serving import kv_bytes_per_token
from verl_megatron.planner.search import search
from verl_megatron.planner.seconds import plan_seconds
from verl_megatron.planner.splits import search_splits
from verl_megatron.planner.supervised import check_supervised_fits, supervised_report
from verl_megatron.planner.text import comparison_lines, report, samples_together, search_text

__all__ = [
    "MACHINES",
    "PlannedRun",
    "Lengths",
    "Machine",
    "check_fits",
    "check_supervised_fits",
    "compare",
    "comparison_lines",
    "find_machine",
    "kv_bytes_per_token",
    "machine_here",
    "plan_memory",
    "plan_seconds",
    "report",
    "samples_together",
    "search",
    "search_splits",
    "search_text",
    "supervised_report",
]
