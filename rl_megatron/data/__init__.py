"""Turns problems into batches: reads prompts, shifts tokens into samples, packs samples into micro-batches."""
