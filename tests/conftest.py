"""What every test shares: property tests that try the same examples each time and are not timed on a busy machine."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")
