"""One file a model family: a row per parameter, for every system that holds it."""
