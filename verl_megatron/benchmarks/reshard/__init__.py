"""The reshard against the link's own rates and other methods."""
