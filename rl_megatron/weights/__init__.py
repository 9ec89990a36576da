"""Moves weights between layouts: a table per family, one plan for every direction, transports that execute it."""
