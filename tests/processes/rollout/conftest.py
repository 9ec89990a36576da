"""The fixtures of unit tests of rollouts."""

from tests.unit.rollout.conftest import *  # noqa: F403
