"""What a killed run left in a node's memory goes with the next run there; what a living one has stays."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rl_megatron.errors import SyncError
from rl_megatron.weights.servers import leftovers
from rl_megatron.weights.servers.leftovers import await_free, in_use, remove_abandoned

HOLD = "import sys\nfrom pathlib import Path\nfrom rl_megatron.weights.servers.leftovers import in_use\n" + (
    "with in_use(Path(sys.argv[1])):\n    print('held', flush=True)\n    sys.stdin.read()\n"
)


def test_what_a_killed_run_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    names = ("rl_megatron-dead", "rl_megatron-alive", "rl_megatron-mine", "rl_megatron-no_lock", "other-dead")
    dead, alive, mine, no_lock, other = (tmp_path / name for name in names)
    for folder in (dead, alive, mine, no_lock, other):
        folder.mkdir()
        (folder / "model.safetensors").write_text("weights")
    held = {folder: hold(folder) for folder in (dead, alive, other)}
    try:
        with in_use(mine):
            remove_abandoned(mine)
            assert all(folder.exists() for folder in (dead, alive, mine, no_lock, other))
            for folder in (dead, other):
                held[folder].send_signal(signal.SIGKILL)
                held[folder].wait()
            remove_abandoned(mine)
            assert [f.exists() for f in (dead, alive, mine, no_lock, other)] == [False, True, True, True, True]
        with in_use(mine):  # the same run again
            remove_abandoned(dead)
            assert mine.exists()
    finally:
        for process in held.values():
            process.communicate()


def test_a_folder_that_another_run_uses_is_not_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of one in another container that shares /dev/shm, and has its run's folder under the same path."""
    await_free(tmp_path)
    held = hold(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(leftovers, "_ENDING_SECONDS", 0.0)
        with pytest.raises(SyncError, match=rf"{tmp_path} has weights of a run that goes on.* run\.name, run\.dir or"):
            await_free(tmp_path)
    held.send_signal(signal.SIGKILL)  # an earlier start that ends meanwhile
    await_free(tmp_path)
    held.communicate()


def hold(folder: Path) -> subprocess.Popen[str]:
    """A process that holds a folder's lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process
