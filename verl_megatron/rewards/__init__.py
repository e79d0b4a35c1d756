"""Scores of responses: functions (`functions.py`) run in worker processes (`pool.py`, `worker.py`), each in a
sandbox (`sandbox.py`).
"""
