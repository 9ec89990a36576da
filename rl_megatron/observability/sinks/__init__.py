"""Sinks of a run's metrics besides metrics.jsonl, one file each; entry points of the group ``rl_megatron.sinks``."""
