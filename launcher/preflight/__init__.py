"""Finds problems of a configuration before any process starts: its checks, and a table of them in `checks`."""
