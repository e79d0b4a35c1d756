"""From files to packed micro-batches: prompts, the batch that flows through an iteration, and where its rows go."""
