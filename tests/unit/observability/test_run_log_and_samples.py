"""The run log and the sample completions."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
import time
import warnings
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from rl_megatron.config.sections.jobs import LogSection
from rl_megatron.data.trajectories import single_turns
from rl_megatron.durable import in_hand
from rl_megatron.errors import DataError
from rl_megatron.observability.files import read_jsonl
from rl_megatron.observability.log import run_log
from rl_megatron.observability.progress import Progress
from rl_megatron.observability.recorder import Recorder
from rl_megatron.observability.samples import (
    SampleRow,
    SamplesWriter,
    SampleTurn,
    latest_samples,
    read_samples,
    samples_between,
)
from rl_megatron.types import Completion, Prompt, RolloutGroup, Span


def test_who_waits_for_a_thread_that_writes_the_log_waits_for_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
            while waits.ident not in in_hand() and time.monotonic() < until:
                waits.join(0.01)
            assert in_hand()[waits.ident].path == tmp_path / "log.txt"
        finally:
            handler.release()
        waits.join()
        assert waits.ident not in in_hand()


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
    talk = replace(_sample(1), turns=(SampleTurn(read="", said="<2"), SampleTurn(read="Tool: 7", said=">")))
    SamplesWriter(tmp_path).write([_sample(1), talk])
    path = tmp_path / "samples.jsonl"
    assert read_samples(path) == [_sample(1), talk]
    assert ["turns" in json.loads(line) for line in path.read_text().splitlines()] == [False, True]
    assert list(latest_samples(path)) == [talk, _sample(1)]


@pytest.mark.parametrize("turns", ["7", "[7]", '[{"read": ""}]', '[{"read": "", "said": null}]'])
def test_turns_that_are_none_are_named(tmp_path: Path, turns: str) -> None:
    row = json.dumps({"step": 4, "prompt": "", "completion": "", "answer": "", "reward": 1})
    (tmp_path / "samples.jsonl").write_text(f'{row[:-1]}, "turns": {turns}}}\n')
    with pytest.raises(DataError, match=r"a row of step 4 .* a sample has step, prompt"):
        read_samples(tmp_path / "samples.jsonl")


@pytest.mark.parametrize(
    "row", ['{"step": 4}', '{"step": 4, "prompt": 1, "completion": "", "answer": "", "reward": 1}']
)
def test_rows_that_are_no_samples_are_named(tmp_path: Path, row: str) -> None:
    (tmp_path / "samples.jsonl").write_text(row + "\n")
    with pytest.raises(DataError, match=r"samples\.jsonl: a row of step 4 .* a sample has step, prompt"):
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
    groups = [_group("a", (0, 1, 0.5)), _group("b", (1, 0, 0)), _group("c", (0, 0, 0))]
    log = LogSection(tensorboard=False, samples_per_step=2, samples_per_group=2)
    with closing(Recorder(tmp_path, log, Progress(1, "plain"))) as recorder:
        recorder.write_samples(3, groups)
    path = tmp_path / "samples.jsonl"
    assert [(row.prompt, row.reward) for row in read_samples(path)] == [("a", 0), ("a", 1), ("b", 1), ("b", 0)]


def test_a_prompt_of_messages_is_shown_whole(tmp_path: Path) -> None:
    """Of an environment, whose prompt's own text is that of the last message alone."""
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
    said = [{"role": "developer", "content": "Be brief."}, called, {"role": "tool", "content": "7"}]
    (group,) = [_group("7", (1,))]
    group = replace(group, prompt=replace(group.prompt, messages=tuple(said)))
    with closing(Recorder(tmp_path, LogSection(tensorboard=False), Progress(1, "plain"))) as recorder:
        recorder.write_samples(3, [group])
    (row,) = read_samples(tmp_path / "samples.jsonl")
    assert row.prompt == 'developer: Be brief.\n\nassistant: [{"function": {"name": "add"}}]\n\ntool: 7'


def test_a_row_that_is_written_again_is_of_the_process_that_made_the_step(tmp_path: Path) -> None:
    log, row = LogSection(tensorboard=False), {"step": 1, "phase": "rl"}
    before = {"devices/learner": 8, "devices/engines": 8}
    with closing(Recorder(tmp_path, log, Progress(2, "plain"), lambda: before)) as recorder:
        row = asyncio.run(recorder.write(row))
    with closing(Recorder(tmp_path, log, Progress(2, "plain"), lambda: {"devices/learner": 4}, fresh=False)) as resumed:
        asyncio.run(resumed.write({**row, "eval/accuracy": 0.5}, again=True))
    assert read_jsonl(tmp_path / "metrics.jsonl") == [{"step": 1, "phase": "rl", **before, "eval/accuracy": 0.5}]


async def test_the_loop_turns_while_rows_are_written_and_they_keep_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk that answers only once the loop has gone on; a caller that is cancelled leaves no part of a row."""
    synced, fsync = threading.Event(), os.fsync

    def slow(descriptor: int) -> None:
        assert synced.wait(10.0)
        fsync(descriptor)

    monkeypatch.setattr("rl_megatron.observability.files.os.fsync", slow)
    with closing(Recorder(tmp_path, LogSection(tensorboard=False), Progress(3, "plain"))) as recorder:
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
    recorder = Recorder(tmp_path, LogSection(tensorboard=False), Progress(1, "plain"))
    recorder.write_samples(1, [_group("a", (0, 1))])
    refused = f"No space left on device: '{tmp_path}/metrics.jsonl'"
    with pytest.raises(OSError, match=refused):
        asyncio.run(recorder.write({"step": 1, "phase": "rl"}))
    with pytest.raises(OSError, match=refused):
        recorder.close()
    held = [os.path.realpath(each) for each in Path("/proc/self/fd").iterdir()]
    assert str(tmp_path / "samples.jsonl") not in held
    assert not [one for one in threading.enumerate() if one.name.startswith("timeline")]
