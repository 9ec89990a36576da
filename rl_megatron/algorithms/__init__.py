"""Losses, advantages and what surrounds them: pure torch, no process group, no configuration object.

An algorithm is a row of choices (docs/algorithms.md); every choice is a name in a small table of pure functions.
"""
