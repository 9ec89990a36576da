"""The save of a learner in this process, as `interfaces.SaveHandle`, saves whose writing waits, and a job that saves
it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from rl_megatron.digests import Digest, SaveDigests, digests
from rl_megatron.interfaces import Learner
from rl_megatron.observability.recorder import Stopwatch
from rl_megatron.training.checkpoints import TrainerState

FILES = {f"__{i}_0.distcp": bytes(range(i, 200 + i)) * 400 for i in range(5)}


@dataclass
class Ended:
    """A save whose files were written before it was returned."""

    files: Mapping[str, Digest]
    seconds: float = 0.5

    async def is_written(self, *, wait: bool = False) -> bool:
        return True

    async def finalize(self) -> SaveDigests:
        return SaveDigests(files=self.files, seconds=self.seconds)


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


def read_back(shards: Path) -> dict[str, Any]:
    """Whole tensors by name, as torch reads them, and what belongs to no shard, by its place."""
    import rl_megatron.learner.megatron  # noqa: F401, I001  before megatron is imported
    from megatron.core import dist_checkpointing
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
    from torch.utils._pytree import keystr, tree_leaves_with_path

    common = dist_checkpointing.load_common_state_dict(shards)
    assert common
    return _load_state_dict_from_keys(checkpoint_id=shards) | {
        f"common{keystr(path)}": leaf for path, leaf in tree_leaves_with_path(common)
    }


def assert_same_state(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Of what `read_back` gave: equal to the bit."""
    import torch

    assert one.keys() == other.keys()
    for name, value in one.items():
        same = torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        assert same, name


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


@dataclass
class Failing:
    """A job whose steps end with the errors of ``errors``, by number, and whose learner is ``shards``."""

    errors: dict[int, BaseException]
    until: dict[int, Callable[[], object]] = field(default_factory=dict)  # steps that last until something is true
    shards: Shards = field(default_factory=Shards)
    first_step_is_saved: bool = False
    name: str = "failing"
    done: int = 0

    async def start(self, *, fresh: bool) -> None:
        """Nothing to prepare."""

    async def step(self, number: int, watch: Stopwatch) -> dict[str, Any]:
        async with asyncio.timeout(30):
            while number in self.until and not self.until[number]():
                await asyncio.sleep(0.001)
        if number in self.errors:
            raise self.errors[number]
        self.done = number
        return {"step": number}

    async def evaluate(self, watch: Stopwatch) -> dict[str, Any]:
        return {}

    def should_stop(self, row: object) -> bool:
        return False

    def state(self) -> TrainerState:
        return TrainerState(step=self.done, prompts={"epoch": 0, "next": 8}, stream=None)

    def learners(self) -> dict[str, Learner]:
        return {"learner": cast(Learner, self.shards)}

    async def flush(self, stop: asyncio.Event) -> None:
        """Nothing is under way."""

    async def close(self) -> None:
        """Nothing goes on."""
