"""The tables of model families: a row per parameter, for every system that holds it."""
