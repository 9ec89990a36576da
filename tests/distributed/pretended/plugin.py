"""Runs tests of the learner on pretended GPUs, as a plugin: ``pytest -p tests.distributed.pretended.plugin``.

Ranks that tests start by `run_ranks` are on them, and ``learner.device`` is cuda where a test does not name it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.distributed import ranks
from tests.distributed.pretended.ranks import World, run_worlds, set_default


def pytest_configure(config: pytest.Config) -> None:
    """Before tests are imported."""
    set_default("cuda")
    ranks.run_ranks = run_ranks


def run_ranks(main: Callable[..., None], world_size: int, *arguments: Any) -> None:
    """As `tests.distributed.ranks.run_ranks`."""
    run_worlds([World(main=main, size=world_size, arguments=arguments)], default="cuda")
