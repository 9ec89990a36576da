"""Diagnoses why an engine's log-probs differ from the learner's: experiments with both, and conclusions."""
