"""Turns problems into batches: prompts (problems/), tokens shifted into samples, samples packed into micro-batches."""
