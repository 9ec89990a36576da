"""Turns files into prompts: reads problems, finds those that are there twice, and draws them in shares."""
