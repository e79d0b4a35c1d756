"""What all kinds of runs share: locks, SIGTERM, checkpoints, resumption, export."""
