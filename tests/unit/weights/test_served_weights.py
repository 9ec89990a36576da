"""Which pushes into engine servers are served, and what these read of quantized weights, against loops over blocks."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from rl_megatron.errors import AllReplicasLost, ConfigError, CorruptionError, SyncError
from rl_megatron.features.quantize import formats as served_formats
from rl_megatron.features.quantize.encoding import BLOCKS, ENCODINGS, Quantization
from rl_megatron.features.quantize.formats import FORMATS
from rl_megatron.models.named import NAMED
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.types import Batch, Completion, GenerationRequest, ParallelDims, Scores, Want, WeightUpdate
from rl_megatron.weights.boxes import whole_box
from rl_megatron.weights.bytes.dtypes import DType
from rl_megatron.weights.checks import compare as comparisons
from rl_megatron.weights.checks.compare import Comparison, compare
from rl_megatron.weights.checks.places import ParameterBox
from rl_megatron.weights.checks.reports import (
    NO_KINDS,
    BackgroundChecksums,
    BoxSum,
    ChecksumReport,
    Kinds,
    checksum,
    drop_private,
    seal_from_reports,
)
from rl_megatron.weights.formats.hf_folder import stored
from rl_megatron.weights.formats.quantize import dequantize, divide
from rl_megatron.weights.formats.schemes import is_quantized
from rl_megatron.weights.layouts.families import hf_layout, megatron_layout
from rl_megatron.weights.push.sync import ServedWeights
from rl_megatron.weights.push.trust import Probe, PushVerifier, ScoredText
from rl_megatron.weights.routes.delivery import DeliveredVersion, DirectDelivery, FileDelivery
from rl_megatron.weights.routes.mirror import Mirror, VersionSeal, dtypes, read, seal, shapes
from rl_megatron.weights.routes.rendezvous import RendezvousStore
from tests.completions import completion
from tests.small_models import SMALL_MOE

DTYPE = torch.float32
SHAPES = {"norm": (4,), **{f"layers.{i}.{x}": (4, 8) for i in range(2) for x in ("gate", "up")}}


class Both:
    """A learner for which every log-prob is -1, and a replica that is ``off`` in the first so many texts. The replica
    holds each tensor in a parameter of its own, gate and up as a kind that it may ``pack``."""

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
        trust = PushVerifier(path=path, servers=self, learner=self, dims=dims, probe=probe, probes=probes)
        return ServedWeights(learner=self, delivery=self.file(), trust=trust, servers=self)

    def file(self) -> FileDelivery:
        return FileDelivery(learner=self, path=self.mirror.path, servers=self, nodes=2)

    async def push(self, version: int) -> WeightUpdate:
        for tensor in self.mirror.tensors.values():
            tensor.normal_(generator=torch.Generator().manual_seed(version + self.moved_on))
        self.mirror.serve(version)
        return WeightUpdate(version=version, num_bytes=3, seconds=0.1, verify_seconds=0.0)

    async def sums(self) -> Sequence[ChecksumReport]:
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
    ) -> Mapping[str, Sequence[ChecksumReport]]:
        self.said.append(f"load {version}{only or ''}")
        before = len(self.scored)
        await asyncio.sleep(0)
        self.meanwhile.append(len(self.scored) - before)
        for name, tensor in self.mirror.tensors.items():
            self.params[name] = tensor.flip(0) if self.packed and name != "norm" else tensor.clone()
        if self.flipped:
            self.params[self.flipped].view(torch.uint8).view(-1)[5] ^= 1
        views = {n: (s, (1,) if len(s) == 1 else (8, 1), 0) for n, s in SHAPES.items()}
        held = [
            ParameterBox(hf=n, full_shape=s, dtype=DTYPE, box=whole_box(s), param=n, view=views[n])
            for n, s in SHAPES.items()
        ]
        beside = BackgroundChecksums()
        for name, tensor in self.mirror.tensors.items():
            beside.read(name, tensor + 1 if name == self.misread else tensor)
        beside.checksum_boxes(drop_private(held, private.get("it", ())), self.params)
        return {"it": [beside.report()]}

    async def sample_on_all(
        self, requests: Sequence[GenerationRequest], *, only: str | None = None
    ) -> Mapping[str, list[list[Completion]]]:
        self.probes += 1
        return {"it": [[self._answer(-1.0 + (self.by if i < self.off else 0.0))] for i in range(len(requests))]}

    def _answer(self, logprob: float) -> Completion:
        return completion((1, 2), (-1.0, logprob), finish="length", spans=((0, 1),))

    async def score_on_all(
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
def test_the_error_is_told(tmp_path: Path, error: tuple[float, str] | None, caplog: pytest.LogCaptureFixture) -> None:
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
    assert ("version 4 is quantized: largest relative error of a tensor 0.03, layers.1.up" in caplog.text) == (
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
def test_nearly_all_texts_agree(tmp_path: Path, off: int, by: float, served: bool, dp: int, temperature: float) -> None:
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
        async def load(self, *given: Any, **more: Any) -> Mapping[str, Sequence[ChecksumReport]]:
            return {name: list(map(watched, said)) for name, said in (await super().load(*given, **more)).items()}

        async def sums(self) -> Sequence[ChecksumReport]:
            return list(map(watched, await super().sums()))

    def watched(report: ChecksumReport) -> ChecksumReport:
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

        async def load(self, *given: Any, **more: Any) -> Mapping[str, Sequence[ChecksumReport]]:
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
async def test_a_server_that_returns_must_answer_as_verified(tmp_path: Path, off: int, by: float, served: bool) -> None:
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


async def test_a_server_that_came_back_gets_direct_weights_while_the_learner_has_them(tmp_path: Path) -> None:
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
        keeper, how = RendezvousStore("127.0.0.1", 5.0), {"backend": "gloo"}
        super().__init__(file=both.file(), learner=both, servers=both, keeper=keeper, learner_ranks=1, **how)
        self._both, self._rendezvous = both, keeper.rendezvous(1, learners=1, **how)

    async def _deliver(self, version: int, *, private: Kinds, meanwhile: Callable[[], None]) -> DeliveredVersion:
        both = self._both
        meanwhile()
        update, reports = await both.push(version), await both.load(both.mirror.path, version, private=private)
        return DeliveredVersion(
            update=update, reports=reports, seal=VersionSeal(checksums=seal_from_reports(await both.sums(), SHAPES))
        )


async def test_a_push_of_which_all_servers_died_is_made_again(tmp_path: Path) -> None:
    both = Both(tmp_path)
    commit, deaths = both.commit, [AllReplicasLost("killed"), AllReplicasLost("killed again")]

    async def dying(version: int, *, only: str | None = None) -> None:
        if deaths:
            raise deaths.pop()
        await commit(version, only=only)

    both.commit = dying  # type: ignore[method-assign]
    await both.weights().push(4)
    assert both.said == ["load 4", "load 4", "load 4", "commit 4"]


# Servers of equal layouts are compared with the learner's checksums once.
def test_servers_of_the_same_reports_are_compared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = list[Sequence[ChecksumReport]]()

    def counted(*given: Any) -> Comparison:
        compared.append(given[2])
        return compare(*given)

    monkeypatch.setattr(comparisons, "compare", counted)
    both = Both(tmp_path)
    asyncio.run(both.push(1))
    one, other = (asyncio.run(both.load(both.mirror.path, 1))["it"] for _ in range(2))
    probe = Probe.make(vocab_size=50, max_length=40, temperature=1.0, tolerance=1e-3)
    verifies = PushVerifier(path=both.mirror.path, servers=both, learner=both, dims=ParallelDims(), probe=probe).verify
    sums = seal_from_reports([both.mirror.sums()], SHAPES)
    same = [replace(report, seconds=9.0) for report in one]
    asyncio.run(verifies(1, {"a": one, "b": same, "c": other}, sums))
    assert compared == [one, other]
    wrong = [replace(one[0], rows=[(*row[:3], row[3] + (row[1] == "norm")) for row in one[0].rows])]
    with pytest.raises(CorruptionError, match="c: its bytes are not those that the learner wrote in norm"):
        asyncio.run(verifies(1, {"a": one, "b": same, "c": wrong}, sums))


# What engine servers read of quantized weights, against loops over blocks and rows, and the learner's own numbers.
LAYER = "model.layers.0."
MATRICES = {
    LAYER + "self_attn.q_proj.weight": (201, 137),  # of an odd number of bytes
    LAYER + "mlp.experts.0.down_proj.weight": (136, 72),
    LAYER + "mlp.experts.1.down_proj.weight": (128, 256),
}
WHOLE = {"model.embed_tokens.weight": (40, 136), LAYER + "self_attn.q_proj.bias": (201,)}
WHOLE |= {LAYER + "mlp.gate.weight": (2, 136), LAYER + "input_layernorm.weight": (137,), "lm_head.weight": (40, 136)}
FORMATTED = MATRICES | WHOLE
LOSES = pytest.mark.parametrize("kind", ["fp8", "int8"])


def test_reads_of_the_file_keep_no_memory(tmp_path: Path) -> None:
    """A server reads all tensors at each push."""
    (tmp_path / "config.json").write_text('{"architectures": ["MadeForCausalLM"]}')
    held = {f"layers.{layer}.up": (2, 3) for layer in range(300)}
    path = tmp_path / "m" / "model.safetensors"
    Mirror.make(path, held, torch.bfloat16, tmp_path / "config.json")
    Mirror(path, held, torch.bfloat16).serve(1)
    blocks = [(read(path, 1), gc.collect(), sys.getallocatedblocks())[2] for _ in range(5)]
    assert blocks[-1] - blocks[1] < 300  # of one tensor in three reads


def mirror_of(folder: Path, kind: str, dtype: torch.dtype = torch.bfloat16) -> Mirror:
    """Random numbers of several sizes; a row and a block of zeros, a row of tiny numbers."""
    config = folder / "config.json"
    config.write_text(json.dumps({"torch_dtype": "bfloat16", "architectures": ["A"]}))
    path = folder / "w" / "model.safetensors"
    Mirror.make(path, FORMATTED, dtype, config, ENCODINGS[kind])
    made = Mirror(path, FORMATTED, dtype, ENCODINGS[kind])
    for seed, tensor in enumerate(made.tensors.values()):
        tensor.normal_(std=0.02, generator=torch.Generator().manual_seed(seed))
        if tensor.ndim == 2:
            tensor.mul_(torch.logspace(-3, 2, tensor.shape[1]))
    first = made.tensors[LAYER + "self_attn.q_proj.weight"]
    first[128:, :128] = 0.0
    first[7] = 0.0
    first[9] = 1e-39
    return made


@pytest.mark.parametrize("kind", ENCODINGS)
def test_a_vector_that_engines_hold_in_float32_is_as_the_learner_has_it(tmp_path: Path, kind: str) -> None:
    """Beside weights of every format."""
    bias, path = LAYER + "mlp.gate.e_score_correction_bias", tmp_path / "w" / "model.safetensors"
    (tmp_path / "config.json").write_text("{}")
    held, own = FORMATTED | {bias: (6,)}, 8.0 + 0.001 * torch.arange(6)  # of which bfloat16 has one value
    Mirror.make(path, held, torch.bfloat16, tmp_path / "config.json", ENCODINGS[kind], float32={bias})
    made = Mirror(path, held, torch.bfloat16, ENCODINGS[kind], float32={bias})
    for name, tensor in made.tensors.items():
        tensor.copy_(own if name == bias else torch.ones(held[name]))
    made.serve(1)
    assert torch.equal(read(path, 1)[bias], own)
    assert dtypes(path)["lm_head.weight"] == torch.bfloat16


def entries(path: Path) -> dict[str, tuple[str, list[int]]]:
    """As Hugging Face's own reader sees the file."""
    with safe_open(path, "pt") as file:
        return {n: (file.get_slice(n).get_dtype(), file.get_slice(n).get_shape()) for n in file.keys()}  # noqa: SIM118


def by_loops(kind: str, weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers that a quantized matrix stands for, float32, and the scale of each."""
    factors = torch.empty(weight.shape)
    for row in range(weight.shape[0]):
        for column in range(weight.shape[1]):
            factors[row, column] = scales[row // 128, column // 128] if kind == "fp8" else scales[row, 0]
    return weight.float() * factors, factors


@LOSES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_servers_read_numbers_within_half_a_step_of_the_learners(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    mirror = mirror_of(tmp_path, kind, dtype)
    mirror.serve(3)
    arrived = read(mirror.path, 3)
    kinds = {"fp8": ("_scale_inv", torch.float8_e4m3fn, "F8_E4M3"), "int8": ("_scale", torch.int8, "I8")}
    suffix, stands, name_of = kinds[kind]
    assert arrived.keys() == FORMATTED.keys() | {name + suffix for name in MATRICES}
    assert all(torch.equal(arrived[name], mirror.tensors[name]) for name in WHOLE)
    worst = {}
    for name, shape in MATRICES.items():
        weight, scales, wanted = arrived[name], arrived[name + suffix], mirror.tensors[name].float()
        edges = {"fp8": (128, 128), "int8": (1, shape[1])}[kind]
        assert entries(mirror.path)[name] == (name_of, list(shape))
        assert entries(mirror.path)[name + suffix] == ("F32", [-(-n // e) for n, e in zip(shape, edges, strict=True)])
        assert weight.dtype == stands == dtypes(mirror.path)[name]
        found, factors = by_loops(kind, weight, scales)
        off = (found - wanted).abs()
        if kind == "fp8":  # below the smallest normal number, 2**-6, steps are of 2**-9
            assert (off <= torch.maximum(wanted.abs() * 2**-4, factors * 2**-10) * (1 + 1e-5)).all()
        else:
            assert (off <= factors / 2 * (1 + 1e-5)).all()
            assert int(weight.min()) >= -127
            assert (weight.abs().amax(1)[wanted.abs().amax(1) > 0] == 127).all()
        worst[name] = float(off.double().norm() / wanted.double().norm())
    error = seal(mirror.path, 3, {}).error
    assert error[1] == max(worst, key=worst.__getitem__)
    assert error[0] == pytest.approx(worst[error[1]], rel=1e-5)
    assert 1e-4 < error[0] < 0.06
    zeros = arrived[LAYER + "self_attn.q_proj.weight"].float()[7]
    assert torch.equal(zeros, torch.zeros_like(zeros))


@LOSES
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_weight_that_is_not_finite_is_refused_where_it_is_sent_from(kind: str, value: float) -> None:
    """A block with it would be zeros."""
    hf, name = hf_layout(SMALL_MOE), LAYER + "self_attn.k_proj.weight"
    tensors = {name: torch.ones(shape) for name, shape in hf.local_shapes(0).items()}
    encoding = Quantization(kind)
    encoder = encoding.encoder(encoding.layout(hf, hf), 0, tensors)
    encoder.begin(lambda maxima: None)
    tensors[name][1, 2] = value
    with pytest.raises(SyncError, match=f"{name} has values that are NaN or infinite"):
        encoder.begin(lambda maxima: None)


@LOSES
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe_text", "qwen3_5_moe"])
def test_of_delta_nets_what_engines_hold_whole_is_not_quantised(kind: str, family: str) -> None:
    """Convolutions and gates, whose heads have a row each; experts that are one tensor are refused."""
    form = Quantization(kind)
    shape = replace(
        NAMED["qwen3-next-80b-a3b"],
        family=family,
        num_layers=4,
        delta_layers=(0, 1, 2),
        num_experts=2,
        num_draft_layers=True,
    )
    layout = form.layout(megatron_layout(shape, ParallelDims(tp=2)), hf_layout(shape))
    held = {name for rank in range(2) for name in layout.local_shapes(rank) if name.endswith(form.blocks.suffix)}
    shapes = hf_layout(shape).local_shapes(0)
    found = {name for name, (dtype, _) in stored(shapes, DType.BF16, form).items() if dtype == form.blocks.dtype}
    assert held == {name + form.blocks.suffix for name in found}
    delta = {"in_proj_qkvz"} if family == "qwen3_next" else {"in_proj_qkv", "in_proj_z"}
    wanted = delta | {"out_proj"} | {f"{x}_proj" for x in ("q", "k", "v", "o", "gate", "up", "down")}
    assert {name.split(".")[-2] for name in found} == wanted
    assert {name.split(".")[-2] for name, size in shapes.items() if len(size) > 1 and name not in found} == {
        *({"in_proj_ba"} if family == "qwen3_next" else {"in_proj_b", "in_proj_a"}),
        *("conv1d", "gate", "shared_expert_gate", "embed_tokens", "lm_head", "fc"),
    }
    if family != "qwen3_next":
        stacked = hf_layout(replace(shape, stacked_experts=True)).local_shapes(0)
        with pytest.raises(ConfigError, match=r"experts\.\w+ \[.*\] is not a matrix, and stacked experts"):
            stored(stacked, DType.BF16, form)


def test_engines_that_round_scales_up_to_powers_of_two_change_no_value() -> None:
    """As vLLM with DeepGEMM does (fp8_utils.py), by the numbers that it reads."""
    values = torch.empty(3 * 128, 5 * 128).normal_(generator=torch.Generator().manual_seed(0))
    values *= torch.logspace(-3, 3, 640)
    values[:128, :128] = 0.0
    values[0, 128] = 448.0 * 2**9  # a power of two already
    form, numbers, scales = FORMATS["fp8"], torch.empty(384, 640, dtype=torch.float8_e4m3fn), torch.empty(3, 5)
    form.write("a", values, numbers, scales)
    largest = values.unflatten(0, (3, 128)).unflatten(2, (5, 128)).abs().amax((1, 3))
    assert torch.equal(scales, torch.where(largest > 0, 2.0 ** (largest / 448).log2().ceil(), 1.0))
    read = numbers.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    found = read.unflatten(0, (3, 128)).unflatten(2, (5, 128)).abs().amax((1, 3))
    again = (2.0 ** (found.clamp(min=1e-4) / 448).log2().ceil()).repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal((read / again).to(torch.float8_e4m3fn).float() * again, read)
    tiny = torch.full((1, 1), 1e-42)  # whose scale would have no exponent of its own
    form.write("a", tiny, numbers[:1, :1], scales[:1, :1])
    assert scales[0, 0] == 2.0**-126


def test_a_matrix_in_bands_is_the_matrix_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_formats, "_BAND", 2 * 128 * 150)
    shape = (4 * 128 + 5, 150)
    values = torch.empty(shape, dtype=torch.bfloat16).normal_(generator=torch.Generator().manual_seed(0))
    for name, kind in FORMATS.items():
        entries = stored({"a.weight": shape}, DType.BF16, ENCODINGS[name])
        (_, (_, weight_shape)), (_, (_, scale_shape)) = sorted(entries.items())
        weight = torch.empty(weight_shape, dtype=getattr(torch, kind.blocks.dtype))
        scales = torch.full(scale_shape, torch.nan)
        kind.write("a.weight", values, weight, scales)
        factors = kind.scales(kind.maxima(values, (0, 0), shape))
        numbers = kind.round(divide(values, factors, (0, 0), kind.blocks.edges(shape)))
        assert torch.equal(weight.view(torch.int8), numbers.view(torch.int8))
        assert torch.equal(scales, factors)


@LOSES
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_is_named_and_nothing_is_served(tmp_path: Path, kind: str, bad: float) -> None:
    mirror = mirror_of(tmp_path, kind)
    mirror.serve(1)
    mirror.withdraw()
    mirror.tensors[LAYER + "mlp.experts.1.down_proj.weight"][127, 255] = bad
    with pytest.raises(SyncError, match=r"layers\.0\.mlp\.experts\.1\.down_proj\.weight has values that are NaN"):
        mirror.serve(2)
    with pytest.raises(SyncError, match="holds version None, not 2"):
        read(mirror.path, 2)


@LOSES
def test_the_seal_is_of_the_quantised_bytes(tmp_path: Path, kind: str) -> None:
    mirror = mirror_of(tmp_path, kind)
    for name in (LAYER + "mlp.experts.0.down_proj.weight", LAYER + "self_attn.q_proj.weight" + BLOCKS[kind].suffix):
        mirror.serve(3)
        sealed = seal_from_reports([mirror.sums()], shapes(mirror.path))
        assert sealed == {n: checksum(t, tuple(t.shape)) for n, t in read(mirror.path, 3).items()}
        mirror._stored[name].view(torch.uint8)[0, 3] ^= 1
        after = seal_from_reports([mirror.sums()], shapes(mirror.path))
        assert [n for n in sealed if sealed[n] != after[n]] == [name]


def test_config_json_tells_servers_the_format(tmp_path: Path) -> None:
    whole = ["lm_head", "model.embed_tokens", LAYER + "mlp.gate"]
    for kind in ("fp8", "int8"):
        config = json.loads(mirror_of(tmp_path, kind).path.with_name("config.json").read_text())
        assert (config["torch_dtype"], config["architectures"]) == ("bfloat16", ["A"])
        given = config["quantization_config"]
        if kind == "fp8":
            assert given == {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
                "modules_to_not_convert": whole,
            }
        else:
            assert (given["quant_method"], given["format"]) == ("compressed-tensors", "int-quantized")
            assert given["ignore"] == whole
            group = given["config_groups"]["group_0"]
            assert group["weights"] == {
                "num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False
            }  # fmt: skip
            assert group["input_activations"]["strategy"] == "token"


def test_stacked_experts_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"experts\.gate_up_proj \[2, 4, 6\] is not a matrix"):
        stored({LAYER + "mlp.experts.gate_up_proj": (2, 4, 6)}, DType.BF16, ENCODINGS["fp8"])
    assert stored({"experts": (2, 4, 6)}, DType.BF16, None) == {"experts": (DType.BF16, (2, 4, 6))}


@LOSES
def test_the_probe_tolerates_quantised_weights_and_refuses_exchanged_ones(tmp_path: Path, kind: str) -> None:
    """transformers in an engine's place; experts lie stacked there."""
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(TinySizes(), tmp_path, 0)).eval().float()
    probe = Probe.make(vocab_size=model.config.vocab_size, max_length=16, temperature=1.0, tolerance=1.0)
    text, given = torch.tensor(probe.texts), {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def scores(weights: dict[str, Tensor]) -> list[list[float]]:
        model.load_state_dict(weights)
        with torch.no_grad():
            said = model(text).logits.log_softmax(-1)[:, :-1]
        return [[float(x) for x in row] for row in said.gather(-1, text[:, 1:, None])[..., 0]]

    def quantized(name: str, tensor: Tensor) -> Tensor:
        if tensor.ndim == 3:
            return torch.stack([quantized("expert.weight", one) for one in tensor])
        form = FORMATS[kind]
        if not is_quantized("x." + name, tuple(tensor.shape)):
            return tensor
        shape = tuple(tensor.shape)
        numbers, scales = (
            torch.empty(shape, dtype=getattr(torch, form.blocks.dtype)),
            torch.empty(form.blocks.grid(shape)),
        )
        form.write(name, tensor, numbers, scales)
        return dequantize(numbers, scales, (0, 0), form.blocks.edges(shape))

    learner = scores(given)
    weights = {name: quantized(name, tensor) for name, tensor in given.items()}
    said: list[ScoredText] = probe.scored(scores(weights))
    assert scores(weights) != learner
    assert not probe.judge(said, learner, "the learner's")[1]
    exchanged = weights | {"lm_head.weight": weights["lm_head.weight"].roll(1, 0)}
    assert probe.judge(probe.scored(scores(exchanged)), learner, "the learner's")[1]
