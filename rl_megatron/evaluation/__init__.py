"""Measures a policy on sets of problems: figures of several samples a problem, their intervals, and comparisons."""
