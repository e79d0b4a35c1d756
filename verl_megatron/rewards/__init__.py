"""Rewards: functions (`functions.py`) that run in worker processes (`pool.py`, `worker.py`).

Each worker runs in a sandbox (`sandbox.py`), and each program that `code/` scores in a stricter one.
"""
