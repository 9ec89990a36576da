"""Formats in which models write reasoning and calls of tools: one file each, which do not import each other."""
