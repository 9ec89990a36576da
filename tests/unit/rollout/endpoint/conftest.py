"""One endpoint for each module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.rollout.endpoint.serving import Serving


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    one = Serving()
    yield one
    one.do(one.endpoint.stop())
    one.loop.call_soon_threadsafe(one.loop.stop)
