"""Reward functions: the registered ones, the user's own, servers, models, and weighted sums."""
