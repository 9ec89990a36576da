"""The picture of the last steps in the report: what is drawn is what the trace says."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from rl_megatron.observability.metrics.writer import MetricsWriter
from rl_megatron.observability.report import write_report
from rl_megatron.observability.timeline import spans
from rl_megatron.observability.timeline.spans import Lane
from rl_megatron.observability.timeline.strip import WIDTH, FromTo, at_once, merged, most_at_once, strip, strip_of_run
from rl_megatron.observability.timeline.trace import TraceEvent, TraceFile
from tests.unit.observability.report_pages import Page, a_run

MS = 1_000_000


def _event(process: str, thread: str, name: str, begin: int, end: int) -> TraceEvent:
    return TraceEvent(process=process, thread=thread, name=name, begin=begin, end=end, said={})


def _drawn(path: str) -> list[tuple[float, float]]:
    return [(float(a), float(b)) for a, b in re.findall(r"M([\d.]+) 0H([\d.]+)V", path)]


def test_rows_have_the_shares_and_places_of_the_traces_spans() -> None:
    """Two steps of 100 ms each: shares by hand. A rank that computes while another waits makes the learner busy."""
    events = [
        *(_event("controller", "steps", f"step {n}", 100_000 * (n - 1), 100_000 * n) for n in (1, 2)),
        _event("controller", "phases", "rollout", 0, 50_000),
        _event("controller", "phases", "train", 50_000, 90_000),
        _event("rank 0 (a)", "calls", "backward", 60_000, 80_000),
        _event("rank 1 (b)", "calls", "backward", 70_000, 90_000),
        _event("rank 1 (b)", "calls", "forward", 70_000, 75_000),  # a part of a call is no work of its own
        _event("rank 1 (b)", "asked by the controller", "backward", 0, 200_000),
        _event("critic rank 0 (c)", "calls", "score", 100_000, 150_000),
        _event("sampling", "request 0", "generate", 0, 100_000),
        _event("sampling", "request 1", "generate", 50_000, 100_000),
        _event("controller", "pushes", "push", 190_000, 999_000),  # goes on after the last step
    ]
    found = strip(events)
    assert found is not None
    assert {row.name: row.busy for row in found.rows} == {
        "controller waits": "45 %",
        "learner": "15 %",
        "critic": "25 %",
        "sampling": "50 %, up to 2",
        "pushes": "5 %",
    }
    rows = {row.name: row for row in found.rows}
    (learner,), (pushes,) = rows["learner"].bars, rows["pushes"].bars
    assert _drawn(learner.path) == [(300, 450)]
    assert _drawn(pushes.path) == [(950, 1000)]
    assert found.steps == [("step 1", 0, 50), ("step 2", 50, 100)]
    assert [name for name, _ in found.key] == ["rollout", "logprobs", "train", "weights"]
    assert strip(events[2:]) is None  # no step has ended


def test_the_time_between_a_stop_and_its_resume_is_not_shown() -> None:
    """Steps of half a second, work in half of each, beside the moment in which a row is written."""

    def steps(numbers: Sequence[int], at: int) -> list[TraceEvent]:
        begins = [(n, at + 505_000 * i) for i, n in enumerate(numbers)]
        spans = [_event("controller", "steps", f"step {n}", begin, begin + 500_000) for n, begin in begins]
        return spans + [_event("rank 0 (a)", "calls", "step", begin, begin + 250_000) for _, begin in begins]

    before, hours = steps((1, 2), 0), 8 * 3600 * 1_000_000
    for resumed in ((3,), (3, 4)):
        after = steps(resumed, hours)
        assert strip(before + after) == strip(after)
    whole = strip(before)
    assert whole is not None
    assert [name for name, *_ in whole.steps] == ["step 1", "step 2"]
    assert whole.rows[0].busy == "50 %"


def test_what_is_in_flight_has_the_area_of_its_intervals() -> None:
    draw = random.Random(3)
    each: list[FromTo] = []
    for _ in range(500):
        begin = draw.uniform(0, WIDTH)
        each.append((begin, min(WIDTH, begin + draw.expovariate(1 / 30))))
    counts = at_once(each)
    assert sum(counts) * WIDTH / len(counts) == pytest.approx(sum(b - a for a, b in each))
    place = 123
    assert most_at_once(each) == max(sum(a <= at < b for a, b in each) for at, _ in each)
    middle = (place + 0.5) * WIDTH / len(counts)
    around = [sum(a <= middle + d < b for a, b in each) for d in (-1.25, 0, 1.25)]
    assert min(around) - 2 <= counts[place] <= max(around) + 2


@pytest.mark.parametrize(
    ("each", "union"),
    [
        ([(5, 7), (1, 2)], [(1, 2), (5, 7)]),
        ([(1, 9), (2, 3), (4, 10)], [(1, 10)]),
        ([(1, 2), (2.4, 3)], [(1, 3)]),  # nearer than can be drawn
    ],
)
def test_bars_are_the_union(each: Sequence[FromTo], union: Sequence[FromTo]) -> None:
    assert merged(each) == union


def test_the_page_of_one_run_has_it_and_a_comparison_has_not(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "a")
    assert strip_of_run(folder) is None
    requests = [(Lane("sampling", f"request {n}"), "generate", n * MS, (4 - n) * MS, None) for n in (0, 1)]
    TraceFile(folder).append([*requests, (spans.STEPS, 'step <1> "x"', 0, 4 * MS, None)])
    page = Page(write_report([folder], tmp_path / "r.html"))
    labels = [a.get("aria-label") or "" for tag, a in page.tags if tag == "section"]
    assert len(labels) == 1
    assert labels[0].startswith('step <1> "x" to step <1> "x"')
    assert "sampling: 100 %, up to 2" in labels[0]
    assert 'step <1> "x"' in page.text
    both = Page(write_report([folder, a_run(tmp_path / "b")], tmp_path / "both.html"))
    assert "section" not in {tag for tag, _ in both.tags}


def test_beside_it_the_page_says_what_was_idle(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "a", steps=2)
    TraceFile(folder).append([(spans.STEPS, "step 8", 0, 4 * MS, None)])
    assert "waited for groups" not in Page(write_report([folder], tmp_path / "r.html")).text
    writer = MetricsWriter(folder)
    for step, idle in ((3, 0.9), (4, 0.1), (5, 0.2), (6, 0.2), (7, 0.3)):  # the last four count
        shares = {"idle/learner_fraction": idle, "idle/engine_fraction": 0.5, "overlap/stretch": 1.25}
        writer.write({"phase": "rl", "step": step, "seconds/step": 1.0, **shares})
    writer.close()
    said = (
        "the learner waited for groups for 20 % of the time, 50 % of the servers' slots were unused, a step took 1.25"
    )
    assert said in Page(write_report([folder], tmp_path / "r.html")).text
