"""Stands in for sgl_kernel, which has no CPU build on PyPI: the one function that SGLang's plain CPU path calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

__version__ = "0.0.0+stand.in"


def assign_req_to_token_pool_cpu(
    rows: Tensor, table: Tensor, starts: Tensor, ends: Tensor, locations: Tensor, *_: object, **__: object
) -> None:
    """Write each request's cache locations into its row of ``table``."""
    at = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = locations[at : at + end - start].to(table.dtype)
        at += end - start


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in")

    return missing
