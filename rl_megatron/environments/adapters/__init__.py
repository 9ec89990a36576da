"""Environments of other libraries, a file each."""
