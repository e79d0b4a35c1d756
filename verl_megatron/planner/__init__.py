"""Planner: memory and time of a run predicted from its settings, without GPU or weights, in seconds.

`text.report` formats a plan, `preflight.check_fits` rejects runs that do not fit, `search.search` ranks
layouts. Machines and lengths of responses are plain tables, which the command line reads without torch.
"""
