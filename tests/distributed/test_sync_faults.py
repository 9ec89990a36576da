"""Weight syncs that go wrong, in six real processes: four learner ranks fill an engine of two.

What is never wrong: a version is served by both engine ranks, whole and equal to the bit to its Hugging Face source, or
by none; and the next sync repairs what a fault left.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.sync_ranks import ENGINES, LAYOUTS, LEARNERS, REPLICAS, WORLD, Ranks

BOX = re.compile(r"weight\S* \(\(\d")  # a tensor and its box; which one it is depends on what arrives first
ENGINE_RANKS = range(LEARNERS, WORLD)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.end()


def check_served(ranks: Ranks, version: int, seed: int, changes: int | None = None) -> None:
    assert ranks.each("serves")[LEARNERS:] == [version] * ENGINES
    assert ranks.each("holds", seed, changes) == [""] * WORLD


def maps_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/maps").read_text().splitlines()


@pytest.mark.parametrize("kind", ["gloo", "last hop"])
def test_four_learner_ranks_fill_two_engine_ranks_to_the_bit(ranks: Ranks, kind: str) -> None:
    for learner in LAYOUTS:
        for engine in REPLICAS:
            ranks.connect(kind, learner, engine)
            for version in (1, 2):
                ranks.each("train", version, None)
                assert {how for how, _ in ranks.push(version)} == {"staged"}
                check_served(ranks, version, version)
            planned, received, wire = zip(*ranks.each("bytes"), strict=True)
            assert sum(received[LEARNERS:]) == planned[0]
            assert kind != "gloo" or sum(wire) == planned[0]


@pytest.mark.parametrize("kind", ["gloo", "delta"])
def test_a_corrupted_byte_is_found_named_never_served_and_repaired(ranks: Ranks, kind: str) -> None:
    ranks.connect(kind)
    ranks.each("train", 1, None)
    ranks.push(1)
    check_served(ranks, 1, 1)
    ranks.each("train", 2, None)
    ranks.ask([LEARNERS], "flip", 3)
    answers = ranks.push(2)
    assert [how for how, _ in answers] == ["staged"] * 4 + ["CorruptionError", "staged"]
    message = answers[LEARNERS][1]
    assert "version 2" in message
    assert f"on rank {LEARNERS} is not" in message
    assert BOX.search(message)
    assert any(f"as rank {sender} sent it" in message for sender in range(LEARNERS))
    assert ranks.each("serves")[LEARNERS:] == [None, None]
    assert {how for how, _ in ranks.push(2)} == {"staged"}
    check_served(ranks, 2, 2)


def test_delta_sends_what_changed_and_nothing_of_what_did_not(ranks: Ranks) -> None:
    ranks.connect("delta")
    moved = []
    for version, changes in ((1, 0), (2, 2), (3, 2)):
        ranks.each("train", 2, changes)
        assert {how for how, _ in ranks.push(version)} == {"staged"}
        moved.append(sum(received for _, received, _ in ranks.each("bytes")))
        check_served(ranks, version, 2, changes)
    whole = ranks.each("bytes")[0][0]
    assert moved[0] == whole
    assert moved[2] < moved[1] < whole


@pytest.mark.parametrize(("kind", "lost", "end"), [("gloo", 1, "pack"), ("last hop", WORLD - 1, "unpack")])
def test_a_killed_process_is_named_and_the_next_sync_repairs(ranks: Ranks, kind: str, lost: int, end: str) -> None:
    ranks.connect(kind)
    ranks.each("train", 1, None)
    ranks.push(1)
    check_served(ranks, 1, 1)
    ranks.each("train", 2, None)
    ranks.ask([lost], "die", 5, end)
    answers = ranks.push(2)
    assert answers[lost] == ("killed", signal.SIGKILL)
    told = [message for how, message in answers if how == "SyncError"]
    assert told
    assert any(f"rank {lost}" in message and "waited for" in message and BOX.search(message) for message in told)
    alive = [rank for rank in ENGINE_RANKS if rank != lost]
    assert set(ranks.ask(alive, "serves").values()) == {None}
    ranks.start(lost)
    ranks.connect(kind)
    ranks.each("train", 2, None)
    assert {how for how, _ in ranks.push(2)} == {"staged"}
    check_served(ranks, 2, 2)


def test_rings_have_no_name_that_could_be_left_behind(ranks: Ranks) -> None:
    ranks.connect("last hop")
    rings = {line.split(maxsplit=5)[5] for line in maps_of(ranks.processes[0].pid) if "weights" in line}
    assert rings == {"/memfd:weights (deleted)"}
