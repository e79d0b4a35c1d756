"""Scores of responses: functions (`functions.py`) run in worker processes (`pool.py`, `worker.py`) that a sandbox keeps apart (`sandbox.py`)."""
