"""The models of a run: one engine, and what each role asks of it."""
