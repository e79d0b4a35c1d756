"""Checks of settings and folders, before anything is built."""
