"""The tables of model families, a file each: a row per parameter, for every system that holds it."""
