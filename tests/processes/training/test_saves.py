"""A checkpoint that is written while training goes on: its moment, kills during it, and which ones are kept.

These tests start processes.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from rl_megatron.digests import misfits
from rl_megatron.training import checkpoints
from tests.unit.training.test_saves import killed_at, write_steps


def test_killed_at_any_moment_of_a_save_a_whole_checkpoint_stands(tmp_path: Path) -> None:
    """The files that a process opens, makes, renames and removes are counted, and it is killed at each of them."""
    found, moment = list[str](), 0
    asyncio.run(write_steps(tmp_path, {3: None}, keep=1))
    while killed_at(tmp_path, moment := moment + 1):
        latest = checkpoints.latest(tmp_path)
        assert latest is not None
        checkpoint = checkpoints.read(latest)
        assert not misfits(latest, checkpoint.files, read=True)
        found.append(f"{checkpoint.state.step}")
        if latest.name == "step_000004":  # begin again from the one before
            shutil.rmtree(tmp_path)
            asyncio.run(write_steps(tmp_path, {3: None}, keep=1))
    assert moment > 15
    assert set(found) == {"3", "4"}
    assert found == sorted(found)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000004"]  # what kills left is gone
