"""Near ties between experts: where two router logits are equal but for rounding, an engine may choose either."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, combinations
from typing import Any

import torch
from torch import Tensor

NEAR = 1e-5  # of logits of some tenths, on which engines and transformers agree to 1e-6

Tie = tuple[int, int]
"""The number of a router's call, and the row of its logits."""


def nearest(models: Sequence[Any], compute: Callable[[], Tensor], said: Tensor, part: slice = slice(None)) -> Tensor:
    """What ``compute`` gives by ``models``, with near ties broken so that ``part`` of it is nearest to ``said``."""
    ties: list[Tie] = []
    with _routing(models, (), ties):
        found = [compute()]
    assert len(ties) <= 8, "too many near ties for an oracle"
    for flipped in chain.from_iterable(combinations(ties, n) for n in range(1, len(ties) + 1)):
        with _routing(models, flipped, []):
            found.append(compute())
    return min(found, key=lambda one: float((one[part] - said[part]).abs().max()) if len(one[part]) else 0.0)


@contextmanager
def _routing(models: Sequence[Any], flipped: Sequence[Tie], ties: list[Tie]) -> Iterator[None]:
    """Add the near ties that routers meet to ``ties``; have those that are ``flipped`` choose the other expert."""
    calls = iter(range(10**6))

    def routed(router: Any, given: Any, out: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, chosen = out
        call, k = next(calls), chosen.shape[-1]
        best = logits.topk(k + 1, -1)
        near = best.values[:, k - 1] - best.values[:, k] < NEAR
        ties.extend((call, int(row)) for row in near.nonzero())
        chosen = chosen.clone()
        for row in (row for number, row in flipped if number == call):
            chosen[row] = torch.where(chosen[row] == best.indices[row, k - 1], best.indices[row, k], chosen[row])
        return logits, weights, chosen

    with ExitStack() as stack:
        for model in dict.fromkeys(models):
            for module in model.modules():
                if type(module).__name__ == "Qwen3MoeTopKRouter":
                    stack.enter_context(module.register_forward_hook(routed))
        yield
