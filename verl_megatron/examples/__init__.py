"""Models and data made on the spot: the toy job, and random weights of published shapes."""
