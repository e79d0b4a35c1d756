"""Programs that time parts of a run, or all of it: `verl-megatron benchmark NAME`."""
