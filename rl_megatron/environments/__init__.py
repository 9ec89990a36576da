"""Environments of several turns for the model: the Protocol, the shipped ones, and the lookup of custom ones."""
