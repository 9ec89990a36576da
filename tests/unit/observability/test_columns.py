"""Rows of metrics by column against the same rows as they are."""

from __future__ import annotations

import math
import random

import pytest

from rl_megatron.observability.files import JsonValue, finite
from rl_megatron.observability.metrics.columns import MetricColumns

VALUES: tuple[JsonValue, ...] = (0, 0.5, -1e300, None, "learner ep=2", True, 10**400, math.inf, -math.inf, math.nan, 7)


def test_rows_of_any_names_are_read_back_as_numbers_and_none() -> None:
    """More than are put into columns at once, with names that come late, and values that are put into a row later."""
    rng, rows, columns, seen = random.Random(0), list[dict[str, JsonValue]](), MetricColumns(), dict[str, None]()
    for step in range(1500):
        names = [name for at, name in enumerate("abcde") if rng.random() < 0.7 and step > 400 * (at - 1)]
        rows.append({"step": step, **{name: rng.choice(VALUES) for name in names}})
        columns.append(rows[-1])
        seen |= dict.fromkeys(rows[-1])
        if step in (700, 1499):
            seen["late"] = None
            for at in (3, step):
                rows[at]["late"] = float(step)
                columns.put(at, {"late": float(step)})
    wanted = [{name: finite(value) for name, value in row.items()} for row in rows]
    assert [dict(row) for row in columns] == wanted
    assert columns.names == list(seen)
    assert [dict(row) for row in columns[-3:]] == wanted[-3:]
    for name in (*columns.names, "none"):
        assert columns.recorded(name).tolist() == [at for at, row in enumerate(rows) if name in row]
        known = [None if math.isnan(value) else value for value in columns.values(name).tolist()]
        assert known == [row.get(name) for row in wanted]
    with pytest.raises(KeyError):
        columns[0]["late"]
    with pytest.raises(IndexError):
        columns[1500]
