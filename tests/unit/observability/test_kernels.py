"""Files of torch's profiler as events of a run's timeline."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from rl_megatron.errors import DataError
from rl_megatron.observability.timeline.kernels import KernelEvent, RankKernels, Recorded, folder_of, read_kernels, save
from rl_megatron.observability.timeline.ranks import RankTimes

BASE = 1_700_000_000_000_000_000  # of a trace, nanoseconds since 1970
EVENTS = [
    {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 77, "tid": 78, "ts": 10.25, "dur": 3.5},
    {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 12.0, "dur": 100.75, "args": {"stream": 7}},
    {"ph": "X", "cat": "python_function", "name": "a frame", "pid": 77, "tid": 78, "ts": 1.0, "dur": 1.0},
    {"ph": "i", "cat": "cpu_op", "name": "an instant", "pid": 77, "tid": 78, "ts": 1.0},
    {"ph": "M", "name": "process_name", "pid": 77, "tid": 0, "ts": 0, "args": {"name": "python"}},
]


def written(run: Path, *, shift: int = 0) -> Path:
    folder = folder_of(run, 3)
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
    monkeypatch.setattr("rl_megatron.observability.timeline.ranks.time.time_ns", lambda: BASE + 500)
    monkeypatch.setattr("rl_megatron.observability.timeline.spans.now", lambda: 500)
    times.clock.exchanged(asked=100, arrived=150 + hour, answered=150 + hour, heard=200)
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
    folder = written(tmp_path)
    (folder / file).write_bytes(content)
    with pytest.raises(DataError, match=r"step_000003: not what a run recorded .*remove the folder"):
        list(read_kernels(tmp_path))
