"""Which pushes into engine servers are served: learner and replicas are a few lines, mirror and sums are real."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from rl_megatron.errors import CorruptionError, ReplicasLost, SyncError
from rl_megatron.types import Batch, Completion, GenerationRequest, ParallelDims, Scores, Want, WeightUpdate
from rl_megatron.weights.boxes import whole_box
from rl_megatron.weights.checks.places import Held
from rl_megatron.weights.checks.reports import NO_KINDS, Beside, BoxSum, Kinds, Report, not_private, sealed_by
from rl_megatron.weights.servers.delivery import Delivered
from rl_megatron.weights.servers.direct import DirectDelivery
from rl_megatron.weights.servers.file import FileDelivery
from rl_megatron.weights.servers.mirror import Mirror, Seal
from rl_megatron.weights.servers.probe import Probe
from rl_megatron.weights.servers.sync import ServedWeights
from rl_megatron.weights.servers.trust import Trust
from rl_megatron.weights.transports.joined import Keeper
from tests.completions import completion

DTYPE = torch.float32
SHAPES = {"norm": (4,), **{f"layers.{i}.{x}": (4, 8) for i in range(2) for x in ("gate", "up")}}


class Both:
    """A learner for which every log-prob is -1, and a replica that is ``off`` in the first so many texts.

    The replica holds each tensor in a parameter of its own, gate and up as a kind that it may ``pack``.
    """

    def __init__(self, folder: Path, off: int = 0, by: float = 0.0) -> None:
        (folder / "config.json").write_text("{}")
        path = folder / "w" / "model.safetensors"
        Mirror.make(path, SHAPES, torch.float32, folder / "config.json")
        self.mirror = Mirror(path, SHAPES, torch.float32)
        self.params = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        self.off, self.by, self.said, self.probes = off, by, list[str](), 0
        self.asked: list[tuple[tuple[int, ...], ...]] = []
        self.scored: list[set[tuple[int, ...]]] = []  # by the learner: texts of each call
        self.meanwhile: list[int] = []  # such calls that began while a replica loaded, by load
        self.is_stale, self.packed, self.flipped, self.misread, self.moved_on = True, False, "", "", 0

    def weights(
        self, *, dp: int = 1, temperature: float = 1.0, probes: Literal["auto", "always"] = "auto"
    ) -> ServedWeights:
        probe = Probe.make(vocab_size=50, max_length=40, temperature=temperature, tolerance=1e-3)
        dims, path = ParallelDims(dp=dp), self.mirror.path
        trust = Trust(path=path, servers=self, learner=self, dims=dims, probe=probe, probes=probes)
        return ServedWeights(learner=self, delivery=self.file(), trust=trust, servers=self)

    def file(self) -> FileDelivery:
        return FileDelivery(learner=self, path=self.mirror.path, servers=self, nodes=2)

    async def push(self, version: int) -> WeightUpdate:
        for tensor in self.mirror.tensors.values():
            tensor.normal_(generator=torch.Generator().manual_seed(version + self.moved_on))
        self.mirror.serve(version)
        return WeightUpdate(version=version, num_bytes=3, seconds=0.1, verify_seconds=0.0)

    async def sums(self) -> Sequence[Report]:
        return [self.mirror.sums()]

    async def export(self, folder: Path) -> None:
        self.said.append("export")

    async def score(self, batch: Batch, want: frozenset[Want]) -> dict[Want, Scores]:
        assert want == {"logprobs"}
        samples = [m for row in batch.micro_batches for m in row]
        bounds = [(m, *pair) for m in samples for pair in pairwise(m.cu_seqlens.tolist())]
        self.scored.append({(*m.input_ids[a:b].tolist(), m.targets[b - 1].item()) for m, a, b in bounds})
        return {"logprobs": [[torch.full((len(m.input_ids),), -1.0) for m in row] for row in batch.micro_batches]}

    def stale(self, name: str) -> bool:
        return self.is_stale

    async def load(
        self, path: Path, version: int, *, only: str | None = None, private: Kinds = NO_KINDS
    ) -> Mapping[str, Sequence[Report]]:
        self.said.append(f"load {version}{only or ''}")
        before = len(self.scored)
        await asyncio.sleep(0)
        self.meanwhile.append(len(self.scored) - before)
        for name, tensor in self.mirror.tensors.items():
            self.params[name] = tensor.flip(0) if self.packed and name != "norm" else tensor.clone()
        if self.flipped:
            self.params[self.flipped].view(torch.uint8).view(-1)[5] ^= 1
        views = {n: (s, (1,) if len(s) == 1 else (8, 1), 0) for n, s in SHAPES.items()}
        held = [Held(hf=n, whole=s, dtype=DTYPE, box=whole_box(s), param=n, view=views[n]) for n, s in SHAPES.items()]
        beside = Beside()
        for name, tensor in self.mirror.tensors.items():
            beside.read(name, tensor + 1 if name == self.misread else tensor)
        beside.held(not_private(held, private.get("it", ())), self.params)
        return {"it": [beside.report()]}

    async def sample_everywhere(
        self, requests: Sequence[GenerationRequest], *, only: str | None = None
    ) -> Mapping[str, list[list[Completion]]]:
        self.probes += 1
        return {"it": [[self._answer(-1.0 + (self.by if i < self.off else 0.0))] for i in range(len(requests))]}

    def _answer(self, logprob: float) -> Completion:
        return completion((1, 2), (-1.0, logprob), finish="length", spans=((0, 1),))

    async def score_everywhere(
        self, texts: Sequence[Sequence[int]], *, only: str | None = None
    ) -> Mapping[str, list[list[float]]]:
        self.probes += 1
        self.asked.append(tuple(tuple(text) for text in texts))
        said = [[-1.0] * (len(text) - 1) for text in texts]
        for row in said[: self.off]:
            row[3] += self.by
        return {"it": said}

    async def commit(self, version: int, *, only: str | None = None) -> None:
        self.said.append(f"commit {version}{only or ''}")

    def refuse(self) -> None:
        self.said.append("refuse")


@pytest.mark.parametrize("error", [None, (0.03, "layers.1.up")])
def test_the_error_of_quantised_weights_is_told(
    tmp_path: Path, error: tuple[float, str] | None, caplog: pytest.LogCaptureFixture
) -> None:
    both = Both(tmp_path)
    serve = both.mirror.serve

    def sealed(version: int) -> None:
        serve(version)
        note = both.mirror.path.with_name("model.safetensors.json")
        note.write_text(json.dumps(json.loads(note.read_text()) | ({"error": error} if error else {})))

    both.mirror.serve = sealed  # type: ignore[method-assign]
    with caplog.at_level(logging.INFO):
        update = asyncio.run(both.weights().push(4))
    assert update.quantization_error == (error[0] if error else None)
    assert ("version 4 is quantised: largest relative error of a tensor 0.03, layers.1.up" in caplog.text) == (
        error is not None
    )


CASES = pytest.mark.parametrize(
    ("off", "by", "served"),
    [(0, 0.0, True), (4, 5e-4, True), (1, 0.7, True), (2, 2e-3, False), (4, 0.7, False), (2, math.nan, False)],
    ids=["equal", "rounding", "near ties", "two texts", "all", "not a number"],
)


@pytest.mark.parametrize("dp", [1, 3])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@CASES
def test_a_version_is_served_where_nearly_all_texts_agree(
    tmp_path: Path, off: int, by: float, served: bool, dp: int, temperature: float
) -> None:
    both = Both(tmp_path, off, by)
    weights = both.weights(dp=dp, temperature=temperature)
    if served:
        assert asyncio.run(weights.push(4)).num_bytes == 3 + 2 * both.mirror.path.stat().st_size
    else:
        with pytest.raises(SyncError, match=rf"version 4 arrived wrong.*\n  it: .*nats.*, in {off} of 4 texts"):
            asyncio.run(weights.push(4))
    assert both.said == ["load 4", "commit 4" if served else "refuse"]


def test_servers_whose_every_tensor_is_verified_are_probed_once(tmp_path: Path) -> None:
    both = Both(tmp_path)
    weights = both.weights()
    for version in range(3):
        asyncio.run(weights.push(version))
    assert both.probes == 1
    always = both.weights(probes="always")
    for version in range(3):
        asyncio.run(always.push(version))
    assert both.probes == 4


def test_a_flipped_bit_is_named_and_not_served(tmp_path: Path) -> None:
    both = Both(tmp_path)
    weights = both.weights()
    for version, flipped in enumerate(("", "layers.1.up", "norm"), start=1):
        both.flipped = flipped
        if not flipped:
            asyncio.run(weights.push(version))
            continue
        with pytest.raises(CorruptionError, match=rf"its bytes are not those that the learner wrote in {flipped}$"):
            asyncio.run(weights.push(version))
    assert both.said == ["load 1", "commit 1", "load 2", "refuse", "load 3", "refuse"]


def test_what_was_served_is_not_exported_with_other_bytes(tmp_path: Path) -> None:
    both = Both(tmp_path)
    weights = both.weights()
    asyncio.run(weights.push(1))
    asyncio.run(weights.export(tmp_path))
    assert both.said[-1] == "export"
    both.mirror.tensors["layers.1.up"].view(torch.uint8)[2, 3] ^= 1
    both.said.clear()
    with pytest.raises(CorruptionError, match=r"its bytes are not the learner's in layers\.1\.up$"):
        asyncio.run(weights.export(tmp_path))
    assert not both.said


def test_checksums_are_compared_beside_the_event_loop(tmp_path: Path) -> None:
    """Of many servers of a large model they take seconds, in which the controller answers nobody."""

    class Rows(list[BoxSum]):
        def __iter__(self) -> Iterator[BoxSum]:
            assert threading.current_thread() is not threading.main_thread()
            return super().__iter__()

    class Watched(Both):
        async def load(self, *given: Any, **more: Any) -> Mapping[str, Sequence[Report]]:
            return {name: list(map(watched, said)) for name, said in (await super().load(*given, **more)).items()}

        async def sums(self) -> Sequence[Report]:
            return list(map(watched, await super().sums()))

    def watched(report: Report) -> Report:
        return replace(report, rows=Rows(report.rows))

    both = Watched(tmp_path)
    weights = both.weights()
    asyncio.run(weights.push(1))
    asyncio.run(weights.refit("it"))
    assert both.said == ["load 1", "commit 1", "load 1it", "commit 1it"]


async def test_an_export_waits_for_a_server_that_came_back(tmp_path: Path) -> None:
    """Both have the learner fill the mirror file, where it sends straight into servers."""

    class Slow(Both):
        go: asyncio.Event

        async def load(self, *given: Any, **more: Any) -> Mapping[str, Sequence[Report]]:
            await self.go.wait()
            return await super().load(*given, **more)

    both = Slow(tmp_path)
    both.go = asyncio.Event()
    both.go.set()
    weights = both.weights()
    await weights.push(1)
    both.said.clear()
    both.go.clear()
    refit = asyncio.create_task(weights.refit("it"))
    export = asyncio.create_task(weights.export(tmp_path))
    assert (await asyncio.wait({export}, timeout=0.3))[1] == {export}
    both.go.set()
    await asyncio.gather(refit, export)
    assert both.said == ["load 1it", "commit 1it", "export"]


def test_kinds_in_layouts_of_their_own_are_left_to_the_probe_and_others_are_not(tmp_path: Path) -> None:
    both = Both(tmp_path)
    both.packed = True
    weights = both.weights()
    for version in range(3):
        asyncio.run(weights.push(version))
    assert both.probes == 3
    both.flipped = "norm"
    with pytest.raises(CorruptionError, match=r"wrote in norm$"):
        asyncio.run(weights.push(3))
    both.flipped, both.misread = "", "layers.0.up"  # the probe is not asked to see that
    with pytest.raises(CorruptionError, match=r"wrote in layers\.0\.up$"):
        asyncio.run(weights.push(3))
    both.misread, both.off, both.by = "", 4, 0.7  # packed wrongly
    with pytest.raises(SyncError, match=r"no checksum verifies layers\.0\.gate, .* \(4 tensors\)"):
        asyncio.run(weights.push(4))


def test_later_versions_are_probed_with_one_text_in_turn_and_all_where_it_does_not_agree(tmp_path: Path) -> None:
    both = Both(tmp_path)
    both.packed = True
    weights = both.weights()
    for version in range(6):
        asyncio.run(weights.push(version))
    every = both.asked[0]
    assert both.asked[1:] == [(every[version % 4],) for version in range(1, 6)]
    assert both.scored == [set(texts) for texts in both.asked]
    assert both.meanwhile == [0, 1, 1, 1, 1, 1]
    both.asked, both.off, both.by = [], 1, 0.7  # a near tie
    asyncio.run(weights.push(6))
    assert both.asked == [(every[2],), every]
    both.asked, both.off = [], 2
    with pytest.raises(SyncError, match="in 2 of 4 texts"):
        asyncio.run(weights.push(7))
    assert both.asked == [(every[3],), every]


def test_a_server_that_was_not_verified_gets_no_layouts_of_its_own(tmp_path: Path) -> None:
    both = Both(tmp_path, 4, 0.7)
    both.packed = True
    weights = both.weights()
    with pytest.raises(SyncError, match="4 tensors"):
        asyncio.run(weights.push(1))
    both.off, both.packed = 0, False
    asyncio.run(weights.push(2))
    both.packed = True
    with pytest.raises(CorruptionError, match=r"layers\.0\.gate"):
        asyncio.run(weights.push(3))


@CASES
async def test_a_server_that_came_back_must_answer_as_one_that_was_verified(
    tmp_path: Path, off: int, by: float, served: bool
) -> None:
    """The learner has moved on meanwhile: it is not asked."""
    both = Both(tmp_path)
    weights = both.weights()
    await weights.refit("it")
    assert both.said == []  # nothing is served yet
    await weights.push(4)
    both.said, both.off, both.by = [], off, by
    both.score = None  # type: ignore[assignment, method-assign]
    if served:
        await weights.refit("it")
    else:
        with pytest.raises(SyncError, match=rf"version 4 arrived wrong at it.*verified.*, in {off} of 4 texts"):
            await weights.refit("it")
    assert both.said == ["load 4it", "commit 4it"][: 1 + served]
    both.flipped = "layers.0.up"
    with pytest.raises(CorruptionError, match=r"wrote in layers\.0\.up$"):
        await weights.refit("it")
    both.said, both.is_stale = [], False
    await weights.refit("it")  # a push was faster
    assert both.said == []


async def test_a_server_that_came_back_gets_what_went_straight_into_others_while_the_learner_has_it(
    tmp_path: Path,
) -> None:
    both = Both(tmp_path)
    weights, straight = both.weights(), Straight(both)
    weights._delivery = straight
    await weights.push(4)
    both.said = []
    await weights.refit("it")
    assert both.said == ["load 4it", "commit 4it"]
    assert straight._rendezvous is None  # which it has not met
    both.said, both.moved_on = [], 1
    await weights.refit("it")
    assert both.said == []
    await weights.push(5)  # which takes it with the others
    assert both.said == ["load 5", "commit 5"]


class Straight(DirectDelivery):
    """Moves what `Both` has, of which no rank meets another."""

    def __init__(self, both: Both) -> None:
        keeper = Keeper("127.0.0.1", 5.0)
        how = {"transport": "process_group", "backend": "gloo"}
        super().__init__(file=both.file(), learner=both, servers=both, keeper=keeper, learner_ranks=1, **how)
        self._both, self._rendezvous = both, keeper.rendezvous(1, learners=1, **how)

    async def _deliver(self, version: int, *, private: Kinds, meanwhile: Callable[[], None]) -> Delivered:
        both = self._both
        meanwhile()
        update, reports = await both.push(version), await both.load(both.mirror.path, version, private=private)
        return Delivered(update=update, reports=reports, seal=Seal(checksums=sealed_by(await both.sums(), SHAPES)))


async def test_a_push_of_which_all_servers_died_is_made_again(tmp_path: Path) -> None:
    both = Both(tmp_path)
    commit, deaths = both.commit, [ReplicasLost("killed"), ReplicasLost("killed again")]

    async def dying(version: int, *, only: str | None = None) -> None:
        if deaths:
            raise deaths.pop()
        await commit(version, only=only)

    both.commit = dying  # type: ignore[method-assign]
    await both.weights().push(4)
    assert both.said == ["load 4", "load 4", "load 4", "commit 4"]
