"""What charts give the page's script: lines that are thinned and short, and stacked bars."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from rl_megatron.observability.charts import (
    MAX_BARS,
    MAX_MEANS,
    MAX_POINTS,
    Chart,
    Series,
    averaged,
    readable_unit,
    stacked_bars,
)


def a_line(values: list[float | None], **bands: NDArray[np.float64]) -> Series:
    y = np.array([math.nan if v is None else v for v in values])
    return Series(name="a", style=0, x=np.arange(1.0, len(y) + 1), y=y, **bands)


def drawn_line(*values: float | None) -> dict[str, Any]:
    series: Any = Chart(title="t", unit="", series=[a_line([*values])]).data["series"]
    (line,) = series
    return dict(line)


def test_a_null_breaks_a_line_and_numbers_are_short() -> None:
    line = drawn_line(1.0, None, 1 / 3, 20000.4, 123_456_789.0, 1.23456789e12)
    assert json.dumps(line["y"]) == "[1, null, 0.333333, 20000.4, 123456789, 1234570000000.0]"
    assert line["x"] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("values", "unit", "shown"),
    [([61e9, None, 68.4e9], "GB", [61, 68.4]), ([0.0, 2e6], "MB", [0, 2]), ([0.0, 12.0], "bytes", [0, 12])],
)
def test_bytes_are_in_the_largest_unit(values: list[float | None], unit: str, shown: list[float]) -> None:
    given, (line,) = readable_unit("bytes", [a_line(values, high=np.full(len(values), 2e9))])
    assert (given, [y for y in line.y.tolist() if y == y]) == (unit, shown)
    assert line.low is None
    assert line.high is not None
    assert line.high.tolist() == pytest.approx([2e9 * shown[-1] / (values[-1] or 1)] * len(values))
    assert readable_unit("s", [line]) == ("s", [line])


def test_long_runs_are_thinned_without_losing_spikes_or_ends() -> None:
    values: list[float | None] = [float(i % 7) for i in range(20_000)]
    values[7_777], values[12_345] = 100.0, -50.0
    line = drawn_line(*values)
    shown = dict(zip(line["x"], line["y"], strict=True))
    assert len(shown) <= MAX_POINTS + 2
    assert (shown[7778], shown[12346]) == (100, -50)
    assert {1, 20000} <= shown.keys()
    straight = drawn_line(*map(float, range(1, 1001)))
    before = [0, *straight["x"][:-1]]
    assert straight["mean"] == [(a + 1 + b) / 2 for a, b in zip(before, straight["x"], strict=True)]


def test_lines_of_one_chart_are_thinned_at_the_same_places() -> None:
    """So that the values of all are read at one step; each keeps its spike and its band."""
    one, two = (a_line([0.0] * 3000), a_line([1.0] * 2000, low=np.zeros(2000), high=np.arange(2000.0)))
    one.y[1000], two.y[1500] = 9.0, 8.0
    series: Any = Chart(title="t", unit="", series=[one, two]).data["series"]
    longer, shorter = series
    assert len(longer["x"]) <= MAX_POINTS + 4
    assert [x for x in longer["x"] if x <= 2000] == shorter["x"]
    assert (longer["y"][longer["x"].index(1001)], longer["y"][longer["x"].index(1501)]) == (9, 0)
    assert (shorter["y"][shorter["x"].index(1001)], shorter["y"][shorter["x"].index(1501)]) == (1, 8)
    assert shorter["high"] == [x - 1 for x in shorter["x"]]


def test_among_many_lines_a_value_is_the_mean_of_several_steps() -> None:
    x, y = np.array([-0.5, *range(1000)]), np.array([9.0, *(n % 2 for n in range(1000))])
    places, means, each = averaged(x, y)
    assert (places[0], means[0], each) == (-0.5, 9, 10)
    assert (len(means), set(means[1:].tolist())) == (1 + MAX_MEANS, {0.5})
    assert places[2] == 14.5  # of steps 10 to 19
    few = averaged(x[:101], y[:101])
    assert (few[0].tolist(), few[1].tolist(), few[2]) == (x[:101].tolist(), y[:101].tolist(), 1)
    gap = averaged(x[1:], np.array([math.nan] * 15 + [1.0] * 985))[1].tolist()
    assert (math.isnan(gap[0]), gap[1], gap[2]) == (True, 1.0, 1.0)


def test_stacked_bars_average_their_steps_and_the_first_part_lies_lowest() -> None:
    chart = stacked_bars("t", "s", np.array([1.0, 2.0]), [("a", np.array([1.0, 2.0])), ("b", np.array([3.0, 2.0]))])
    assert [(line.name, line.y.tolist()) for line in chart.series] == [("b", [3, 2]), ("a", [1, 2])]
    (line,) = stacked_bars("t", "s", np.arange(1.0, 1001), [("a", np.arange(1000.0))]).series
    assert len(line.y) <= MAX_BARS
    assert (line.x[0], line.y[0], line.each) == (9, 8, 17)  # steps 1 to 17
    assert line.y[-1] == 992.5  # of the last 14 steps


def test_parts_that_took_no_time_are_not_named_and_the_others_keep_their_colours() -> None:
    parts = [("a", np.array([1.0, 2.0])), ("none", np.zeros(2)), ("b", np.array([0.0, 2.0]))]
    chart = stacked_bars("t", "s", np.array([1.0, 2.0]), parts)
    assert [(line.name, line.style) for line in chart.series] == [("b", 2), ("a", 0)]


@given(st.lists(st.one_of(st.none(), st.floats(-1e12, 1e12, allow_subnormal=False)), min_size=1, max_size=900))
def test_every_line_keeps_its_ends_and_extremes_as_json(values: list[float | None]) -> None:
    line = json.loads(json.dumps(drawn_line(*values), allow_nan=False))
    known, shown = ([v for v in of if v is not None] for of in (values, line["y"]))
    assert (line["x"][0], line["x"][-1]) == (1, len(values))
    if known:
        assert (min(shown), max(shown)) == pytest.approx((min(known), max(known)), rel=1e-5)
    band: Any = Chart(title="t", unit="", series=[a_line([1.0], low=np.array([-math.inf]))]).data["series"]
    assert band[0]["low"] == [None], "which is no JSON"


@pytest.mark.parametrize(
    ("values", "given", "shown"),
    [([1.0, 10.0], {}, False), ([1.0, 9.0], {}, None), ([0.0, 10.0], {}, None), ([1.0, 10.0], {"log": True}, True),
     ([1.0, 10.0], {"limits": (0.0, 1.0)}, None)],
)  # fmt: skip
def test_positive_lines_of_ten_times_offer_a_logarithmic_axis(
    values: list[float | None], given: dict[str, Any], shown: bool | None
) -> None:
    assert Chart(title="t", unit="", series=[a_line(values)], **given).data["log"] is shown
