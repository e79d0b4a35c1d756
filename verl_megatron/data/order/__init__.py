"""The order in which prompts are drawn: epochs, weights of several sources, and a curriculum."""
