"""Losses, advantages and related functions: pure torch, no process group.

An algorithm is a row of choices (docs/algorithms.md): the ``algorithm`` section of the configuration. Each choice names
a pure function in a small table; the functions read their numbers from the section.
"""
