"""The save of a learner in this process, as `interfaces.Saving`, and saves whose writing waits."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rl_megatron.digests import Digest, Written, digests

FILES = {f"__{i}_0.distcp": bytes(range(i, 200 + i)) * 400 for i in range(5)}


@dataclass
class Ended:
    """A save whose files were written before it was returned."""

    files: Mapping[str, Digest]
    seconds: float = 0.5

    async def written(self, *, wait: bool = False) -> bool:
        return True

    async def durable(self) -> Written:
        return Written(files=self.files, seconds=self.seconds)


@dataclass
class Shards:
    """A learner whose ranks write the files of ``content``."""

    content: Mapping[str, bytes] = field(default_factory=lambda: FILES)
    saves: int = 0

    async def save(self, folder: Path) -> Ended:
        self.saves += 1
        for name, data in self.content.items():
            (folder / name).write_bytes(data)
        return Ended(digests(folder, self.content))


def hold_back() -> threading.Event:
    """Until it is set, saves that this process starts are copied, but neither gathered nor written."""
    from rl_megatron.learner.checkpoint.saving import ShardSave

    ShardSave._latest = go = threading.Event()
    return go


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """As `hold_back`, until the end of the block."""
    go = hold_back()
    try:
        yield
    finally:
        go.set()
