"""Sequence classifiers as rewards: in this process, or on ranks of the run."""
