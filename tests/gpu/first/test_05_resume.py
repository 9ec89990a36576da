"""What one process saved, a new one goes on with. 40 seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu import branch
from tests.gpu.differences import largest
from tests.gpu.machine import Machine, note

pytestmark = pytest.mark.gpu


KEYS = {"float32": branch.FLOAT32, "bfloat16": branch.BFLOAT16}


def test_two_more_steps_are_those_of_the_process_that_saved(machine: Machine, tmp_path: Path) -> None:
    calls = {
        f"{dtype} {again}": (branch.resumed_main, keys, tmp_path / f"saved-{dtype}", again)
        for dtype, keys in KEYS.items()
        for again in (False, True)
    }
    seen = machine.seen(tmp_path, calls)
    for dtype in KEYS:
        went_on, resumed = ([x for step in seen[f"{dtype} {again}"]["steps"] for x in step] for again in (False, True))
        error = largest(a / b - 1 for a, b in zip(resumed, went_on, strict=True))
        note(f"resumed, {dtype}", "equal to the bit" if resumed == went_on else f"{error:.1e}")
        assert error < 1e-6
