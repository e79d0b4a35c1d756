"""`verl-megatron plan`: its options, the settings of a plan, and what is printed."""
