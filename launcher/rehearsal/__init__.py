"""Rehearses a run on its own nodes: checks each node and link, then runs the real commands, and compares."""
