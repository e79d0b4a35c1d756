"""A rollout without pause (async.buffer=window): iterations train on the groups that are complete."""
