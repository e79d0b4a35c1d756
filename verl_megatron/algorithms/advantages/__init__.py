"""Advantages: one file for each algorithm; `estimators` has what they share."""
