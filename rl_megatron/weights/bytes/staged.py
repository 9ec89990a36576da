"""The host's memory that copies of a state wait in until they are written, kept for the next time."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor


class Staged:
    """Blocks of exactly as many bytes as were asked for, which each round of `take` gives out again.

    They are pinned where there is CUDA, by registering them: torch's own pinned memory is rounded up to powers of two.
    """

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []
        self._given = 0
        weakref.finalize(self, _drop, self._blocks, 0)

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.nbytes for block in self._blocks)

    def begin(self) -> None:
        """Begin a round: all blocks are free again, and what they hold is written over."""
        self._given = 0

    def take(self, num_bytes: int) -> Tensor:
        """The next block [num_bytes], uint8: that of the round before, if it asked for as many bytes here.

        Raises RuntimeError with CUDA's error where memory cannot be pinned.
        """
        at = self._given
        if at == len(self._blocks) or self._blocks[at].nbytes != num_bytes:
            _drop(self._blocks, at)  # another state than before: nothing after it fits
            self._blocks.append(_block(num_bytes))
        self._given += 1
        return self._blocks[at]


def _block(num_bytes: int) -> Tensor:
    block = torch.empty(num_bytes, dtype=torch.uint8)
    if num_bytes and torch.cuda.is_available():
        error = int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), num_bytes, 0))
        if error:
            raise RuntimeError(f"CUDA cannot pin {num_bytes} bytes of the host's memory: error {error}")
    return block


def _drop(blocks: list[Tensor], first: int) -> None:
    for block in blocks[first:] if torch.cuda.is_available() else ():
        if block.nbytes:
            torch.cuda.cudart().cudaHostUnregister(block.data_ptr())
    del blocks[first:]
