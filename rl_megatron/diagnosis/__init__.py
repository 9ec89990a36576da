"""Why an engine's log-probs are not the learner's: experiments with both, and what their outcomes prove."""
