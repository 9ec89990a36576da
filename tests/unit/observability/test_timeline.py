"""The timeline of all processes on one clock, bounded in memory, and its file: readable after a kill and a resume."""

from __future__ import annotations

import gzip
import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest

from rl_megatron.errors import DataError
from rl_megatron.observability import activity, timeline
from rl_megatron.observability.timeline import (
    DRIFT,
    Clock,
    KernelEvent,
    RankKernels,
    RankTimed,
    RankTimes,
    Recorded,
    Timeline,
    TraceFile,
    profile_folder,
    read_kernels,
    read_trace,
    save,
    write_trace,
)
from tests.perfetto import check_trace

MS = 1_000_000  # nanoseconds


def test_a_clock_that_is_shifted_is_found_within_its_bound() -> None:
    """Delays of d1 there and d2 back bound it by the truth - d1 and + d2; what is older widens by the drift."""
    theirs = -7_200_000 * MS  # ours = theirs + 7,200 s
    clock = Clock()
    assert (clock.offset, clock.bound) == (0, None)
    clock.exchanged(sent_at=100 * MS, arrived=theirs + 109 * MS, answered=theirs + 150 * MS, received_at=151 * MS)
    aged = DRIFT * 51 * MS
    assert clock.offset == pytest.approx(-theirs + (MS - 9 * MS - aged) / 2, abs=1)
    assert clock.bound == pytest.approx((MS + 9 * MS + aged) / 2, abs=1)
    clock.exchanged(sent_at=151 * MS, arrived=theirs + 153 * MS, answered=theirs + 160 * MS, received_at=190 * MS)
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
            clock.exchanged(sent_at=int(asked), arrived=read[0], answered=read[1], received_at=int(heard))
            truth = heard - (heard - offset) * rate
            assert clock.bound is not None
            assert abs(clock.offset - truth) <= clock.bound + 2


def test_a_clock_that_was_set_counts_from_then_on() -> None:
    clock = Clock()
    for shift in (0, 60_000 * MS):
        clock.exchanged(sent_at=MS, arrived=2 * MS - shift, answered=3 * MS - shift, received_at=4 * MS)
    assert (clock.offset, clock.bound) == pytest.approx((60_000 * MS, MS), abs=DRIFT * 3 * MS)


def test_a_ranks_calls_have_their_parts_inside_on_the_controllers_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank's clock runs 5 s before ours; each message takes 2 ms."""
    timeline.taken()
    at = 5_000 * MS
    monkeypatch.setattr(timeline, "now", lambda: at)
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
    said = timeline.timed(5_000 * MS)
    assert (said.answered, said.lost) == (5_050 * MS, 0)

    of_rank, at = timeline.RankTimes("rank 3 (node1)"), 998 * MS
    of_rank.on_call("backward")
    at = 1_052 * MS
    of_rank.answered(said)
    kept, _ = timeline.taken()
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
    timeline.taken()
    rank = timeline.RankTimes("rank 0")
    for call in ("score", "score", "backward"):
        rank.on_call(call)
    for _ in range(3):
        rank.answered(None)
    kept, _ = timeline.taken()
    assert [name for _, name, *_ in kept] == ["score", "score", "backward"]
    assert all(first[3] <= second[2] for first, second in pairwise(kept))


def test_memory_holds_the_latest_spans_and_counts_those_that_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline.taken()
    for number in range(timeline.MOST + 5):
        timeline.keep(timeline.STEPS, str(number), number, number + 1)
    kept, lost = timeline.taken()
    assert (len(kept), lost, kept[0][1]) == (timeline.MOST, 5, "5")
    assert timeline.taken() == ([], 0)
    for number in range(5000):
        timeline.keep(timeline.CALLS, str(number), number, number + 1)
    said = timeline.timed(0)
    assert (len(said.spans), said.lost, said.spans[0][1]) == (4096, 904, "904")


def test_what_overlaps_takes_as_many_lanes_as_run_at_once() -> None:
    timeline.taken()
    slots = timeline.FreeLanes("sampling", "slot")
    with slots.during("a"), slots.during("b") as second:
        second.say(tokens=7)
    with slots.during("c"), pytest.raises(ValueError, match="x"), slots.during("d"):
        raise ValueError("x")
    kept, _ = timeline.taken()
    assert [(lane.thread, name, said) for lane, name, _, _, said in kept] == [
        ("slot 1", "b", {"tokens": 7}),
        ("slot 0", "a", None),
        ("slot 1", "d", {"error": "ValueError"}),
        ("slot 0", "c", None),
    ]


def test_a_rank_without_times_is_kept_by_its_answers() -> None:
    timeline.taken()
    rank = timeline.RankTimes("rank 0")
    rank.on_call("prepare")
    rank.answered(None)
    rank.on_call("step")
    rank.answered(RankTimed(arrived=1, answered=2, spans=[], lost=9))
    assert [name for _, name, *_ in timeline.taken()[0]] == ["prepare", "step", "9 spans were lost"]


# The trace in a run's folder: Chrome's format, bounded, readable after a kill and a resume.
@pytest.fixture(autouse=True)
def _nothing_kept() -> None:
    timeline.taken()


def test_a_file_is_json_with_names_of_lanes_and_microseconds_on_one_clock(tmp_path: Path) -> None:
    clock = Clock()
    clock.exchanged(sent_at=0, arrived=-10_000 * MS, answered=-10_000 * MS, received_at=0)  # theirs is 10 s behind ours
    file = TraceFile(tmp_path)
    file.append(
        [
            (timeline.Lane("rank 1 (b)", "calls", clock), 'forward "x"', -9_998 * MS, -9_996 * MS, {"of": "1 of 2"}),
            (timeline.PHASES, "train", 1 * MS, 5 * MS, None),
        ]
    )
    file.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    named = {(e["name"], e["pid"], e["tid"]): e["args"] for e in events if e["ph"] == "M"}
    assert named["process_name", 1, 0] == {"name": "rank 1 (b)"}
    assert named["thread_name", 1, 6] == {"name": "calls"}
    assert named["process_name", 2, 0] == {"name": "controller"}
    expected = [(1, "clock", {"wrong by us, at most": 0.0})]
    assert [(e["pid"], e["name"], e["args"]) for e in events if e["ph"] == "C"] == expected
    shown = [e for e in events if e["ph"] == "X"]
    assert [(e["name"], e["pid"], e["tid"], e["dur"]) for e in shown] == [
        ('forward "x"', 1, 6, 2000),
        ("train", 2, 3, 4000),
    ]
    check_trace(tmp_path / "trace.json")
    assert (shown[0]["args"], shown[0]["ts"] - shown[1]["ts"]) == ({"of": "1 of 2"}, 1000)
    assert all(type(e[key]) is int for e in shown for key in ("ts", "dur", "pid", "tid"))


def test_spans_of_a_lane_do_not_overlap_where_its_clock_turns_out_to_be_ahead(tmp_path: Path) -> None:
    clock, file = Clock(), TraceFile(tmp_path)
    calls = timeline.Lane("rank 0 (a)", "calls", clock)
    clock.exchanged(sent_at=0, arrived=0, answered=0, received_at=40 * MS)  # 20 ms, at most 20 ms wrong
    file.append([(calls, "first", 0, 10 * MS, None)])
    clock.exchanged(sent_at=40 * MS, arrived=40 * MS, answered=60 * MS, received_at=62 * MS)  # 1 ms
    file.append([(calls, "inner", 11 * MS, 12 * MS, None), (calls, "outer", 10 * MS, 60 * MS, None)])
    file.close()
    check_trace(tmp_path / "trace.json")
    lengths = {event.name: event.end - event.begin for event in read_trace(tmp_path) if event.thread}
    assert lengths == {"first": 10_000, "outer": pytest.approx(61_000 - 30_000, abs=5), "inner": 0}  # DRIFT


def test_what_a_kill_left_and_a_resume_wrote_are_one_trace(tmp_path: Path) -> None:
    killed = TraceFile(tmp_path)
    killed.append([(timeline.PHASES, f"phase {number}", number * MS, (number + 1) * MS, None) for number in range(3)])
    with (tmp_path / "trace.json").open("ab") as file:
        file.write(b'{"ph":"X","name":"torn","ts":1')
    resumed = TraceFile(tmp_path)
    resumed.append(
        [(timeline.PUSHES, "push", 3 * MS, 4 * MS, {"version": 4}), (timeline.PHASES, "a", 4 * MS, 5 * MS, None)]
    )
    resumed.close()
    assert [event.name for event in read_trace(tmp_path)] == ["phase 0", "phase 1", "phase 2", "push", "a"]
    for name in ("all.json", "all.json.gz"):
        data = write_trace(tmp_path, tmp_path / "out" / name).read_bytes()
        events = json.loads(gzip.decompress(data) if name.endswith("gz") else data)
        threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        assert [(e["name"], threads[e["pid"], e["tid"]]) for e in events if e["ph"] == "X"] == [
            *(("phase 0", "phases"), ("phase 1", "phases"), ("phase 2", "phases"), ("push", "pushes"), ("a", "phases"))
        ]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"all.json", "all.json.gz"}


def test_threads_are_in_order_and_arrows_go_from_a_generation_to_its_requests(tmp_path: Path) -> None:
    """A push aborts request a, which another server gets; b goes on over it. What ends later is written later."""
    replicas = [[timeline.Lane(f"replica {number}", f"request {lane}") for lane in (0, 1)] for number in (0, 1)]
    sampling = [timeline.Lane("sampling", f"request {lane}") for lane in range(12)]
    file = TraceFile(tmp_path)
    file.append(
        [
            (replicas[0][0], "attempt", 2 * MS, 4 * MS, {"request": "a"}),
            (timeline.PUSHES, "push", 4 * MS, 5 * MS, {"version": 2}),
            (timeline.STEPS, "step 1", 0, 6 * MS, None),
        ]
    )
    file.append(
        [
            (replicas[1][0], "attempt", 5 * MS, 7 * MS, {"request": "a"}),
            (sampling[10], "generate", 1 * MS, 7 * MS, {"request": "a", "tokens": 9}),
            (replicas[0][1], "attempt", 3 * MS, 8 * MS, {"request": "b"}),
            (sampling[2], "generate", 2 * MS, 8 * MS, {"request": "b"}),
            (timeline.Lane("sampling", "reward 0"), "reward", 8 * MS, 9 * MS, {"prompt": "b"}),
            (replicas[0][1], "attempt", 9 * MS, 10 * MS, {"request": "a"}),  # of the next evaluation
            (sampling[2], "generate", 9 * MS - 1000, 10 * MS, {"request": "a"}),
            (replicas[1][0], "probe", 9 * MS, 10 * MS, {"request": "probe 0"}),
        ]
    )
    file.close()
    check_trace(tmp_path / "trace.json")
    events = json.loads(write_trace(tmp_path, tmp_path / "out.json").read_text())
    check_trace(tmp_path / "out.json")
    threads: dict[str, list[tuple[int, str]]] = {}
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    for e in events:
        if e["name"] == "thread_name":
            threads.setdefault(processes[e["pid"]], []).append((e["tid"], e["args"]["name"]))
    assert {process: [name for _, name in sorted(each)] for process, each in threads.items()} == {
        "controller": ["steps", "pushes"],
        "sampling": ["request 2", "request 10", "reward 0"],
        "replica 0": ["request 0", "request 1"],
        "replica 1": ["request 0"],
    }
    flows: dict[str, list[tuple[str, str]]] = {}
    for e in sorted((e for e in events if "bind_id" in e), key=lambda e: e["ts"]):
        flows.setdefault(e["bind_id"], []).append((e["name"], processes[e["pid"]]))
    assert sorted(flows.values()) == [
        [("generate", "sampling"), ("attempt", "replica 0")],
        [("generate", "sampling"), ("attempt", "replica 0")],
        [("generate", "sampling"), ("attempt", "replica 0"), ("attempt", "replica 1")],
    ]


def test_a_request_without_a_generation_is_forgotten_with_its_file(tmp_path: Path) -> None:
    file = TraceFile(tmp_path, 1)
    replica, sampling = timeline.Lane("replica 0", "request 0"), timeline.Lane("sampling", "request 0")
    file.append([(replica, "attempt", 0, 1 * MS, {"request": "a"})])
    file.append([(timeline.PUSHES, "push", 1 * MS, 2 * MS, {"version": 2})])  # in the next file
    file.append([(sampling, "generate", 2 * MS, 3 * MS, {"request": "a"})])
    file.close()
    assert [(event.name, event.flow) for event in read_trace(tmp_path)][-1] == ("generate", None)


def test_values_of_a_process_are_counters(tmp_path: Path) -> None:
    of_server, kept = timeline.Lane("replica 0", ""), Timeline(tmp_path)
    for running in (3, 1):
        timeline.gauge(of_server, "requests", running=running, waiting=0)
    kept.close()
    check_trace(tmp_path / "trace.json")
    expected = [("replica 0", "", "requests", {"running": running, "waiting": 0}, 0) for running in (3, 1)]
    assert [(e.process, e.thread, e.name, e.details, e.end - e.begin) for e in read_trace(tmp_path)] == expected


def test_the_check_of_the_format_finds_what_perfetto_drops(tmp_path: Path) -> None:
    """Each of these is a count in Perfetto's "Import errors", or draws another picture than ours."""
    named = [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "rank 0"}},
        {"ph": "M", "name": "process_sort_index", "pid": 1, "tid": 0, "args": {"sort_index": 0}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": "calls"}},
    ]
    span = {"ph": "X", "name": "a", "ts": 10, "dur": 10, "pid": 1, "tid": 2}
    wrong: dict[str, list[dict[str, Any]]] = {
        "overlaps": [span, {**span, "ts": 15}],
        "no name": [{**span, "tid": 3}],
        "is no whole number": [{**span, "dur": 1.5}],
        "begins 0 times": [{**span, "bind_id": "0x1", "flow_in": True, "flow_out": True}],
        "escape": [{"ph": "C", "name": "clock", "ts": 1, "pid": 1, "args": {"µs": 1}}],
        "no number": [{"ph": "C", "name": "clock", "ts": 1, "pid": 1, "args": {"us": "1"}}],
    }
    for problem, events in wrong.items():
        (tmp_path / "trace.json").write_text(json.dumps([*named, *events]))
        with pytest.raises(AssertionError, match=problem):
            check_trace(tmp_path / "trace.json")


def test_ten_thousand_steps_are_bounded_in_memory_and_on_disk(tmp_path: Path) -> None:
    """Ten spans a step are 8 MB as text; the latest are there, and the two files hold no more than their bound."""
    most = 1 << 20
    written, kept = Timeline(tmp_path, most), 0
    for step in range(1, 10_001):
        for number in range(10):
            timeline.keep(timeline.PHASES, "train", number, number + 1)
        written.step({"step": step, "phase": "rl"}, (step * MS, (step + 1) * MS))
        kept = max(kept, len(timeline._kept))
    written.close()
    assert kept <= timeline.MOST
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) == 2
    assert most < max(sizes) < most + 1000  # the line that fills it, and the last
    steps = [event for event in read_trace(tmp_path) if event.thread == "steps"]
    assert steps[-1].name == "step 10000"
    assert {event.end - event.begin for event in steps} <= {1000, 1001}


def test_a_full_disk_is_warned_of_once_and_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "trace.json").mkdir()  # which can be neither replaced by a file nor written
    (tmp_path / "trace_before.json").write_text("")
    written = Timeline(tmp_path)
    for step in (1, 2):
        written.step({"step": step, "phase": "rl"}, (step * MS, (step + 1) * MS))
    written.close()
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["the timeline ends here"]


@pytest.mark.parametrize("in_thread", [True, False])
def test_our_own_fault_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture, in_thread: bool) -> None:
    """What a span says must be JSON; here it is not, in what a thread writes or in what is left for the end."""
    written = Timeline(tmp_path)
    timeline.keep(timeline.PHASES, "train", 1, 2, cast(Any, {"of": object()}))
    if in_thread:
        written.step({"step": 1, "phase": "rl"}, (1, 2))
    written.close()
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("the timeline ends here: TypeError: ")


def test_a_folder_without_a_trace_and_a_line_that_is_no_event_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"it has no trace\.json"):
        read_trace(tmp_path)
    (tmp_path / "trace.json").write_text('[\n{"ph":"X"},\n')
    with pytest.raises(DataError, match=r"trace\.json:2: not an event"):
        read_trace(tmp_path)


# Files of torch's profiler as events of a run's timeline.
BASE = 1_700_000_000_000_000_000  # of a trace, nanoseconds since 1970
EVENTS = [
    {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 77, "tid": 78, "ts": 10.25, "dur": 3.5},
    {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 12.0, "dur": 100.75, "args": {"stream": 7}},
    {"ph": "X", "cat": "python_function", "name": "a frame", "pid": 77, "tid": 78, "ts": 1.0, "dur": 1.0},
    {"ph": "i", "cat": "cpu_op", "name": "an instant", "pid": 77, "tid": 78, "ts": 1.0},
    {"ph": "M", "name": "process_name", "pid": 77, "tid": 0, "ts": 0, "args": {"name": "python"}},
]


def written(run: Path, *, shift: int = 0) -> Path:
    folder = profile_folder(run, 3)
    folder.mkdir(parents=True)
    text = json.dumps({"baseTimeNanoseconds": BASE, "traceEvents": EVENTS}).encode()
    (folder / "rank-0.json.gz").write_bytes(gzip.compress(text))
    save(folder, [RankKernels(file=folder / "rank-0.json.gz", process="rank 0 (here)", shift=shift)])
    return folder


def test_times_are_the_controllers_and_threads_are_streams(tmp_path: Path) -> None:
    written(tmp_path, shift=-2_000_000)
    start = BASE // 1000 - 2000
    assert list(read_kernels(tmp_path)) == [
        KernelEvent(
            process="rank 0 (here)", thread="operators, thread 78", name="aten::mm", begin=start + 10, end=start + 13
        ),
        KernelEvent(process="rank 0 (here)", thread="GPU 0, stream 7", name="gemm", begin=start + 12, end=start + 112),
    ]


def test_a_rank_on_another_clock_is_placed_by_both_of_its_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own clocks differ from the controller's by known amounts: spans' by an hour, the time of day by a second."""
    times = RankTimes("rank 0 (far)")
    hour, second = 3_600_000_000_000, 1_000_000_000
    monkeypatch.setattr("rl_megatron.observability.timeline.time.time_ns", lambda: BASE + 500)
    monkeypatch.setattr("rl_megatron.observability.timeline.now", lambda: 500)
    times.clock.exchanged(sent_at=100, arrived=150 + hour, answered=150 + hour, received_at=200)
    placed = times.placed(Recorded(file=Path("x"), monotonic=300 + hour, wall=BASE + 300 + second))
    assert abs(placed.shift + second) <= 50  # the bound of an exchange of 100 ns
    assert placed.process == "rank 0 (far)"


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("ranks.json", b"["),
        ("ranks.json", b"{}{"),
        ("ranks.json", b'[{"file": "gone.json.gz", "process": "rank 0", "shift": 0}]'),
        ("ranks.json", b'[{"file": "rank-0.json.gz", "process": "rank 0", "shift": null}]'),
        ("rank-0.json.gz", b"no gzip"),
        ("rank-0.json.gz", gzip.compress(b'{"traceEvents": [')),
        ("rank-0.json.gz", gzip.compress(b'{"traceEvents": []}')),
        ("rank-0.json.gz", gzip.compress(b"{}" * 1000)[:20]),
    ],
    ids=["half a list", "two objects", "no file", "no shift", "no gzip", "half an object", "no base", "cut off"],
)
def test_files_that_are_torn_or_of_others_are_named(tmp_path: Path, file: str, content: bytes) -> None:
    (written(tmp_path) / file).write_bytes(content)
    with pytest.raises(DataError, match=r"step_000003: not what a run recorded .*remove the folder"):
        list(read_kernels(tmp_path))
