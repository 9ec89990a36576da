"""What a run writes line by line: its log, samples, JSON lines that survive a kill, and the display of its progress."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import os
import re
import tempfile
import threading
import time
import tracemalloc
import warnings
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from rl_megatron.config.io import load_config
from rl_megatron.config.sections.jobs import LogSection
from rl_megatron.data.samples import single_turns
from rl_megatron.errors import DataError
from rl_megatron.files import current_operations
from rl_megatron.observability.files import JsonlFile, from_the_end, read_jsonl, rows_from
from rl_megatron.observability.history import (
    SampleRow,
    SamplesWriter,
    SampleTurn,
    latest_samples,
    read_samples,
    samples_between,
)
from rl_megatron.observability.log import log_failures, log_outcome, read_outcome, run_log
from rl_megatron.observability.progress import Progress
from rl_megatron.observability.recorder import Recorder
from rl_megatron.types import Completion, Prompt, RolloutGroup, Span


def test_who_waits_for_the_logs_thread_waits_for_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler's lock is another thread's as long as the disk does not answer."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with run_log(tmp_path, role="controller"):
        (handler,) = (one for one in logging.getLogger().handlers if isinstance(one, logging.FileHandler))
        waits = threading.Thread(target=logging.getLogger("rl_megatron.x").warning, args=("waits",))
        handler.acquire()
        try:
            waits.start()
            assert waits.ident is not None
            until = time.monotonic() + 60
            while waits.ident not in current_operations() and time.monotonic() < until:
                waits.join(0.01)
            assert current_operations()[waits.ident].path == tmp_path / "log.txt"
        finally:
            handler.release()
        waits.join()
        assert waits.ident not in current_operations()


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (DataError("no answer\n  2026: see log\n"), ("failed", "no answer\n  2026: see log\n")),
        (OSError(28, "No space left"), ("failed", "OSError: [Errno 28] No space left")),
        (KeyboardInterrupt(), ("interrupted", "")),
        (asyncio.CancelledError(), ("interrupted", "")),
        (None, ("stopped", "")),
    ],
)
def test_the_log_tells_how_the_last_start_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException | None, outcome: tuple[str, str]
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    assert read_outcome(tmp_path) is None
    with run_log(tmp_path, role="controller"), contextlib.suppress(BaseException):
        with log_failures():
            assert read_outcome(tmp_path) == ("began", "")
            if error is not None:
                raise error
        log_outcome("stopped")
    with run_log(tmp_path, role="learner", rank=1):
        logging.getLogger("rl_megatron.x").info("the run failed: said by a rank, and later")
    assert read_outcome(tmp_path) == outcome
    with run_log(tmp_path, role="controller"), log_failures():
        assert read_outcome(tmp_path) == ("began", "")


def test_the_log_names_role_and_rank_and_only_our_warnings_reach_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's would keep what no worker of it can send on
    ours, theirs = logging.getLogger("rl_megatron.x"), logging.getLogger("megatron.core.y")
    with run_log(tmp_path, role="controller"), run_log(tmp_path, role="learner", rank=1):
        ours.info("one")
        theirs.info("too quiet")
        theirs.warning("two")
        warnings.warn("three", stacklevel=1)
    with run_log(tmp_path, role="learner", rank=1):
        ours.warning("four")
        ours.info("five \ud800")
    ours.warning("after the run")
    lines = (tmp_path / "log.txt").read_text().splitlines()
    text = "\n".join(lines)
    assert "INFO    [learner 1] rl_megatron.x: one" in lines[1]
    assert "INFO    [controller] rl_megatron.x: one" in lines[0]
    assert "WARNING [learner 1] megatron.core.y: two" in text
    assert "UserWarning: three" in text
    assert lines[-1].endswith(r"INFO    [learner 1] rl_megatron.x: five \ud800")
    assert "too quiet" not in text
    assert capsys.readouterr().err.splitlines()[:1] == ["WARNING [learner 1] four"]


def _sample(step: int, reward: float = 1.0) -> SampleRow:
    return SampleRow(step=step, prompt="1+1=", completion="<2>\n", answer="2", reward=reward)


def test_samples_are_read_back_and_truncated_for_a_resume(tmp_path: Path) -> None:
    writer = SamplesWriter(tmp_path)
    writer.write([_sample(1), _sample(1, 0.0)])
    writer.write([_sample(2)])
    assert read_samples(tmp_path / "samples.jsonl") == [_sample(1), _sample(1, 0.0), _sample(2)]
    assert writer.truncate_after(1) == 1
    writer.write([_sample(2, 0.5)])
    writer.close()
    assert read_samples(tmp_path / "samples.jsonl") == [_sample(1), _sample(1, 0.0), _sample(2, 0.5)]


def test_turns_are_read_back_and_a_sample_of_one_has_none(tmp_path: Path) -> None:
    talk = replace(_sample(1), turns=(SampleTurn(read="", sampled="<2"), SampleTurn(read="Tool: 7", sampled=">")))
    SamplesWriter(tmp_path).write([_sample(1), talk])
    path = tmp_path / "samples.jsonl"
    assert read_samples(path) == [_sample(1), talk]
    assert ["turns" in json.loads(line) for line in path.read_text().splitlines()] == [False, True]
    assert list(latest_samples(path)) == [talk, _sample(1)]


@pytest.mark.parametrize("turns", ["7", "[7]", '[{"read": ""}]', '[{"read": "", "said": null}]'])
def test_turns_that_are_none_are_named(tmp_path: Path, turns: str) -> None:
    row = json.dumps({"step": 4, "prompt": "", "completion": "", "answer": "", "reward": 1})
    (tmp_path / "samples.jsonl").write_text(f'{row[:-1]}, "turns": {turns}}}\n')
    with pytest.raises(DataError, match=r"a row of step 4 .* expected step, prompt"):
        read_samples(tmp_path / "samples.jsonl")


@pytest.mark.parametrize(
    "row", ['{"step": 4}', '{"step": 4, "prompt": 1, "completion": "", "answer": "", "reward": 1}']
)
def test_rows_that_are_no_samples_are_named(tmp_path: Path, row: str) -> None:
    (tmp_path / "samples.jsonl").write_text(row + "\n")
    with pytest.raises(DataError, match=r"samples\.jsonl: a row of step 4 .* expected step, prompt"):
        read_samples(tmp_path / "samples.jsonl")


def test_a_report_reads_no_more_of_samples_than_it_shows(tmp_path: Path) -> None:
    """Lines that are none lie between what it reads."""
    rows = [json.dumps(asdict(_sample(step, reward))) for step in range(1, 9001) for reward in (0, 1)]
    rows[5_000] = rows[14_000] = "no row"
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(f"{row}\n" for row in rows))
    found = [(row.step, row.reward) for row in samples_between(path)]
    middle = {step for step, _ in found} - {1, 9000}
    assert len(middle) == 1
    assert 4400 < middle.pop() < 4600
    assert [*found[:2], *found[-2:]] == [(1, 0), (1, 1), (9000, 0), (9000, 1)]


def _group(name: str, rewards: tuple[float, ...]) -> RolloutGroup:
    zeros = np.zeros(1, np.float32)
    prompt = Prompt(id=name, text=name, token_ids=(1,), answer="7")
    said = Completion(token_ids=np.zeros(1, np.int32), logprobs=zeros, finish_reason="stop", spans=(Span(0, 0),))
    return single_turns(prompt, [said] * len(rewards), rewards=rewards)


def test_completions_of_a_group_are_beside_one_another(tmp_path: Path) -> None:
    groups = [_group("a", (0, 1, 0.5, 0, 1)), _group("b", (1, 0)), _group("c", (0, 0))]
    log = LogSection(samples_per_step=2)
    with closing(Recorder(tmp_path, log, Progress(1, "plain"))) as recorder:
        recorder.write_samples(3, groups)
    path = tmp_path / "samples.jsonl"
    expected = [*(("a", reward) for reward in (0, 1, 0.5, 0)), *(("b", reward) for reward in (1, 0))]
    assert [(row.prompt, row.reward) for row in read_samples(path)] == expected


def test_a_prompt_of_messages_is_shown_whole(tmp_path: Path) -> None:
    """Of an environment, whose prompt's own text is that of the last message alone."""
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
    said = [{"role": "developer", "content": "Be brief."}, called, {"role": "tool", "content": "7"}]
    (group,) = [_group("7", (1,))]
    group = replace(group, prompt=replace(group.prompt, messages=tuple(said)))
    with closing(Recorder(tmp_path, LogSection(), Progress(1, "plain"))) as recorder:
        recorder.write_samples(3, [group])
    (row,) = read_samples(tmp_path / "samples.jsonl")
    assert row.prompt == 'developer: Be brief.\n\nassistant: [{"function": {"name": "add"}}]\n\ntool: 7'


def test_a_row_that_is_written_again_is_of_the_process_that_made_the_step(tmp_path: Path) -> None:
    log, row = LogSection(), {"step": 1, "phase": "rl"}
    before = {"devices/learner": 8, "devices/engines": 8}
    with closing(Recorder(tmp_path, log, Progress(2, "plain"), before)) as recorder:
        row = asyncio.run(recorder.write(row))
    with closing(Recorder(tmp_path, log, Progress(2, "plain"), {"devices/learner": 4})) as resumed:
        asyncio.run(resumed.write({**row, "eval/accuracy": 0.5}, again=True))
    assert read_jsonl(tmp_path / "metrics.jsonl") == [{"step": 1, "phase": "rl", **before, "eval/accuracy": 0.5}]


async def test_the_loop_turns_and_written_rows_keep_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a disk that answers only once the loop has gone on; a caller that is cancelled leaves no part of a row."""
    synced, fsync = threading.Event(), os.fsync

    def slow(descriptor: int) -> None:
        assert synced.wait(10.0)
        fsync(descriptor)

    monkeypatch.setattr("rl_megatron.observability.files.os.fsync", slow)
    with closing(Recorder(tmp_path, LogSection(), Progress(3, "plain"))) as recorder:
        rows = ({"step": step, "phase": phase} for step, phase in ((1, "rl"), (2, "rl"), (1, "eval"), (3, "rl")))
        first, *others, last = [asyncio.create_task(recorder.write(row)) for row in rows]
        await asyncio.sleep(0)  # all have begun
        first.cancel()
        last.cancel()
        await asyncio.wait((first, last))
        before = [one.done() for one in others]
        synced.set()
        await asyncio.gather(*others)
        assert before == [False, False]
    written = [(row["step"], row["phase"]) for row in read_jsonl(tmp_path / "metrics.jsonl")]
    assert written == [(1, "rl"), (2, "rl"), (1, "eval")]


def test_where_metrics_cannot_be_written_the_error_names_them_and_the_other_files_are_closed(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    recorder = Recorder(tmp_path, LogSection(), Progress(1, "plain"))
    recorder.write_samples(1, [_group("a", (0, 1))])
    refused = f"No space left on device: '{tmp_path}/metrics.jsonl'"
    with pytest.raises(OSError, match=refused):
        asyncio.run(recorder.write({"step": 1, "phase": "rl"}))
    with pytest.raises(OSError, match=refused):
        recorder.close()
    held = [os.path.realpath(each) for each in Path("/proc/self/fd").iterdir()]
    assert str(tmp_path / "samples.jsonl") not in held
    assert not [one for one in threading.enumerate() if one.name.startswith("timeline")]


# Durability of the run's JSON lines: torn tails, resumes, faults that name the line.
def test_rows_are_read_back_in_order_and_floats_to_the_bit(tmp_path: Path) -> None:
    file = JsonlFile(tmp_path / "m.jsonl")
    rows = [
        {"step": 1, "loss": 0.1 + 0.2, "phase": "rl"},
        {"step": 2, "loss": None},
        {"step": 3, "text": "a\n\ud800<é>"},
    ]
    file.append(rows[:2])
    file.append(rows[2:])
    assert read_jsonl(file.path) == rows


@pytest.mark.parametrize("cut", range(1, len('{"step": 3}\n')))
def test_a_torn_last_line_is_left_out_and_removed_wherever_it_was_cut(tmp_path: Path, cut: int) -> None:
    file = JsonlFile(tmp_path / "m.jsonl")
    file.append([{"step": 1}, {"step": 2}, {"step": 3}])
    whole = file.path.read_bytes()
    file.path.write_bytes(whole[:-cut])
    assert [row["step"] for row in read_jsonl(file.path)] == [1, 2]
    file.truncate_after(2)
    file.append([{"step": 3}])
    assert file.path.read_bytes() == whole


@pytest.mark.parametrize("torn", ["", '{"step": 9'])
@pytest.mark.parametrize("lengths", [[], [1], [3, 1, 2], [70_000, 5, 200_000, 65_536, 65_500], [10] * 9000])
def test_rows_from_the_end_are_the_rows(tmp_path: Path, lengths: list[int], torn: str) -> None:
    path = tmp_path / "m.jsonl"
    rows = [{"step": i, "text": "x" * length} for i, length in enumerate(lengths)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + torn)
    assert list(from_the_end(path)) == rows[::-1]
    assert list(rows_from(path)) == rows
    for share in (0.3, 0.5, 0.99):
        rest = list(rows_from(path, share))
        assert rest == rows[len(rows) - len(rest) :]
        place = share * path.stat().st_size
        ends = [line.end() for line in re.finditer(rb"\n", path.read_bytes())]
        due = [row for row, end in zip(rows, ends, strict=True) if end > place]
        assert rest == due or (rest == due[1:] and len(due[0]["text"]) >= 65_500)


def test_the_last_rows_of_a_long_file_are_read_alone_and_a_broken_one_is_named(tmp_path: Path) -> None:
    """64 GiB, most of them a hole."""
    path = tmp_path / "m.jsonl"
    path.touch()
    os.truncate(path, 1 << 36)
    with path.open("ab") as file:
        file.write(b'\n{"step": 7}\n')
    assert next(from_the_end(path)) == {"step": 7}
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}{"st\n{"step": 3}\n')
    rows = from_the_end(path)
    assert next(rows) == {"step": 3}
    with pytest.raises(DataError, match=r"m\.jsonl:2: not JSON"):
        next(rows)


def test_truncation_keeps_the_checkpoints_step_and_removes_rows_without_the_field(tmp_path: Path) -> None:
    file = JsonlFile(tmp_path / "m.jsonl")
    file.append([{"step": 0, "warm_start/step": k} for k in range(3)] + [{"step": s} for s in (1, 2, 3, 4)])
    before = file.path.read_bytes()
    assert file.truncate_after(2) == 2
    assert before.startswith(file.path.read_bytes())
    assert [row["step"] for row in read_jsonl(file.path)] == [0, 0, 0, 1, 2]
    assert file.truncate_after(-1) == 5
    assert file.path.read_bytes() == b""
    assert os.listdir(tmp_path) == ["m.jsonl"]
    file = JsonlFile(tmp_path / "m.jsonl")
    file.append([*({"step": 0, "warm_start/step": k} for k in range(4)), {"step": 0, "phase": "rl"}, {"step": 1}])
    assert file.truncate_after(1, "warm_start/step") == 4
    assert [row["warm_start/step"] for row in read_jsonl(file.path)] == [0, 1]


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(0, 70_000)), max_size=12), st.integers(-1, 14))
@settings(deadline=None, max_examples=60)
def test_truncation_keeps_every_due_row_in_the_files_order(given_rows: list[tuple[int, bool, int]], last: int) -> None:
    """Steps ascend by 0 .. 3; a row that is late has a step of any before it."""

    def is_late(row: Mapping[str, object]) -> bool:
        return row["late"] == 1

    step, rows = 0, []
    for number, late, length in given_rows:
        step += 0 if late else number
        rows.append({"step": max(0, step - number) if late else step, "late": int(late), "text": "x" * length})
    with tempfile.TemporaryDirectory() as folder:
        file = JsonlFile(Path(folder) / "m.jsonl")
        file.append(rows)
        with file.path.open("ab") as torn:
            torn.write(b'{"step": 0')
        kept = [row for row in rows if row["step"] < last or (row["step"] == last and not row["late"])]
        assert file.truncate_after(last, late=is_late, also=is_late) == len(rows) - len(kept)
        assert file.path.read_bytes() == b"".join(json.dumps(row).encode() + b"\n" for row in kept)


def test_truncation_reads_no_further_than_the_step_before(tmp_path: Path) -> None:
    """Behind 64 MiB that are no row: neither memory nor a parser meets them."""
    file = JsonlFile(tmp_path / "m.jsonl")
    file.path.touch()
    os.truncate(file.path, 1 << 26)
    with file.path.open("ab") as whole:
        whole.write(b'\n{"step": 6}\n{"step": 7}\n{"step": 8}\n{"step": 9')
    tracemalloc.start()
    removed, peak = file.truncate_after(7), tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (removed, file.path.stat().st_size) == (1, (1 << 26) + len('\n{"step": 6}\n{"step": 7}\n'))
    assert peak < 1 << 20


def test_truncating_a_file_that_is_not_there_removes_nothing(tmp_path: Path) -> None:
    assert JsonlFile(tmp_path / "m.jsonl").truncate_after(3) == 0
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("line", [b"{oops", b"[1]", b'{"loss": 1}', b'{"step": "1"}', b'{"step": true}', b"\xff"])
def test_a_bad_whole_line_is_named_by_file_and_line_and_nothing_is_removed(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 2}\n')
    content = path.read_bytes()
    with pytest.raises(DataError, match=r"m\.jsonl:2: "):
        read_jsonl(path)
    with pytest.raises(DataError, match=r"m\.jsonl:2: "):
        JsonlFile(path).truncate_after(0)
    assert path.read_bytes() == content


def test_no_rows_make_no_file_and_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the samples of a run with log.samples_per_step=0, and the ledger's lines of a step that ends no prompt."""
    file, synced = JsonlFile(tmp_path / "m.jsonl"), list[int]()
    monkeypatch.setattr("os.fsync", synced.append)
    file.append([])
    assert not file.path.exists()
    file.append([{"step": 1}])
    file.append(row for row in ())
    assert (file.path.read_text(), len(synced)) == ('{"step": 1}\n', 1)


def test_nan_never_reaches_a_file(tmp_path: Path) -> None:
    file = JsonlFile(tmp_path / "m.jsonl")
    with pytest.raises(ValueError, match="JSON compliant"):
        file.append([{"step": 1, "loss": float("nan")}])
    assert not file.path.exists()


# The progress display: plain lines that can be grepped, and a live panel on a terminal.
RL = {"phase": "rl", "step": 4, "reward/mean": 0.5, "loss": -0.00123, "seconds/step": 2.0, "tokens/rollout": 1000}
EQUAL = "groups/zero_advantage_fraction"
WHITENED = ["algorithm=reinforce", "algorithm.advantage_mean=none", "algorithm.whiten=true"]
WARM = {"phase": "warm_start", "step": 0, "warm_start/step": 20, "warm_start/loss": 0.75, "eval/accuracy": 0.25}


def _console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=terminal, width=100, color_system=None, legacy_windows=False), file


def test_plain_lines_are_exact() -> None:
    console, file = _console(terminal=False)
    with Progress(10, title="gspo", run_folder=Path("runs/a"), console=console) as progress:
        progress.note("making the model [in] runs/.cache")
        progress.phase("warm start", total=40)
        progress.step(WARM)
        progress.phase("rollout")
        progress.step(RL)
        progress.step({**RL, "step": 5, "loss": None, "eval/accuracy": 0.75, "seconds/step": 4.0, "checkpoint/step": 4})
        progress.step({**RL, "step": 10, EQUAL: 0.375})
        progress.step({**RL, "step": 10, EQUAL: 1.0})
    assert file.getvalue().splitlines() == [
        "making the model [in] runs/.cache",
        "warm_start 20/40 accuracy=0.25 loss=0.75",
        "step 4/10 reward=0.5 loss=-0.00123 seconds=2 tokens/s=500 eta=12s",
        "step 5/10 reward=0.5 accuracy=0.75 loss=not_finite seconds=4 tokens/s=250 eta=15s checkpoint=4",
        "step 10/10 reward=0.5 useful_groups=62% loss=-0.00123 seconds=2 tokens/s=500",
        "step 10/10 reward=0.5 useful_groups=0% loss=-0.00123 seconds=2 tokens/s=500",
    ]


def test_auto_is_live_on_a_terminal_alone() -> None:
    for terminal in (False, True):
        console, file = _console(terminal=terminal)
        with Progress(10, "auto", "gspo", console=console):
            pass
        assert ("╭" in file.getvalue()) is terminal


def test_the_live_panel_shows_the_state_of_the_run() -> None:
    console, file = _console(terminal=True)
    with Progress(10, "live", "gspo [tiny]", run_folder=Path("runs/a"), console=console) as progress:
        assert "starting" in file.getvalue()
        progress.note("a note [with brackets]")
        progress.phase("warm start", total=40)
        progress.step(WARM)
        progress.step({**RL, "reward/mean": 0.0, "checkpoint/step": 3})
        progress.step({**RL, "step": 5, "reward/mean": 1.0})
        progress.note("drawn again")
        assert "10s left" in file.getvalue()
    text = file.getvalue()
    assert "a note [with brackets]" in text
    last = text[text.rindex("╭") :]
    shown = ["gspo [tiny]", "step 5/10", "50 %", "done", "1.000  ▁█  0 to 1", "0.250  at warm_start 20/40"]
    for part in [*shown, "500  (2 s a step)", "step 3", "runs/a", "-0.00123"]:
        assert part in last, part


def test_the_panel_of_a_stopped_run_says_so_and_its_last_line_how_to_resume() -> None:
    """And the echo of Ctrl-C, two columns, fits after its last line: a line more would be left half drawn."""
    console, file = _console(terminal=True)
    with Progress(10, "live", console=console) as progress:
        progress.step(RL)
        progress.note("drawn again")
        assert "12s left" in file.getvalue()
        progress.stopped("stopped; --resume continues")
        progress.note("report: r.html")
    last = file.getvalue()[file.getvalue().rindex("╭") :]
    assert re.search("phase +stopped", last)
    assert "left" not in last
    assert last.splitlines()[-1].endswith("stopped; --resume continues")
    assert {len(line) for line in last.splitlines() if line[:1] in "╭│╰"} == {98}


def test_a_wide_panel_draws_accuracy_and_entropy_too() -> None:
    for width in (100, 120):
        file = io.StringIO()
        console = Console(file=file, force_terminal=True, width=width, color_system=None, legacy_windows=False)
        with Progress(10, "live", run_folder=Path("runs/a"), console=console) as progress:
            for step, value in ((1, 0.25), (2, 0.75)):
                progress.step({"phase": "rl", "step": step, "entropy": 1 - value, "eval/accuracy": value})
        last = file.getvalue()[file.getvalue().rindex("╭") :]
        curves = ("0.750  ▁█  0.25 to 0.75  at step 2/10", "0.250  █▁  0.25 to 0.75")
        assert [curve in last for curve in curves] == [width == 120] * 2
        assert "0.750" in last
        assert "runs/a/report.html  (open it in a browser)" in last


def test_the_panel_says_that_no_group_teaches() -> None:
    console, file = _console(terminal=True)
    with Progress(10, "live", console=console) as progress:
        progress.step({**RL, EQUAL: 1.0})
    assert "0% of the groups give a gradient: each group's rewards are equal" in file.getvalue()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ([], True),
        (["algorithm=dapo"], True),
        *[
            ([f"algorithm={name}"], False)
            for name in ("spo", "reinforce", "reinforce_plus_plus", "remax", "ppo", "vapo", "distill")
        ],
        (["algorithm.advantage_mean=moving", "algorithm.baseline_decay=0.9", "algorithm.advantage_std=none"], False),
        (["algorithm=grpo", "algorithm.nll_coefficient=0.1"], False),
        (["algorithm=reinforce", "algorithm.advantage_mean=none"], False),
        (["algorithm=reinforce", "algorithm.advantage_mean=none", "algorithm.advantage_std=group"], True),
        (WHITENED, False),
    ],
)
@pytest.mark.parametrize("mode", ["live", "plain"])
def test_groups_of_equal_rewards_may_teach(keys: list[str], said: bool, mode: Literal["live", "plain"]) -> None:
    console, file = _console(terminal=mode == "live")
    section = load_config("tiny_cpu", keys).algorithm
    with Progress(10, mode, console=console, needs_differences=section.needs_differences) as progress:
        progress.step({**RL, EQUAL: 1.0})
    assert ("useful_groups=0%" in file.getvalue() or "0% of the groups give a gradient" in file.getvalue()) is said


@pytest.mark.parametrize(
    ("equal", "warned_after"),
    [
        ([1.0] * 9, 5),
        ([1, 1, 1, 1, 0.5, 1, 1, 1, 1], None),
        ([None, *[1.0] * 5], 6),
        ([1.0] * 5 + [0.0] + [1.0] * 5, 5),
    ],
)
def test_steps_that_teach_nothing_are_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, equal: list[float | None], warned_after: int | None
) -> None:
    console, file = _console(terminal=False)
    warned = []
    with closing(Recorder(tmp_path, LogSection(), Progress(10, console=console))) as recorder:
        for step, share in enumerate(equal, 1):
            asyncio.run(recorder.write({"phase": "rl", "step": step, **({} if share is None else {EQUAL: share})}))
            warned.append(caplog.text.count("all advantages were 0 for 5 steps"))
    assert warned == [int(warned_after is not None and step >= warned_after) for step in range(1, len(equal) + 1)]
    assert ("warm_start.steps" in caplog.text) == (warned_after is not None)
    assert "all advantages" not in file.getvalue(), "stderr has it from the logger"


def test_gradients_of_0_with_other_rewards_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    console, _ = _console(terminal=False)
    warned, norms = [], [0.0, 0.0, 1e-9, *[0.0] * 12]
    with closing(Recorder(tmp_path, LogSection(), Progress(20, console=console))) as recorder:
        for step, norm in enumerate(norms, 1):
            asyncio.run(recorder.write({"phase": "rl", "step": step, EQUAL: 0.25, "grad_norm": norm}))
            warned.append(caplog.text.count("gradient norm was exactly 0 for 5 steps although rewards differed"))
    assert warned == [0] * 7 + [1] * 8


def test_a_critic_that_teaches_equal_groups_is_not_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    console, _ = _console(terminal=False)
    with closing(Recorder(tmp_path, LogSection(), Progress(10, console=console))) as recorder:
        for step in range(9):
            row = {"phase": "rl", "step": step, EQUAL: 1.0, "advantage/mean": 0.0, "advantage/std": 0.1}
            asyncio.run(recorder.write(row))
    assert not caplog.text


@pytest.mark.parametrize(("error", "word"), [(KeyboardInterrupt, "interrupted"), (RuntimeError, "failed")])
def test_the_last_panel_says_how_the_run_ended(error: type[BaseException], word: str) -> None:
    console, file = _console(terminal=True)
    with pytest.raises(error), Progress(10, "live", console=console):
        raise error
    assert word in file.getvalue()[file.getvalue().rindex("╭") :]
    assert file.getvalue().endswith("\x1b[?25h"), "the cursor is shown again"
