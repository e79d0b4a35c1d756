"""What a run would read of its data files."""
