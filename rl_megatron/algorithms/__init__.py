"""Losses, advantages and related functions: pure torch, no process group.

An algorithm is a row of choices (docs/algorithms.md), the ``algorithm`` section of the configuration itself; every
choice is a name in a small table of pure functions, which read their numbers from the section.
"""
