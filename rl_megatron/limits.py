"""Limits of sampling, which leave tokens out."""

from __future__ import annotations

from typing import Protocol


class Limited(Protocol):
    """What has limits of sampling: SamplingParams, and sections of a configuration."""

    @property
    def top_p(self) -> float:
        """As in SamplingParams; 1: no limit."""
        ...

    @property
    def top_k(self) -> int:
        """As there; 0: no limit."""
        ...

    @property
    def min_p(self) -> float:
        """As there; 0: no limit."""
        ...


def limits_of(params: Limited) -> dict[str, float]:
    """The limits that leave tokens out, by name."""
    limits = {"top_p": (params.top_p, 1.0), "top_k": (params.top_k, 0), "min_p": (params.min_p, 0.0)}
    return {name: value for name, (value, unlimited) in limits.items() if value != unlimited}
