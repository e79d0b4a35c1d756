"""What a weight sync between two layouts would move: cases, memory, report and picture."""
