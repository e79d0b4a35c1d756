"""Scores of responses: functions (`functions.py`) run in worker processes (`pool.py`)."""
