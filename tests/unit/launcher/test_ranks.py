"""Both ends of a rank's stream, what each rank is sent, the phases of a push, and which rank is behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import threading
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from launcher import wire
from launcher.controller import group as group_module
from launcher.controller.group import (
    Failure,
    RankProcess,
    SlowestRank,
    Watchdog,
    WorkerGroup,
    WorkerHandle,
    record_kernels,
)
from launcher.controller.roles import BatchCalls, LearnerGroup, WeightGroup
from launcher.processes import limits, stacks
from launcher.processes.stacks import Frame, Stack, explain, read
from launcher.wire import Hello
from launcher.worker.models import RankModels
from launcher.worker.process import reporting_errors, send_heartbeats
from rl_megatron.algorithms.losses import CrossEntropy
from rl_megatron.config.io import load_config
from rl_megatron.data.packing import Packer
from rl_megatron.data.rows import OwnLayers, RankRows, Share
from rl_megatron.errors import CheckpointError, CorruptionError, RLMegatronError, SyncError, WorkerFailure
from rl_megatron.interfaces import ForwardPass
from rl_megatron.observability.timeline import RankTimed
from rl_megatron.placement.names import LEARNER, file_stem
from rl_megatron.types import Batch, ParallelDims, Samples, WeightUpdate
from rl_megatron.weights.checks.reports import ChecksumReport
from tests.samples import sequences_of
from tests.virtual_time import run_at_once

LARGE = 50_000_000
LIMIT = 300.0


class Process(RankProcess):
    """A rank that was killed once it hangs up."""

    def __init__(self, rank: int, connection: Connection) -> None:
        super().__init__(connection, Hello(rank=rank, node="here", pid=rank, store="", step=""), Path())

    async def ending(self) -> tuple[str, bool]:
        return "was killed by signal 9", True


@contextlib.asynccontextmanager
async def ranks(count: int = 1) -> AsyncIterator[tuple[WorkerGroup, list[Connection]]]:
    """Both ends of ranks' streams."""
    failure, streams = Failure(), [Pipe() for _ in range(count)]
    handles = [WorkerHandle(Process(rank, ours), failure, None) for rank, (ours, _) in enumerate(streams)]
    try:
        async with asyncio.timeout(LIMIT):
            yield WorkerGroup(handles, failure), [theirs for _, theirs in streams]
    finally:
        for _, theirs in streams:
            theirs.close()
        await asyncio.gather(*(handle.stop() for handle in handles))
    assert all(ours.closed for ours, _ in streams)


def call(handle: WorkerHandle, name: str, *arguments: Any) -> asyncio.Future[Any]:
    return handle.send(name, wire.pack((name, arguments)))


def answers(stream: Connection, value: object) -> Any:
    """Hear a call, and answer it. Returns what was heard."""
    heard = wire.unpack(wire.receive(stream))
    wire.send(stream, wire.pack(("ok", value, None)))
    return heard


async def test_only_a_rank_that_was_asked_can_make_no_progress() -> None:
    """A rollout by servers or a slow reward leaves the learner's ranks without work for as long as it takes."""
    async with ranks() as (group, (rank,)):
        (handle,) = group.workers
        ready = call(handle, "prepare")
        await asyncio.to_thread(answers, rank, None)
        await ready
        for _ in range(1000):
            handle.tick()
        assert (handle.still, handle.quiet) == (0, 1000)
        answer = call(handle, "train_step")
        handle.tick()
        assert handle.still == 1
        await asyncio.to_thread(answers, rank, None)
        await answer
        handle.tick()
        assert handle.still == 0


async def test_a_large_answer_that_arrives_slowly_is_no_silence() -> None:
    def rank_sends(part: bytes) -> None:
        while part:
            part = part[os.write(rank.fileno(), part) :]

    async with ranks() as (group, (rank,)):
        (handle,) = group.workers
        ready = call(handle, "prepare")
        await asyncio.to_thread(answers, rank, None)
        await ready
        answer = call(handle, "generate")
        await asyncio.to_thread(wire.receive, rank)
        large = b"".join(wire.parts(wire.pack(("ok", np.arange(300_000), None))))
        for first in range(0, len(large), 400_000):  # heartbeats wait behind it
            for _ in range(100):
                handle.tick()
            assert (handle.quiet, handle.still) == (100, 100)
            await asyncio.to_thread(rank_sends, large[first : first + 400_000])
            async with asyncio.timeout(20):
                while handle.quiet:
                    await asyncio.sleep(0)
            assert handle.still == 0
        assert (await answer).sum() == 300_000 * 299_999 // 2


class _Unsound(BaseException):
    """As torch's CheckpointException, which is no Exception."""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (_Unsound("no space"), r"rank 0 \(pid 0 on here\) raised .*_Unsound: no space\nTraceback"),
        (SystemExit(3), r"raised SystemExit: 3\n"),
        (EOFError("a torn file"), r"raised EOFError: a torn file\n"),
        (OSError(27, "File too large"), r"(?s)raised OSError: \[Errno 27\] File too large\n.*\(ulimit -f\)$"),
        (RuntimeError("can't start new thread"), r"(?s)raised RuntimeError.*\(ulimit -u\) or of memory"),
        (CheckpointError("learner/ is torn"), r"^learner/ is torn$"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
async def test_the_controller_hears_whatever_ends_a_rank(error: BaseException, said: str) -> None:
    async with ranks() as (group, (rank,)):
        with reporting_errors(rank):
            raise error
        with pytest.raises(RLMegatronError, match=said):
            await group._failure.known


async def test_a_dead_rank_is_named_and_not_the_push_that_it_broke() -> None:
    """The rank that waited for it may say so before the news of its end."""
    async with ranks() as (group, (rank,)):
        with reporting_errors(rank):
            raise SyncError("rank 0 waited for 8 bytes from rank 1")
        while not group.workers[0]._raised:
            await asyncio.sleep(0)
        group._failure.report(WorkerFailure("rank 1 was killed by signal 9"), at_once=True)
        with pytest.raises(WorkerFailure, match="rank 1 was killed by signal 9"):
            await group._failure.known


def test_a_rank_that_can_no_longer_say_that_it_lives_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def living() -> None:
        raise RuntimeError("unable to start watchdog thread")

    monkeypatch.setattr("launcher.processes.stacks.postpone_stack_dump", living)
    ours, theirs = Pipe()
    send_heartbeats(theirs)
    theirs.close()
    heard = []
    with contextlib.suppress(EOFError):
        while True:
            heard.append(wire.unpack(wire.receive(ours)))
    assert [status for status, *_ in heard] == ["alive", "raised"]
    assert "unable to start watchdog thread" in heard[-1][1]


def test_a_rank_answers_for_no_model_that_it_does_not_hold() -> None:
    """The policy stands for a reference that has no ranks of its own, and for nothing else."""
    rank = object.__new__(RankModels)
    rank._scorers, rank._learners = {"policy": cast(Any, "the policy")}, {}
    assert rank._scorer("reference") == "the policy"
    for ask in (rank._scorer, rank._learner):
        with pytest.raises(RLMegatronError, match="holds no 'teacher'"):
            ask("teacher")


def test_the_limit_of_open_files_is_raised_to_the_hard_one() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(64, before[1]), before[1]))
    try:
        most = min(before[1], 1 << 20)
        assert limits.describe_open_files().endswith(f"so up to {(most - 85) // 11} ranks")
        assert limits.problem_of_ranks((most - 85) // 11) == ""
        assert "each of them opens about" in limits.problem_of_ranks((most - 85) // 11 + 1)
        assert limits.problem_of_controller(0, (most - 256) % 3, (most - 256) // 3) == ""
        assert limits.problem_of_controller(most - 257, 1, 0) == ""
        assert "or lower these keys" in limits.problem_of_controller(most - 257, 2, 0)
        assert limits.raise_open_files() == most
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(before[1], 1 << 20), before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


# The controller's streams to its ranks: the event loop serves all of them, and waits for none.
async def test_a_rank_that_does_not_read_holds_up_nobody_and_its_arrays_are_not_copied() -> None:
    async with ranks(2) as (group, streams):
        array = np.zeros(LARGE, np.uint8)
        waiting = [call(group.workers[0], "hold", array), call(group.workers[0], "score", 1)]
        for number in range(100):
            asked = asyncio.ensure_future(group.call("step", {1: (number,)}))
            assert await asyncio.to_thread(answers, streams[1], -number) == ("step", (number,))
            assert await asked == [-number]
        assert not waiting[0].done()
        array[-1] = 7  # still to be sent
        name, (found,) = await asyncio.to_thread(answers, streams[0], "held")
        assert (name, found.nbytes, found.sum()) == ("hold", LARGE, 7)
        assert await asyncio.to_thread(answers, streams[0], "scored") == ("score", (1,))
        assert await group.gather(waiting) == ["held", "scored"]


async def test_ranks_meet_once_none_works_alone() -> None:
    """Else the others would wait in a collective for one that samples, as long as that takes."""
    async with ranks(2) as (group, streams):
        first = call(group.workers[1], "generate")
        met = asyncio.ensure_future(group.call_collective("finalize"))
        await asyncio.to_thread(wire.receive, streams[1])
        second = call(group.workers[0], "generate")  # before the first is answered
        passes = asyncio.ensure_future(group.call_all("backward"))
        await asyncio.sleep(0)
        wire.send(streams[1], wire.pack(("ok", "one", None)))
        heard = [[(await asyncio.to_thread(answers, streams[0], "two"))[0]], list[str]()]
        for _ in range(2):
            for stream, names in zip(streams, heard, strict=True):
                names.append((await asyncio.to_thread(answers, stream, 0))[0])
        assert heard == [["generate", "backward", "finalize"], ["backward", "finalize"]]
        assert (await first, await second, await passes, await met) == ("one", "two", [0, 0], [0, 0])


async def test_large_answers_of_all_ranks_arrive_between_small_ones() -> None:
    sent = np.random.default_rng(0).integers(0, 255, (4, LARGE // 4), np.uint8)
    async with ranks(4) as (group, streams):
        asked = asyncio.ensure_future(group.call_all("generate"))
        await asyncio.gather(*[asyncio.to_thread(answers, stream, sent[rank]) for rank, stream in enumerate(streams)])
        for rank, (found, stream) in enumerate(zip(await asked, streams, strict=True)):
            assert np.array_equal(found, sent[rank])
            wire.send(stream, wire.pack(("alive", (f"rank {rank}", 3), None)))
        while {worker.doing for worker in group.workers} != {f"rank {rank}" for rank in range(4)}:
            await asyncio.sleep(0)


async def test_a_rank_that_dies_with_a_large_message_half_sent_is_named_and_the_rest_is_dropped() -> None:
    async with ranks(2) as (group, streams):
        array = np.zeros(LARGE, np.uint8)
        held, asked = weakref.ref(array), [call(group.workers[0], "hold", array), call(group.workers[1], "hold", None)]
        del array
        await asyncio.to_thread(os.read, streams[0].fileno(), 1_000_000)
        streams[0].close()
        with pytest.raises(WorkerFailure, match=r"^rank 0 \(pid 0 on here\) was killed by signal 9$"):
            await group.gather(asked)
        call(group.workers[0], "hold", np.zeros(LARGE, np.uint8))  # as of one who does not know yet
        gc.collect()
        assert held() is None


async def test_the_error_that_ended_a_rank_is_heard_before_its_end() -> None:
    async with ranks() as (group, (rank,)):
        wire.send(rank, wire.pack(("alive", ("backward" * 18_000, 1), None)))  # more than one turn reads
        wire.send(rank, wire.pack(("erred", "KeyError: planted", None)))
        rank.close()
        with pytest.raises(WorkerFailure, match=r"^rank 0 \(pid 0 on here\) raised KeyError: planted$"):
            await group._failure.known


@pytest.mark.parametrize("answered", [False, True])
async def test_the_end_of_a_rank_that_was_asked_to_end_is_an_error_unless_it_answered(answered: bool) -> None:
    """Else the others would wait for it as long as they may."""
    async with ranks() as (group, (rank,)):
        (handle,) = group.workers
        closing = call(handle, "close")
        if answered:
            await asyncio.to_thread(answers, rank, None)
            await closing
        else:
            await asyncio.to_thread(wire.receive, rank)
        rank.close()
        while handle._saying is None or not handle._saying.done():
            await asyncio.sleep(0)
        assert group._failure.known.done() == (not answered)


@pytest.fixture
def _many_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits.raise_open_files()
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("_many_files")
async def test_384_ranks_need_no_thread() -> None:
    before = threading.active_count()
    async with ranks(384) as (group, streams):
        asked = asyncio.ensure_future(group.call_all("step", 1))
        while not streams[-1].poll():
            await asyncio.sleep(0)
        assert threading.active_count() == before
        for rank, stream in enumerate(streams):
            answers(stream, rank)
        assert await asked == list(range(384))
        assert threading.active_count() == before


# What each rank is sent of a batch, and that it is sent once a step.
DIMS = ParallelDims(tp=2, pp=2, dp=2)
FIRST = (0, 2)  # rank of each data-parallel rank


class Rank:
    """A rank that has what its call's message brings."""

    def __init__(self, rank: int, of: Stages) -> None:
        self.rank, self._of = rank, of

    def call(self, name: str, *arguments: Any) -> Any:
        name, given = wire.unpack(wire.pack((name, arguments)))
        self._of.heard.append((name, self.rank))
        passes: Sequence[ForwardPass] = ()
        if name in ("score", "backward"):
            passes, self._of.shares[self.rank], *_ = given
        last_stage = self.rank >= 4 and self.rank % 2 == 0
        scored = {"logprobs": [f"scores of {self.rank}"]} if last_stage else None
        return [(scored, float(self.rank)) for _ in passes]


class Stages:
    """Two pipeline stages of two data-parallel ranks of two tensor-parallel ranks, whose MoE layers alternate."""

    def __init__(self) -> None:
        self.shares: dict[int, Share | None] = {}
        self.heard: list[tuple[str, int]] = []
        self.workers = [Rank(rank, self) for rank in range(8)]

    async def call_all(self, name: str, role: str) -> list[OwnLayers]:
        assert (name, role) == ("column_layers", "policy")
        return [{"routes": (0, 2)}] * 4 + [{"routes": (1, 3)}] * 4

    def send(self, name: str, arguments: Mapping[int, tuple[Any, ...]]) -> list[Any]:
        return [self.workers[rank].call(name, *given) for rank, given in arguments.items()]

    async def gather(self, answers: list[Any]) -> list[Any]:
        return answers


def samples(num_layers: int | None = None) -> Samples:
    g, lengths = torch.Generator().manual_seed(0), torch.tensor([5, 3, 4, 6])
    n, extra = int(lengths.sum()), {}
    if num_layers is not None:
        extra["routes"] = torch.randint(0, 8, (n, num_layers, 2), generator=g).to(torch.uint8)
    logprobs = -torch.rand(n, generator=g)
    return sequences_of(
        lengths,
        input_ids=torch.arange(n),
        targets=torch.arange(n) + 1,
        mask=torch.arange(n) % 3 > 0,
        advantages=torch.rand(n, generator=g),
        rollout_logprobs=logprobs,
        old_logprobs=logprobs.clone(),
        extra=extra,
    )


def packed(whole: Samples) -> Batch:
    return Packer(dims=DIMS, max_tokens=6).pack(whole)


def learner_of(stages: Stages) -> LearnerGroup:
    group = cast(WorkerGroup, stages)
    return LearnerGroup(group, "policy", BatchCalls(group, DIMS))


def score(given: Batch) -> Stages:
    stages = Stages()
    said = asyncio.run(learner_of(stages).score(given, frozenset({"logprobs"})))
    assert said == {"logprobs": [["scores of 4"], ["scores of 6"]]}
    return stages


def shares_of(stages: Stages) -> list[Share]:
    return [share for share in (stages.shares[rank] for rank in FIRST) if share is not None]


def test_the_first_rank_of_each_data_parallel_rank_is_sent_its_rows_and_the_others_nothing() -> None:
    given = packed(samples())
    stages = score(given)
    assert [rank for rank, share in stages.shares.items() if share is not None] == list(FIRST)
    for share, row in zip(shares_of(stages), given.micro_batches, strict=True):
        found = RankRows().micro_batches(share)
        assert [m.input_ids.tolist() for m in found] == [m.input_ids.tolist() for m in row]


def test_a_rank_keeps_the_routes_of_its_own_layers() -> None:
    given = packed(samples(4))
    for share, row in zip(shares_of(score(given)), given.micro_batches, strict=True):
        for found, whole in zip(RankRows().micro_batches(share, {"routes": (1, 3)}), row, strict=True):
            assert torch.equal(found.extra["routes"], whole.extra["routes"][:, [1, 3]])
    with pytest.raises(RLMegatronError, match="have 3 layers, but the learner's model has 4"):
        score(packed(samples(3)))


def test_routes_are_sent_to_the_policy_alone() -> None:
    stages = Stages()
    group = cast(WorkerGroup, stages)
    reference = LearnerGroup(group, "reference", BatchCalls(group, DIMS))
    asyncio.run(reference.score(packed(samples(4)), frozenset({"logprobs"})))
    assert [one.extra for share in shares_of(stages) for one in RankRows().micro_batches(share)] == [{}] * 4


async def test_columns_are_sent_once_a_step_and_freed_at_its_end() -> None:
    """A pass over rows that ranks hold is their numbers; models on the same ranks share what these hold."""
    stages, whole = Stages(), samples()
    group = cast(WorkerGroup, stages)
    calls = BatchCalls(group, DIMS)
    policy, critic = (LearnerGroup(group, "policy", calls) for _ in range(2))
    sent: list[list[int]] = []
    trained = packed(replace(whole, advantages=2 * whole.advantages))
    for model, batch in ((policy, packed(whole)), (critic, packed(whole))):
        await model.score(batch, frozenset({"logprobs"}))
        sent.append([len(share) for share in shares_of(stages)])
    for _ in range(2):
        await calls.call("backward", (), trained, CrossEntropy(), to_score=False)
        sent.append([len(share) for share in shares_of(stages)])
    await policy.free_step()
    await critic.free_step()
    first, second, loss, again = sent
    assert all(a < b for a, b in zip(second, first, strict=True))
    assert all(a < b for a, b in zip(again, loss, strict=True))
    assert [rank for name, rank in stages.heard if name == "free_step"] == list(range(8))
    for share in shares_of(stages):
        with pytest.raises(RLMegatronError, match="which it was not sent"):
            RankRows().micro_batches(share)


async def test_rows_are_freed_though_later_shares_could_not_be_computed() -> None:
    stages, whole = Stages(), packed(samples())
    learner = learner_of(stages)
    await learner.free_step()
    assert not stages.heard
    await learner.score(whole, frozenset({"logprobs"}))
    with pytest.raises(IndexError):
        await learner.score(replace(whole, sequences=()), frozenset({"logprobs"}))
    await learner.free_step()
    await learner.free_step()
    assert [rank for name, rank in stages.heard if name == "free_step"] == list(range(8))


async def test_passes_asked_at_once_find_what_the_one_before_brought() -> None:
    stages, whole = Stages(), packed(samples())
    learner, want = learner_of(stages), frozenset({"logprobs"})
    await asyncio.gather(*(learner.score(whole, want) for _ in range(2)))
    held = RankRows()
    with pytest.raises(RLMegatronError, match=r"'input_ids' of rows 3 of batch 1, 1 in all, which it was not sent"):
        held.micro_batches(shares_of(stages)[0])


async def test_of_many_ranks_each_eighth_that_is_ready_is_told() -> None:
    told: list[str] = []
    answers: list[asyncio.Future[None]] = [asyncio.get_running_loop().create_future() for _ in range(17)]
    group_module._counted(answers, "critic", told.append)
    for answer in answers:
        answer.set_result(None)
        await asyncio.sleep(0)
    assert told == [f"{ready} of 17 critic ranks are ready" for ready in (*range(2, 17, 2), 17)]


async def test_ranks_are_told_the_files_of_their_kernels_and_those_not_written_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked: dict[str, Any] = {}

    async def ask(name: str, arguments: Mapping[int, tuple[Any, ...]]) -> list[str]:
        asked[name] = arguments
        return ["no room"] * len(arguments)

    ranks = [SimpleNamespace(role="critic", rank=rank) for rank in range(3)]
    async with record_kernels([cast(Any, SimpleNamespace(workers=ranks, call=ask))], tmp_path):
        assert asked == {"begin_kernels": {0: ()}}
    assert asked["end_kernels"] == {0: (tmp_path / f"{file_stem('critic', 0)}.json.gz",)}
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warned == ["kernels were not written: no room"]  # of a run log in force, INFO is heard too


class Watched:
    """A rank as the watchdog knows it; a stopped one writes its stack once it is woken."""

    role, ready, pending_call, still, beats, doing = LEARNER, True, None, 0, 5, "no call"

    def __init__(self, rank: int, quiet: int, folder: Path) -> None:
        self.rank, self.quiet, self.process, self.who = rank, quiet, self, f"rank {rank}"
        self.woken, self._file = 0, folder / f"{file_stem(LEARNER, rank)}.txt"

    def tick(self) -> None:
        self.quiet += 1 if self.quiet else 0

    def dump(self) -> None:
        if not self.quiet:
            self._file.write_text(BEHIND)

    async def wake(self) -> None:
        self.woken += 1
        self._file.write_text(BEHIND)


def test_a_silent_rank_is_woken_for_its_stack_and_ends_the_run(tmp_path: Path) -> None:
    said: list[WorkerFailure] = []
    failure = SimpleNamespace(report_first=lambda: None, report=lambda error, **_: said.append(error))
    ranks = [Watched(0, 0, tmp_path), Watched(1, 50, tmp_path), Watched(2, 10, tmp_path)]
    config = load_config("tiny_cpu", ["learner.timeout_seconds=120"])
    run_at_once(Watchdog(cast(Any, ranks), cast(Any, failure), config, tmp_path).watch())
    (error,) = said
    assert str(error).startswith("rank 1 has sent no heartbeat for 60 s, half of learner.timeout_seconds")
    assert [rank.woken for rank in ranks] == [0, 1, 1]
    assert (tmp_path / "controller.txt").exists()


# Two phases of a push over ranks whose answers are given.
class TwoRanks:
    """Rank 1 stages corrupted weights so many times."""

    def __init__(self, corrupted: int) -> None:
        self.calls: list[tuple[str, int]] = []
        self._corrupted = corrupted

    async def call_all(self, name: str, version: int, beside: bool = False) -> list[Any]:
        self.calls.append((name, version))
        if name == "send":
            sent = WeightUpdate(version=version, num_bytes=3, seconds=2.0)
            return [(sent, ChecksumReport(rows=[], seconds=0.0)), SyncError("rank 1 is alone")][
                : 1 + bool(self._corrupted)
            ]
        if name == "commit":
            return [None, None]
        good = [
            WeightUpdate(version=version, num_bytes=b, seconds=s, verify_seconds=s / 4) for b, s in ((3, 2.0), (4, 1.0))
        ]
        self._corrupted -= 1
        return [good[0], CorruptionError("layer 3 on rank 1")] if self._corrupted >= 0 else good


def push(ranks: TwoRanks) -> WeightUpdate:
    return asyncio.run(WeightGroup(cast(WorkerGroup, ranks)).push(5))


def test_every_rank_stages_before_any_commits_and_corrupted_weights_move_once_more() -> None:
    ranks = TwoRanks(corrupted=0)
    assert push(ranks) == WeightUpdate(version=5, num_bytes=7, seconds=2.0, verify_seconds=0.5)
    assert ranks.calls == [("stage", 5), ("commit", 5)]
    ranks = TwoRanks(corrupted=1)
    assert push(ranks).num_bytes == 3 + 3 + 4
    assert ranks.calls == [("stage", 5), ("stage", 5), ("commit", 5)]
    ranks = TwoRanks(corrupted=2)
    with pytest.raises(CorruptionError, match="layer 3 on rank 1"):
        push(ranks)
    assert ranks.calls == [("stage", 5), ("stage", 5)]


def test_shards_are_sent_by_every_rank_or_the_error_of_one_is_raised() -> None:
    for corrupted in (0, 1):
        group = WeightGroup(cast(WorkerGroup, TwoRanks(corrupted)))
        with pytest.raises(SyncError, match="rank 1 is alone") if corrupted else contextlib.nullcontext():
            update, (_,) = asyncio.run(group.send(5))
            assert update.num_bytes == 3


# Who is behind: by stacks as the interpreter writes them, and by the seconds of ranks' passes.
HUNG = """Timeout (0:00:27)!
Thread 0x00007f01 (most recent call first):
  File "/x/queue.py", line 1 in get

Thread 0x00007f99 (most recent call first):
  File "/x/old.py", line 9 in long_ago

Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/selectors.py", line 468 in select

Current thread 0x00007f99 (most recent call first):
  File "/e/site-packages/torch/distributed/distributed_c10d.py", line 3098 in all_reduce
  File "/e/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/e/site-packages/megatron/core/parallel.py", line 7 in reduce
  File "/w/rl_megatron/learner/forward.py", line 160 in reduce_outputs
  File "/w/launcher/worker/process.py", line 120 in _serve
"""
BEHIND = """Current thread 0x00007f99 (most recent call first):
  File "/home/me/my_hooks.py", line 3 in slow
  File "/w/rl_megatron/learner/megatron.py", line 130 in train_step
"""


def test_a_rank_in_a_collective_is_told_from_one_that_is_not() -> None:
    waiting, behind = read(HUNG), read(BEHIND)
    assert waiting is not None
    assert behind is not None
    assert waiting.collective == "all_reduce"
    assert waiting.place == "rl_megatron/learner/forward.py:160 in reduce_outputs"
    assert behind.collective is None
    assert behind.place == "/home/me/my_hooks.py:3 in slow, by rl_megatron/learner/megatron.py:130 in train_step"
    assert explain({0: waiting, 1: behind, 2: waiting, 3: None}) == (
        [1, 3],
        "rank 0, 2 waits in all_reduce at rl_megatron/learner/forward.py:160 in reduce_outputs; "
        "rank 1 is at /home/me/my_hooks.py:3 in slow, by rl_megatron/learner/megatron.py:130 in train_step; "
        "rank 3 gave no stack",
    )


def test_nobody_is_behind_where_all_wait_or_none_does() -> None:
    waiting, behind = read(HUNG), read(BEHIND)
    assert explain({0: waiting, 1: waiting})[0] == []
    assert explain({0: behind, 1: behind})[0] == []


def test_a_wait_for_a_collective_under_way_counts_as_one(tmp_path: Path) -> None:
    file = tmp_path / "overlap.py"
    file.write_text("def finish(handle):\n    handle.wait()\n")
    stack = read(f'Current thread 0x01 (most recent call first):\n  File "{file}", line 2 in finish\n')
    assert stack == Stack(frames=(Frame(file=str(file), line=2, name="finish"),), collective="a collective under way")
    assert read("") is None


def test_files_with_nothing_in_them_go(tmp_path: Path) -> None:
    for name, text in (("first/rank-0.txt", ""), ("first/rank-1.txt", ""), ("second/rank-0.txt", "Thread")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    stacks.remove_empty_files(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["second"]
    (tmp_path / "second" / "rank-0.txt").write_text("")
    stacks.remove_empty_files(tmp_path)
    assert not tmp_path.exists()
    stacks.remove_empty_files(tmp_path)


# Which learner rank is the slowest of a step, by the seconds of its passes.
CALL: dict[str, str | int | float] = {"call": 1}


def workers(count: int) -> Any:
    return [SimpleNamespace(who=f"rank {n} (pid 7 on node{n})", pass_seconds=0.0, peak=n) for n in range(count)]


def row(ranks: Sequence[Any], slowest: SlowestRank, *seconds: float) -> dict[str, float]:
    for rank, each in zip(ranks, seconds, strict=True):
        rank.pass_seconds = each
    return slowest.row()


def test_the_slowest_is_logged_with_its_node_once_and_where_it_is_far_off(caplog: pytest.LogCaptureFixture) -> None:
    ranks = workers(3)
    slowest = SlowestRank(ranks)
    with caplog.at_level(logging.WARNING):
        assert row(ranks, slowest, 1.0, 1.4, 1.0) == {"ranks/slowest": 1, "memory/peak": 2}
        assert not caplog.messages
        for _ in range(3):
            assert row(ranks, slowest, 1.0, 1.1, 3.0)["ranks/slowest"] == 2
        assert caplog.messages == ["rank 2 (pid 7 on node2) took 3.0 s for its passes, the median rank 1.1 s"]
    assert [rank.pass_seconds for rank in ranks] == [0.0] * 3
    alone, ranks = workers(1), workers(2)
    assert row(alone, SlowestRank(alone), 1.0) == {}
    assert row(ranks, SlowestRank(ranks), 1.0, 0.0) == {}
    spans = [
        ("calls", "step", 0, 9, CALL),
        ("calls", "forward", 12, 14, None),
        ("calls", "score", 10**9, 3 * 10**9, CALL),
        ("other", "score", 0, 10**9, None),
    ]
    assert RankTimed(arrived=0, answered=4 * 10**9, spans=spans, lost=0).call_seconds("score") == 2.0
