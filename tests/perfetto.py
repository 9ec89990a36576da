"""Whether Perfetto can show a trace.json without leaving anything out, by the rules of its importer of this format
(src/trace_processor/importers/json of v52, and of the next ones): read by json alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def check_trace(path: Path) -> None:
    """Fails with what would be an import error, or another picture than that of the run."""
    events: list[dict[str, Any]] = json.loads(path.read_text())
    assert {event["ph"] for event in events} <= {"X", "C", "M"}
    metas = [event for event in events if event["ph"] == "M"]
    processes = {event["pid"]: event["args"]["name"] for event in metas if event["name"] == "process_name"}
    ordered = {event["pid"] for event in metas if event["name"] == "process_sort_index"}
    threads = {(event["pid"], event["tid"]) for event in metas if event["name"] == "thread_name"}
    assert len(set(processes.values())) == len(processes)
    assert ordered == processes.keys(), "a process without a place"
    assert all(process != thread for process, thread in threads), "a thread that would be shown as the main one"
    lanes: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            _check_span(event)
            lanes.setdefault((event["pid"], event["tid"]), []).append(event)
        elif event["ph"] == "C":
            assert event["pid"] in processes, f"no name: {event}"
            assert type(event["ts"]) is int
            assert all(key.isascii() for key in event["args"]), f"an escape would be shown: {event}"
            assert all(type(value) in (int, float) for value in event["args"].values()), f"no number: {event}"
    assert lanes.keys() <= threads, "no name"
    for lane in lanes.values():
        _check_nested(sorted(lane, key=lambda event: (event["ts"], -event["dur"])))
    _check_flows([event for event in events if "bind_id" in event])


def _check_span(event: dict[str, Any]) -> None:
    for key in ("ts", "dur", "pid", "tid"):
        assert type(event[key]) is int, f"{key} is no whole number: {event}"
        assert event[key] >= 0, f"{key} is below 0: {event}"
    assert event["name"], f"no name: {event}"


def _check_nested(lane: list[dict[str, Any]]) -> None:
    """Of spans that overlap, and are not one in the other, Perfetto drops the later."""
    until: list[int] = []
    for event in lane:
        until = [end for end in until if end > event["ts"]]
        assert all(event["ts"] + event["dur"] <= end for end in until), f"overlaps: {event}"
        until.append(event["ts"] + event["dur"])


def _check_flows(events: list[dict[str, Any]]) -> None:
    """Arrows of one number begin once, before they go on."""
    flows: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        assert (event["ph"], event["flow_out"]) == ("X", True)
        flows.setdefault(event["bind_id"], []).append(event)
    for number, each in flows.items():
        int(number, 16)
        begins = [event["ts"] for event in each if not event.get("flow_in")]
        assert len(begins) == 1, f"{number} begins {len(begins)} times: {each}"
        assert begins[0] == min(event["ts"] for event in each), f"{number} goes on before it begins"
