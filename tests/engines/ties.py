"""Near ties between experts: where two router logits are equal but for rounding, an engine may choose either."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

NEAR = 1e-4  # of logits of some tenths; in 1,500 completions SGLang once chose the other expert, at a gap of 5e-7
CLOSE = 2e-5  # nats: where both choose the same experts, log-probs of an engine and of transformers differ by 1e-6
GAIN = 0.95  # the other side of a tie is the engine's if the sum of all distances falls below this part of itself

Tie = tuple[int, int]
"""The number of a router's call, and the row of its logits."""


def nearest(models: Sequence[Any], compute: Callable[[], Tensor], said: Tensor, part: slice = slice(None)) -> Tensor:
    """What ``compute`` gives by ``models``, with near ties broken, one after the other, so that ``part`` of it comes
    nearest to ``said``."""

    def broken(flipped: Sequence[Tie]) -> tuple[float, Tensor, list[Tie]]:
        """The sum of distances, what was computed, and the near ties that this met."""
        ties: list[Tie] = []
        with _routing(models, flipped, ties):
            found = compute()
        return float((found[part] - said[part]).abs().sum()), found, ties

    flipped: tuple[Tie, ...] = ()
    total, found, ties = broken(flipped)
    while len(found[part]) and (found[part] - said[part]).abs().max() > CLOSE:
        others = [((*flipped, tie), *broken((*flipped, tie))) for tie in ties if tie not in flipped]
        best = min(others, key=lambda other: other[1], default=None)
        if best is None or best[1] > GAIN * total:
            break
        flipped, total, found, ties = best
    return found


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
