"""What is wrong with a run's settings and folders, found before anything is built."""
