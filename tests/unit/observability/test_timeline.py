"""The timeline: spans of all processes on one clock, bounded in memory."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from rl_megatron.observability import activity
from rl_megatron.observability.timeline import ranks, spans
from rl_megatron.observability.timeline.ranks import RankTimed
from rl_megatron.observability.timeline.spans import DRIFT, Clock

MS = 1_000_000  # nanoseconds


def test_a_clock_that_is_shifted_is_found_within_its_bound() -> None:
    """Delays of d1 there and d2 back bound it by the truth - d1 and + d2; what is older widens by the drift."""
    theirs = -7_200_000 * MS  # ours = theirs + 7,200 s
    clock = Clock()
    assert (clock.offset, clock.bound) == (0, None)
    clock.exchanged(asked=100 * MS, arrived=theirs + 109 * MS, answered=theirs + 150 * MS, heard=151 * MS)
    aged = DRIFT * 51 * MS
    assert clock.offset == pytest.approx(-theirs + (MS - 9 * MS - aged) / 2, abs=1)
    assert clock.bound == pytest.approx((MS + 9 * MS + aged) / 2, abs=1)
    clock.exchanged(asked=151 * MS, arrived=theirs + 153 * MS, answered=theirs + 160 * MS, heard=190 * MS)
    aged = DRIFT * 39 * MS  # of the call's way of the second, and of the first one's answer, which was faster
    assert clock.offset == pytest.approx(-theirs + (MS + aged - 2 * MS - aged) / 2, abs=1)
    assert clock.bound == pytest.approx((MS + aged + 2 * MS + aged) / 2, abs=1)


def test_no_delays_and_no_drift_bring_it_out_of_its_bound() -> None:
    """1,000 clocks of up to 50 ppm each against ours, delays of any law, ways of which one is always slower."""
    draw = random.Random(5)
    for _ in range(1000):
        rate, offset, at = 1 + draw.uniform(-1, 1) * DRIFT / 2, draw.uniform(-1, 1) * 1e15, 0.0
        slow_there, slow_back = draw.choice([1e5, 1e8]), draw.choice([1e5, 1e8])
        clock = Clock()
        for _ in range(20):
            asked = at + draw.expovariate(1e-9)
            arrived = asked + draw.expovariate(1 / slow_there)
            answered = arrived + draw.expovariate(1e-9)
            heard = at = answered + draw.expovariate(1 / slow_back)
            read = [round((moment - offset) * rate) for moment in (arrived, answered)]
            clock.exchanged(asked=int(asked), arrived=read[0], answered=read[1], heard=int(heard))
            truth = heard - (heard - offset) * rate
            assert clock.bound is not None
            assert abs(clock.offset - truth) <= clock.bound + 2


def test_a_clock_that_was_set_counts_from_then_on() -> None:
    clock = Clock()
    for shift in (0, 60_000 * MS):
        clock.exchanged(asked=MS, arrived=2 * MS - shift, answered=3 * MS - shift, heard=4 * MS)
    assert (clock.offset, clock.bound) == pytest.approx((60_000 * MS, MS), abs=DRIFT * 3 * MS)


def test_a_ranks_calls_have_their_parts_inside_and_are_put_on_the_controllers_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rank's clock runs 5 s before ours; each message takes 2 ms."""
    spans.taken()
    at = 5_000 * MS
    monkeypatch.setattr(spans, "now", lambda: at)
    activity.begin("backward", 3)
    for micro_batch in ("1 of 2", "2 of 2"):
        for part in ("forward", "after its forward"):
            at += 10 * MS
            for _ in range(3):  # progress inside of a part
                activity.part(part, micro_batch)
    assert activity.now()[0] == "backward, call 3, 2 of 2, after its forward"
    at += 10 * MS
    activity.rest()
    assert activity.now()[0] == "nothing: it waits for a call"
    said = ranks.timed(5_000 * MS)
    assert (said.answered, said.lost) == (5_050 * MS, 0)

    of_rank = ranks.RankTimes("rank 3 (node1)")
    at = 998 * MS
    of_rank.asked("backward")
    at = 1_052 * MS
    of_rank.answered(said)
    kept, _ = spans.taken()
    assert of_rank.clock.bound == pytest.approx(2 * MS, abs=DRIFT * 54 * MS)
    shown = {
        (lane.thread, name, str((more or {}).get("of", ""))): tuple(
            round((moment + (lane.clock.offset if lane.clock else 0)) / MS) for moment in (begin, end)
        )
        for lane, name, begin, end, more in kept
    }
    assert shown == {
        ("asked by the controller", "backward", ""): (998, 1052),
        ("calls", "backward", ""): (1000, 1050),
        ("calls", "forward", "1 of 2"): (1010, 1020),
        ("calls", "after its forward", "1 of 2"): (1020, 1030),
        ("calls", "forward", "2 of 2"): (1030, 1040),
        ("calls", "after its forward", "2 of 2"): (1040, 1050),
    }


def test_calls_that_wait_behind_others_do_not_overlap_them() -> None:
    spans.taken()
    rank = ranks.RankTimes("rank 0")
    for call in ("score", "score", "backward"):
        rank.asked(call)
    for _ in range(3):
        rank.answered(None)
    kept, _ = spans.taken()
    assert [name for _, name, *_ in kept] == ["score", "score", "backward"]
    assert all(first[3] <= second[2] for first, second in pairwise(kept))


def test_memory_holds_the_latest_spans_and_counts_those_that_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    spans.taken()
    for number in range(spans.MOST + 5):
        spans.keep(spans.STEPS, str(number), number, number + 1)
    kept, lost = spans.taken()
    assert (len(kept), lost, kept[0][1]) == (spans.MOST, 5, "5")
    assert spans.taken() == ([], 0)
    for number in range(5000):
        spans.keep(ranks.CALLS, str(number), number, number + 1)
    said = ranks.timed(0)
    assert (len(said.spans), said.lost, said.spans[0][1]) == (4096, 904, "904")


def test_what_overlaps_takes_as_many_lanes_as_run_at_once() -> None:
    spans.taken()
    slots = spans.FreeLanes("sampling", "slot")
    with slots.during("a"), slots.during("b") as second:
        second.say(tokens=7)
    with slots.during("c"), pytest.raises(ValueError, match="x"), slots.during("d"):
        raise ValueError("x")
    kept, _ = spans.taken()
    assert [(lane.thread, name, said) for lane, name, _, _, said in kept] == [
        ("slot 1", "b", {"tokens": 7}),
        ("slot 0", "a", None),
        ("slot 1", "d", {"error": "ValueError"}),
        ("slot 0", "c", None),
    ]


def test_a_rank_without_times_is_kept_by_its_answers() -> None:
    spans.taken()
    rank = ranks.RankTimes("rank 0")
    rank.asked("prepare")
    rank.answered(None)
    rank.asked("step")
    rank.answered(RankTimed(arrived=1, answered=2, spans=[], lost=9))
    assert [name for _, name, *_ in spans.taken()[0]] == ["prepare", "step", "9 spans were lost"]
