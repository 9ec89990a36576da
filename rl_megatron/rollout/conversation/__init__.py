"""Conversations whose sampled tokens are never decoded and encoded again."""
