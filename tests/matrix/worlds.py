"""Ranks that are asked for one thing after another."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.forks import FORKS

LIMIT = 600.0  # seconds for one answer


class Worlds:
    """As many ranks as were ever asked. After a failure all end."""

    def __init__(self) -> None:
        self._ranks: list[tuple[Any, Connection]] = []

    def call(self, size: int, function: Callable[..., Any], *arguments: Any) -> Callable[[], list[Any]]:
        """Asks ``size`` ranks for ``function(rank, *arguments)``, after what they were asked before. What is returned
        waits for their answers, in the same order, and raises AssertionError with the traceback of the first rank that
        failed: others wait for it."""
        for rank in range(len(self._ranks), size):
            ours, theirs = FORKS.Pipe()
            process = FORKS.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))
        asked = self._ranks[:size]
        for _, pipe in asked:
            pipe.send((function, arguments))
        return lambda: self._answers({pipe: rank for rank, (_, pipe) in enumerate(asked)})

    def _answers(self, ranks: Mapping[Any, int]) -> list[Any]:
        found = dict[int, Any]()
        while pipes := [pipe for pipe, rank in ranks.items() if rank not in found]:
            try:
                ready = wait(pipes, LIMIT)
                assert ready, f"ranks {[ranks[pipe] for pipe in pipes]} have not answered in {LIMIT:.0f} s"
                for pipe in ready:
                    found[ranks[pipe]], error = pipe.recv()
                    assert error is None, f"rank {ranks[pipe]}: {error}"
            except (AssertionError, EOFError):
                self.close()
                raise
        return [found[rank] for rank in ranks.values()]

    def close(self) -> None:
        """Ends the ranks."""
        for process, pipe in self._ranks:
            process.kill()
            process.join()
            pipe.close()
        self._ranks.clear()


def _serve(rank: int, pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    import rl_megatron.learner.megatron  # noqa: F401  makes megatron run here: before its functions are bound

    while True:
        function, arguments = pipe.recv()
        try:
            pipe.send((function(rank, *arguments), None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))
            raise
