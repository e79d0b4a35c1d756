"""The processes of a run: how they start, notice each other's faults, speak once and leave nothing behind."""
