"""Points to paths: places checked against straight-line arithmetic of their own."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_megatron.observability.charts import (
    BOTTOM,
    LEFT,
    MAX_BARS,
    MAX_MEANS,
    MAX_POINTS,
    RIGHT,
    TOP,
    Chart,
    Point,
    Series,
    averaged,
    line_chart,
    number_text,
    stacked_bars,
)


def _points(values: list[float | None], first: int = 1) -> list[Point]:
    return [Point(x=first + i, y=v, label=f"step {first + i}") for i, v in enumerate(values)]


def _chart(values: list[float | None], **kwargs: tuple[float, float]) -> Chart:
    return line_chart("t", "", [Series(label="a", style=0, points=_points(values))], **kwargs)


def test_a_line_goes_from_the_left_to_the_right_and_up_with_its_values() -> None:
    chart = _chart([0.0, 0.5, 1.0], limits=(0.0, 1.0))
    middle = ((LEFT + RIGHT) / 2, (TOP + BOTTOM) / 2)
    assert chart.marks[0].path == f"M{LEFT} {BOTTOM}L{middle[0]} {middle[1]}L{RIGHT} {TOP}"


def test_a_null_breaks_the_line_and_a_lone_point_is_a_dot() -> None:
    path = _chart([1.0, None, 2.0, None, 3.0, 4.0]).marks[0].path
    assert re.sub(r"[\d. ]", "", path) == "MhMhML"


def test_the_warm_start_has_a_fifth_of_the_width_however_long_it_was() -> None:
    warm = [Point(x=i / 1000 - 1, y=0.1, label="") for i in range(0, 1001, 100)]
    chart = line_chart("t", "", [Series(label="a", style=0, points=[*warm, *_points([0.5] * 10)])])
    assert chart.warm_end == pytest.approx(LEFT + 0.2 * (RIGHT - LEFT))
    xs = [x for x, _, _ in chart.hover]
    assert (xs[0], xs[10], xs[-1]) == (LEFT, chart.warm_end, RIGHT)
    assert _chart([0.5]).warm_end is None


@pytest.mark.parametrize(
    ("values", "unit", "ticks", "told"),
    [
        ([61e9, None, 68.4e9], "GB", {"62", "64", "66", "68"}, ["61", "68.4"]),
        ([0.0, 2e6], "MB", {"0", "0.5", "1", "1.5", "2"}, ["0", "2"]),
        ([0.0, 12.0], "bytes", {"0", "5", "10"}, ["0", "12"]),
    ],
)
def test_bytes_are_in_the_largest_unit(values: list[float | None], unit: str, ticks: set[str], told: list[str]) -> None:
    chart = line_chart("t", "bytes", [Series(label="a", style=0, points=_points(values))])
    assert (chart.unit, {tick.text for tick in chart.y_ticks}) == (unit, ticks)
    assert [text for *_, ((_, _, text),) in chart.hover] == told


def test_a_band_beyond_the_limits_ends_at_the_frame() -> None:
    points = [Point(x=x, y=0.9, label="", low=-0.3, high=2.1) for x in (0, 1)]
    band, _ = line_chart("t", "", [Series(label="a", style=0, points=points)], (0.0, 1.0)).marks
    assert band.path == f"M{LEFT} {TOP}L{RIGHT} {TOP}L{RIGHT} {BOTTOM}L{LEFT} {BOTTOM}Z"


def test_a_band_is_closed_around_its_line() -> None:
    points = [Point(x=x, y=0.5, label="", low=0.25, high=0.75) for x in (0, 1)]
    band, line = line_chart("t", "", [Series(label="a", style=0, points=points)], (0.0, 1.0)).marks
    low, high = BOTTOM - 0.25 * (BOTTOM - TOP), BOTTOM - 0.75 * (BOTTOM - TOP)
    assert (band.kind, line.kind) == ("band", "line")
    assert band.path == f"M{LEFT} {high}L{RIGHT} {high}L{RIGHT} {low}L{LEFT} {low}Z"


def test_a_long_run_is_thinned_without_losing_its_spikes_or_ends() -> None:
    values: list[float | None] = [float(i % 7) for i in range(20_000)]
    values[7_777], values[12_345] = 100.0, -50.0
    chart = _chart(values)
    shown = {label: text for _, label, [(_, _, text)] in chart.hover}
    assert len(shown) <= MAX_POINTS + 2
    assert (shown["step 7778"], shown["step 12346"]) == ("100", "-50")
    assert {"step 1", "step 20000"} <= shown.keys()


def test_many_long_lines_are_drawn_by_means_of_their_steps() -> None:
    values = [(-0.5, "warm", 9.0), *((float(x), f"step {x}", float(x % 2)) for x in range(1000))]
    warm, *means = averaged(values)
    assert warm == Point(x=-0.5, y=9.0, label="warm")
    assert len(means) == MAX_MEANS
    assert {p.y for p in means} == {0.5}
    assert means[1] == Point(x=14.5, y=0.5, label="step 10 to step 19, mean")
    assert averaged(values[:101]) == [Point(x=x, y=y, label=label) for x, label, y in values[:101]]
    gap = averaged([(float(x), "", None if x < 10 else 1.0) for x in range(1000)])
    assert [p.y for p in gap[:2]] == [None, 1.0]


def test_stacked_bars_lie_on_one_another_and_average_their_steps() -> None:
    chart = stacked_bars("t", "s", [1, 2], [("a", [1.0, 2.0]), ("b", [3.0, 2.0])])
    tops = [[float(v) for v in re.findall(r"V([\d.]+)h", mark.path)] for mark in chart.marks]
    bottoms = [[float(v) for v in re.findall(r"M[\d.]+ ([\d.]+)V", mark.path)] for mark in chart.marks]
    assert bottoms[0] == [BOTTOM, BOTTOM]
    assert bottoms[1] == tops[0]
    assert tops[1] == [TOP, TOP]
    assert [t for _, _, t in chart.hover[0][2]] == ["3", "1"], "listed as they lie, top first"
    many = stacked_bars("t", "s", list(range(1, 1001)), [("a", [float(i) for i in range(1000)])])
    assert len(many.hover) <= MAX_BARS
    assert many.hover[0][1:] == ("steps 1-17, mean", [(0, many.hover[0][2][0][1], "8")])
    assert many.hover[-1][1].endswith("-1000, mean")


def test_parts_that_took_no_time_are_not_named_and_the_others_keep_their_colours() -> None:
    chart = stacked_bars("t", "s", [1, 2], [("a", [1.0, 2.0]), ("none", [0.0, 0.0]), ("b", [0.0, 2.0])])
    assert chart.names == [("a", 0), ("b", 2)]
    assert [mark.style for mark in chart.marks] == [0, 2]
    assert [chart.names[index][0] for index, _, _ in chart.hover[0][2]] == ["b", "a"]


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [
        (5.47561, 5.47583, ["5.4756", "5.47565", "5.4757", "5.47575", "5.4758"]),
        (0.99990, 0.99999, ["0.9999", "0.99995"]),
        (20000.1, 20000.9, ["20,000.2", "20,000.4", "20,000.6", "20,000.8"]),
        (0.0, 1.0, ["0", "0.5", "1"]),
    ],
)
def test_ticks_have_as_many_digits_as_they_need(low: float, high: float, texts: list[str]) -> None:
    assert [tick.text for tick in _chart([low, high]).y_ticks] == texts


@given(st.lists(st.one_of(st.none(), st.floats(-1e12, 1e12, allow_subnormal=False)), min_size=1, max_size=300))
def test_every_shape_stays_inside_the_frame_with_round_ticks(values: list[float | None]) -> None:
    if all(v is None for v in values):
        return
    chart = _chart(values)
    for x, _, marks in chart.hover:
        assert LEFT <= x <= RIGHT
        assert all(TOP - 0.1 <= y <= BOTTOM + 0.1 for _, y, _ in marks)
    assert all(TOP - 0.1 <= t.at <= BOTTOM + 0.1 for t in chart.y_ticks)
    assert all(LEFT - 0.1 <= t.at <= RIGHT + 0.1 for t in chart.x_ticks)
    assert len(chart.y_ticks) <= 12


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.5, "0.5"), (0.00051, "0.00051"), (3.05e-7, "3.05e-7"), (-2e-5, "-2e-5"), (12345.6, "12,346"),
     (999.94, "999.9"), (1.5e9, "1.5e9")],
)  # fmt: skip
def test_numbers_are_short(value: float, text: str) -> None:
    assert number_text(value) == text
