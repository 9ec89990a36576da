"""One model for all tests of this folder."""

from __future__ import annotations

import pytest

from tests.unit.diagnosis.rig import Policy


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return Policy.make(tmp_path_factory.mktemp("model"))
