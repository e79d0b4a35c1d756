"""Writes the report of one or several runs as one HTML file, and prints their alarms.

Several runs share the plots. A run's folder has metrics.jsonl, which run.track_metrics=[jsonl] writes.
"""

from pathlib import Path

from verl_megatron.launch.options import Options, check_output

EXAMPLES = ("outputs/toy/ppo", "outputs/toy/ppo outputs/toy/grpo --output compared.html")


def run(arguments: list[str]) -> None:
    """Write the report that the arguments ask for.

    Raises:
        ValueError: a folder is none of a run, the file cannot be written, or plotly is not installed.
    """
    options = Options(prog="verl-megatron report", description=__doc__, examples=EXAMPLES)
    options.add_argument("folders", nargs="+", metavar="DIR", help="run.output_dir of a run")
    options.add_argument(
        "--output", metavar="FILE", help="by default report.html in DIR, or here for several"
    )
    given = options.parse_args(arguments)
    if given.output is not None:
        check_output("--output", given.output, is_replaced=True)
        if not given.output.endswith(".html"):  # such as the metrics of a run
            raise ValueError(f"--output {given.output} must end in .html; rename it")
    from verl_megatron.observe.report.alarms import find_alarms, iterations_of
    from verl_megatron.observe.report.page import REPORT_FILE, with_own_names, write_report
    from verl_megatron.observe.report.record import read_run

    runs = with_own_names([read_run(folder) for folder in given.folders])
    default = Path(given.folders[0]) / REPORT_FILE if len(runs) == 1 else Path(REPORT_FILE)
    path = Path(given.output) if given.output else default
    try:
        write_report(path, runs)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be written ({error.strerror}); name another file with --output"
        ) from None
    for record in runs:
        for alarm in find_alarms(record):
            print(f"{record.name}: {alarm.name}, {iterations_of(alarm)}: {alarm.text}")
    print(f"wrote {path}")
