"""`verl_megatron.train` with a rank that is killed or hangs at given moments of each attempt.

KILLS names a JSON list of {"rank", "operation", "entry", "delay_s"}. In attempt k of the launcher the rank
gets SIGKILL, or the signal of that name, `delay_s` after it begins that operation (as the watchdog calls it)
for the `entry`-th time; it hangs where delay_s is null. KILLS.log records where it was.
"""

import contextlib
import json
import os
import signal
import threading
import time
from pathlib import Path

from parallel.runtime.watchdog import Watchdog
from verl_megatron.launch.command_line import run_command
from verl_megatron.train import main


def arm(kills: Path) -> None:
    """Make this process end by itself where the list says so."""
    moments, attempt = json.loads(kills.read_text()), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if attempt >= len(moments) or moments[attempt]["rank"] != int(os.environ["RANK"]):
        return
    moment, usual, entries = moments[attempt], Watchdog.operation, []

    @contextlib.contextmanager
    def operation(self: Watchdog, name: str, **options):
        with usual(self, name, **options):
            entries.extend([name] * (name == moment["operation"]))
            if name == moment["operation"] and len(entries) == moment["entry"]:
                number = signal.Signals[moment.get("signal", "SIGKILL")]
                struck(self, moment["delay_s"], number, kills.with_suffix(".log"))
            yield

    Watchdog.operation = operation


def struck(watchdog: Watchdog, delay_s: float | None, number: int, log: Path) -> None:
    if delay_s is not None:
        threading.Thread(target=end, args=(watchdog, delay_s, number, log), daemon=True).start()
        return
    note(watchdog, log)
    threading.Event().wait()


def end(watchdog: Watchdog, delay_s: float, number: int, log: Path) -> None:
    time.sleep(delay_s)
    note(watchdog, log)
    os.kill(os.getpid(), number)


def note(watchdog: Watchdog, log: Path) -> None:
    with log.open("a") as file:
        file.write(f"{watchdog._position.operation} {watchdog.iteration}\n")


if __name__ == "__main__":
    arm(Path(os.environ["KILLS"]))
    run_command(main)
