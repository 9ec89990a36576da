"""Servers of equal layouts are compared with the learner's checksums once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rl_megatron.errors import CorruptionError
from rl_megatron.types import ParallelDims
from rl_megatron.weights.checks.compare import Comparison, compare
from rl_megatron.weights.checks.reports import Report, sealed_by
from rl_megatron.weights.servers import trust
from rl_megatron.weights.servers.probe import Probe
from rl_megatron.weights.servers.trust import Trust
from tests.unit.weights.test_served_weights import SHAPES, Both


def test_servers_whose_reports_are_the_same_lists_are_compared_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = list[Sequence[Report]]()

    def counted(*given: Any) -> Comparison:
        compared.append(given[2])
        return compare(*given)

    monkeypatch.setattr(trust, "compare", counted)
    both = Both(tmp_path)
    asyncio.run(both.push(1))
    one, other = (asyncio.run(both.load(both.mirror.path, 1))["it"] for _ in range(2))
    probe = Probe.make(vocab_size=50, max_length=40, temperature=1.0, tolerance=1e-3)
    verifies = Trust(path=both.mirror.path, servers=both, learner=both, dims=ParallelDims(), probe=probe).verify
    sums = sealed_by([both.mirror.sums()], SHAPES)
    same = [replace(report, seconds=9.0) for report in one]
    asyncio.run(verifies(1, {"a": one, "b": same, "c": other}, sums))
    assert compared == [one, other]
    wrong = [replace(one[0], rows=[(*row[:3], row[3] + (row[1] == "norm")) for row in one[0].rows])]
    with pytest.raises(CorruptionError, match="c: its bytes are not those that the learner wrote in norm"):
        asyncio.run(verifies(1, {"a": one, "b": same, "c": wrong}, sums))
