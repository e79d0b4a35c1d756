"""Formats of data files, and how a file is recognized."""
