"""A fuzz of what users hand to a run: right jobs, each spoiled in one way that tells what has to come of it.

    python -m tests.fuzz [--seed 1] [--cases 1000] [--kind data] [--case data:17] [--show]

A kind of input has a file here with `mutations()`, a list of functions (job, rng) -> Case. Case number i of
a kind takes mutation i of the list, shuffled by the seed, and a random generator of its own: a name such as
data:17 stands for the same case whatever runs beside it.
"""
