"""Trajectories of several turns: the user's code in threads of its own, limits, and a source of their groups."""
