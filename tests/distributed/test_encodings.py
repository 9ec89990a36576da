"""An encoding and a compression of an installed package, which no code names, through every way of a push."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rl_megatron import feature
from rl_megatron.config.io import load_config
from rl_megatron.errors import ConfigError
from rl_megatron.feature import Encoding, make_compression, make_encoding
from rl_megatron.types import ParallelDims
from rl_megatron.weights.boxes import whole_box
from rl_megatron.weights.bytes.bits import stored_dtype
from rl_megatron.weights.checks.places import record
from rl_megatron.weights.checks.reports import checksum, seal_from_reports, sender_boxes
from rl_megatron.weights.formats.hf_folder import stored
from rl_megatron.weights.layouts.recorded import recorded_layout
from rl_megatron.weights.routes import mirror
from rl_megatron.weights.routes.engine_ends import Receiver, Sender
from rl_megatron.weights.routes.group import ProcessGroupTransport
from rl_megatron.weights.routes.rendezvous import Rendezvous, RendezvousStore
from tests.distributed import test_transport as base
from tests.distributed.ranks import run_ranks
from tests.distributed.test_engine_ends import HEARD, HF, VERSIONS, tensors_of

MINE = """
import torch
from rl_megatron.feature import Compression, Encoder, Encoding, Feature
from rl_megatron.weights.bytes.dtypes import DType

KEY = 0x5AA5

def flipped(values):
    return values.bfloat16().contiguous().view(torch.int16) ^ KEY

class Flipped(Encoding):
    tolerance = 0.0

    def stored(self, entries):
        return {name: (DType.I16 if len(shape) == 2 else dtype, shape) for name, (dtype, shape) in entries.items()}

    def config(self, shapes):
        return {"quant_method": "flipped"}

    def layout(self, layout, hf):
        return layout

    def write(self, name, values, held):
        held[name].copy_(flipped(values) if values.ndim == 2 else values)

    def encoder(self, layout, rank, tensors):
        return FlippedRank(tensors)

class FlippedRank(Encoder):
    def __init__(self, tensors):
        self.tensors, self.added, self.changes = tensors, {}, {}

    def begin(self, reduce):
        self.now = {name: flipped(tensor) for name, tensor in self.tensors.items() if tensor.ndim == 2}

    def pack(self, name, param, place, out):
        if param in self.now:
            out.copy_(self.now[param][tuple(slice(low, high) for low, high in place)])
        return param in self.now

    def encoded(self, name, box, values):
        return flipped(values) if values.ndim == 2 else None

    def check(self, dtype_of):
        assert {dtype_of(name) for name, tensor in self.tensors.items() if tensor.ndim == 2} == {torch.int16}

class Turned(Compression):
    def begin(self, gather):
        self.everyone = gather(7)

    def compresses(self, peer):
        return self.everyone[peer] == 7

    def pack(self, parcel):
        return torch.cat([parcel.buffer ^ 255, torch.zeros(5, dtype=torch.uint8)])

    def unpack(self, frame, parcel):
        parcel.buffer.copy_(frame[:-5] ^ 255)

    def finished(self, version):
        self.last = version

def encoding(config):
    return Flipped() if config.run.name == "mine" else None

def compression(config):
    return Turned() if config.run.name == "mine" else None

FEATURE = Feature(name="mine", encoding="my_encoding:encoding", compression="my_encoding:compression")
"""
KEY = 0x5AA5
SHAPES = HF.local_shapes(0)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of an installed package."""
    (tmp_path / "my_encoding.py").write_text(MINE)
    info = tmp_path / "my_encoding-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-encoding\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rl_megatron.features]\nmine = my_encoding:FEATURE\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_encoding", raising=False)
    feature.features.cache_clear()
    yield tmp_path
    feature.features.cache_clear()


def in_rank(package: Path) -> None:
    """The package in a process of its own."""
    sys.path.insert(0, str(package))
    feature.features.cache_clear()
    torch.set_num_threads(1)


def mine() -> Encoding:
    found = make_encoding(load_config("tiny_cpu", ["run.name=mine"]))
    assert found is not None
    return found


def blank() -> dict[str, Tensor]:
    entries = stored(SHAPES, stored_dtype(torch.float32), mine()).items()
    return {name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, (dtype, shape) in entries}


def check(held: dict[str, Tensor], version: int) -> None:
    """What engines hold is the encoding of the learner's tensors."""
    assert {tensor.dtype for tensor in held.values()} == {torch.int16, torch.float32}
    for name, tensor in tensors_of(version).items():
        read = (held[name] ^ KEY).view(torch.bfloat16) if tensor.ndim == 2 else held[name]
        assert torch.equal(read, tensor.bfloat16() if tensor.ndim == 2 else tensor), name


def test_a_file_has_what_an_installed_encoding_writes(package: Path) -> None:
    path, (version, _) = package / "w" / "model.safetensors", VERSIONS
    (package / "config.json").write_text("{}")
    mirror.Mirror.make(path, SHAPES, torch.float32, package / "config.json", mine())
    made = mirror.Mirror(path, SHAPES, torch.float32, mine())
    for name, tensor in tensors_of(version).items():
        made.tensors[name].copy_(tensor)
    made.withdraw()
    made.serve(version)
    check(mirror.read(path, version), version)
    mirror.seal(path, version, seal_from_reports([made.sums()], mirror.shapes(path)))
    mirror.check(path, version)
    assert json.loads(path.with_name("config.json").read_text())["quantization_config"] == {"quant_method": "flipped"}
    assert make_encoding(load_config("tiny_cpu", ["run.name=other"])) is None


def straight(rank: int, package: Path, rendezvous: Rendezvous) -> None:
    in_rank(package)
    boxes, held = {name: whole_box(shape) for name, shape in SHAPES.items()}, blank()
    dtypes = {name: tensor.dtype for name, tensor in held.items()}
    if rank == 0:
        tensors, reports = {name: torch.zeros(shape) for name, shape in SHAPES.items()}, []
        layouts, encoder = (HF, recorded_layout(HF, [boxes])), mine().encoder(HF, 0, tensors)
        sources = sender_boxes(HF, HF)[0]
        sender = Sender(rendezvous, 0, layouts, tensors, sources, dtypes=dtypes, encoder=encoder)
        for version in VERSIONS:
            for name, tensor in tensors_of(version).items():
                tensors[name].copy_(tensor)
            reports.append(seal_from_reports([sender.send(version)[1]], SHAPES))
        sender.close()
        torch.save(reports, package / "sent.pt")
        return
    places = record(lambda tensors: [held[name].copy_(tensor) for name, tensor in tensors], SHAPES, held, dtypes)
    receiver, reports = Receiver(rendezvous, 1, {one: one.local_slice(held[one.param]) for one in places}), []
    for version in VERSIONS:
        receiver.receive(version, lambda one: None)
        check(held, version)
        reports.append({name: checksum(tensor, SHAPES[name]) for name, tensor in held.items()})
    receiver.close()
    torch.save(reports, package / "received.pt")


def test_engine_ranks_get_what_an_installed_encoding_packs(package: Path) -> None:
    keeper = RendezvousStore("127.0.0.1", 2 * HEARD)
    run_ranks(straight, 2, package, keeper.rendezvous(2, learners=1, backend="gloo"))
    assert torch.load(package / "sent.pt") == torch.load(package / "received.pt")


def compressed(package: Path, rank: int, folder: Path) -> None:
    in_rank(package)
    compression = make_compression(load_config("tiny_cpu", ["run.name=mine"]))
    dims, hf = ParallelDims(ep=2, dp=2), base.hf_tensors(0)
    src = base.megatron_tensors(hf, dims, rank)
    dst = {name: torch.full_like(tensor, torch.nan) for name, tensor in hf.items()} if rank == 0 else {}
    moves = base.push_plan(dims, 1)
    transport = ProcessGroupTransport(moves, src=src, dst=dst, bucket_bytes=4000, compression=compression)
    arriving = [step.receive for step in transport.steps if step.receive is not None]
    for version in (1, 2):
        for name, tensor in base.megatron_tensors(base.hf_tensors(version), dims, rank).items():
            src[name].copy_(tensor)
        update = transport.move(version)
        assert all(torch.equal(tensor, base.hf_tensors(version)[name]) for name, tensor in dst.items())
        assert update.num_bytes == sum(len(one.buffer) + 5 - one.trailer.nbytes for one in arriving)
        assert compression is not None
        assert vars(compression)["last"] == version
    assert bool(arriving) == (rank == 0)
    transport.close()


def test_parcels_travel_as_an_installed_compression_writes_them(package: Path) -> None:
    base.spawn(2, partial(compressed, package), package)


def test_two_encodings_of_one_run_are_refused(package: Path) -> None:
    (package / "other_encoding.py").write_text(MINE.replace('name="mine"', 'name="other"'))
    points = "[rl_megatron.features]\nmine = my_encoding:FEATURE\nother = other_encoding:FEATURE\n"
    (package / "my_encoding-1.0.dist-info" / "entry_points.txt").write_text(points)
    feature.features.cache_clear()
    for made, side in ((make_encoding, "encoding"), (make_compression, "compression")):
        with pytest.raises(ConfigError, match=f"the features mine and other each bring the {side} of weights; turn on"):
            made(load_config("tiny_cpu", ["run.name=mine"]))
