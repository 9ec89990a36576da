"""The trace in a run's folder: Chrome's format, bounded, readable after a kill and a resume."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any, cast

import pytest

from rl_megatron.errors import DataError
from rl_megatron.observability.timeline import spans
from rl_megatron.observability.timeline.spans import Clock
from rl_megatron.observability.timeline.trace import Timeline, TraceFile, read_trace, write_trace
from tests.perfetto import check_trace

MS = 1_000_000


@pytest.fixture(autouse=True)
def _nothing_kept() -> None:
    spans.taken()


def test_a_file_is_json_with_names_of_lanes_and_microseconds_on_one_clock(tmp_path: Path) -> None:
    clock = Clock()
    clock.exchanged(asked=0, arrived=-10_000 * MS, answered=-10_000 * MS, heard=0)  # theirs is 10 s behind ours
    file = TraceFile(tmp_path)
    file.append(
        [
            (spans.Lane("rank 1 (b)", "calls", clock), 'forward "x"', -9_998 * MS, -9_996 * MS, {"of": "1 of 2"}),
            (spans.PHASES, "train", 1 * MS, 5 * MS, None),
        ]
    )
    file.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    named = {(e["name"], e["pid"], e["tid"]): e["args"] for e in events if e["ph"] == "M"}
    assert named["process_name", 1, 0] == {"name": "rank 1 (b)"}
    assert named["thread_name", 1, 6] == {"name": "calls"}
    assert named["process_name", 2, 0] == {"name": "controller"}
    assert [(e["pid"], e["name"], e["args"]) for e in events if e["ph"] == "C"] == [
        (1, "clock", {"wrong by us, at most": 0.0})
    ]
    shown = [e for e in events if e["ph"] == "X"]
    assert [(e["name"], e["pid"], e["tid"], e["dur"]) for e in shown] == [
        ('forward "x"', 1, 6, 2000),
        ("train", 2, 3, 4000),
    ]
    check_trace(tmp_path / "trace.json")
    assert shown[0]["args"] == {"of": "1 of 2"}
    assert shown[0]["ts"] - shown[1]["ts"] == 1000
    assert all(type(e[key]) is int for e in shown for key in ("ts", "dur", "pid", "tid"))


def test_spans_of_a_lane_do_not_overlap_where_its_clock_turns_out_to_be_ahead(tmp_path: Path) -> None:
    clock, file = Clock(), TraceFile(tmp_path)
    calls = spans.Lane("rank 0 (a)", "calls", clock)
    clock.exchanged(asked=0, arrived=0, answered=0, heard=40 * MS)  # 20 ms, at most 20 ms wrong
    file.append([(calls, "first", 0, 10 * MS, None)])
    clock.exchanged(asked=40 * MS, arrived=40 * MS, answered=60 * MS, heard=62 * MS)  # 1 ms
    file.append([(calls, "inner", 11 * MS, 12 * MS, None), (calls, "outer", 10 * MS, 60 * MS, None)])
    file.close()
    check_trace(tmp_path / "trace.json")
    lengths = {event.name: event.end - event.begin for event in read_trace(tmp_path) if event.thread}
    assert lengths == {"first": 10_000, "outer": pytest.approx(61_000 - 30_000, abs=5), "inner": 0}  # DRIFT


def test_what_a_kill_left_and_a_resume_wrote_are_one_trace(tmp_path: Path) -> None:
    killed = TraceFile(tmp_path)
    killed.append([(spans.PHASES, f"phase {number}", number * MS, (number + 1) * MS, None) for number in range(3)])
    with (tmp_path / "trace.json").open("ab") as file:
        file.write(b'{"ph":"X","name":"torn","ts":1')
    resumed = TraceFile(tmp_path)
    resumed.append([(spans.PUSHES, "push", 3 * MS, 4 * MS, {"version": 4}), (spans.PHASES, "a", 4 * MS, 5 * MS, None)])
    resumed.close()
    assert [event.name for event in read_trace(tmp_path)] == ["phase 0", "phase 1", "phase 2", "push", "a"]
    for name in ("all.json", "all.json.gz"):
        data = write_trace(tmp_path, tmp_path / "out" / name).read_bytes()
        events = json.loads(gzip.decompress(data) if name.endswith("gz") else data)
        threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        assert [(e["name"], threads[e["pid"], e["tid"]]) for e in events if e["ph"] == "X"] == [
            ("phase 0", "phases"),
            ("phase 1", "phases"),
            ("phase 2", "phases"),
            ("push", "pushes"),
            ("a", "phases"),
        ]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"all.json", "all.json.gz"}


def test_threads_are_in_order_and_arrows_go_from_a_generation_to_its_requests(tmp_path: Path) -> None:
    """A push aborts request a, which another server gets; b goes on over it. What ends later is written later."""
    replicas = [[spans.Lane(f"replica {number}", f"request {lane}") for lane in (0, 1)] for number in (0, 1)]
    sampling = [spans.Lane("sampling", f"request {lane}") for lane in range(12)]
    file = TraceFile(tmp_path)
    file.append(
        [
            (replicas[0][0], "attempt", 2 * MS, 4 * MS, {"request": "a"}),
            (spans.PUSHES, "push", 4 * MS, 5 * MS, {"version": 2}),
            (spans.STEPS, "step 1", 0, 6 * MS, None),
        ]
    )
    file.append(
        [
            (replicas[1][0], "attempt", 5 * MS, 7 * MS, {"request": "a"}),
            (sampling[10], "generate", 1 * MS, 7 * MS, {"request": "a", "tokens": 9}),
            (replicas[0][1], "attempt", 3 * MS, 8 * MS, {"request": "b"}),
            (sampling[2], "generate", 2 * MS, 8 * MS, {"request": "b"}),
            (spans.Lane("sampling", "reward 0"), "reward", 8 * MS, 9 * MS, {"prompt": "b"}),
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
    file, replica, sampling = (
        TraceFile(tmp_path, 1),
        spans.Lane("replica 0", "request 0"),
        spans.Lane("sampling", "request 0"),
    )
    file.append([(replica, "attempt", 0, 1 * MS, {"request": "a"})])
    file.append([(spans.PUSHES, "push", 1 * MS, 2 * MS, {"version": 2})])  # in the next file
    file.append([(sampling, "generate", 2 * MS, 3 * MS, {"request": "a"})])
    file.close()
    assert [(event.name, event.flow) for event in read_trace(tmp_path)][-1] == ("generate", None)


def test_values_of_a_process_are_counters(tmp_path: Path) -> None:
    of_server, timeline = spans.Lane("replica 0", ""), Timeline(tmp_path)
    for running in (3, 1):
        spans.gauge(of_server, "requests", running=running, waiting=0)
    timeline.close()
    check_trace(tmp_path / "trace.json")
    assert [(e.process, e.thread, e.name, e.said, e.end - e.begin) for e in read_trace(tmp_path)] == [
        ("replica 0", "", "requests", {"running": running, "waiting": 0}, 0) for running in (3, 1)
    ]


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
    timeline, kept = Timeline(tmp_path, most), 0
    for step in range(1, 10_001):
        for number in range(10):
            spans.keep(spans.PHASES, "train", number, number + 1)
        timeline.step({"step": step, "phase": "rl"}, (step * MS, (step + 1) * MS))
        kept = max(kept, len(spans._kept))
    timeline.close()
    assert kept <= spans.MOST
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) == 2
    assert most < max(sizes) < most + 1000  # the line that fills it, and the last
    steps = [event for event in read_trace(tmp_path) if event.thread == "steps"]
    assert steps[-1].name == "step 10000"
    assert {event.end - event.begin for event in steps} <= {1000, 1001}


def test_a_disk_that_refuses_is_warned_of_once_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "trace.json").mkdir()  # which can be neither replaced by a file nor written
    (tmp_path / "trace_before.json").write_text("")
    timeline = Timeline(tmp_path)
    for step in (1, 2):
        timeline.step({"step": step, "phase": "rl"}, (step * MS, (step + 1) * MS))
    timeline.close()
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["the timeline ends here"]


@pytest.mark.parametrize("in_thread", [True, False])
def test_a_fault_of_our_own_is_warned_of_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, in_thread: bool
) -> None:
    """What a span says must be JSON; here it is not, in what a thread writes or in what is left for the end."""
    timeline = Timeline(tmp_path)
    spans.keep(spans.PHASES, "train", 1, 2, cast(Any, {"of": object()}))
    if in_thread:
        timeline.step({"step": 1, "phase": "rl"}, (1, 2))
    timeline.close()
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("the timeline ends here: TypeError: ")


def test_a_folder_without_a_trace_and_a_line_that_is_no_event_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"it has no trace\.json"):
        read_trace(tmp_path)
    (tmp_path / "trace.json").write_text('[\n{"ph":"X"},\n')
    with pytest.raises(DataError, match=r"trace\.json:2: not an event"):
        read_trace(tmp_path)
