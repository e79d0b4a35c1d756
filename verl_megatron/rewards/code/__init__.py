"""The reward `code`: programs of responses, run in a sandbox against the tests of their row."""
