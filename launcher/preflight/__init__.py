"""Finds problems of a configuration before any process starts: one file per check, and a table of them in `checks`."""
