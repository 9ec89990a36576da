"""What is compared before weights are served: checksums, digests, the places that a loader fills, the mirror."""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rl_megatron.errors import SyncError, WeightError
from rl_megatron.weights.checks import reports as sums
from rl_megatron.weights.checks.compare import ReportReader, ServerComparisons, compare
from rl_megatron.weights.checks.places import record
from rl_megatron.weights.checks.reports import (
    ChecksumReport,
    add,
    box_checksums,
    checksum,
    make_checksum_report,
    narrowed,
    packed_report,
    parameter_kind,
    seal_from_reports,
    sent_checksums,
)
from rl_megatron.weights.routes import ends
from rl_megatron.weights.routes.ends import digest, tensor_bytes, tensor_digests
from rl_megatron.weights.routes.mirror import Mirror, read, read_seal, seal

SHAPE = (24, 40)


def made(dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(30).to(dtype)


def factors(count: int, shift: int) -> list[int]:
    """Splitmix64's steps by Python's integers."""
    out = []
    for i in range(1, count + 1):
        n = i * 0x9E3779B97F4A7C15 % 2**64
        n = (n ^ (n >> shift)) * 0xBF58476D1CE4E5B9 % 2**64
        out.append((n ^ (n >> 27)) | 1)
    return out


def test_it_is_the_sum_that_it_says() -> None:
    tensor = made()
    words = [row.numpy().tobytes() for row in tensor]
    rows, columns = factors(24, 29), factors(20, 31)
    expected = sum(
        rows[r] * columns[c] * int.from_bytes(row[8 * c : 8 * c + 8], "little")
        for r, row in enumerate(words)
        for c in range(20)
    )
    assert checksum(tensor, SHAPE) == expected % 2**64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_boxes_add_up_however_a_tensor_is_cut(dtype: torch.dtype) -> None:
    tensor, whole = made(dtype), checksum(made(dtype), SHAPE)
    assert add(checksum(tensor[:7], SHAPE, (0, 0)), checksum(tensor[7:], SHAPE, (7, 0))) == whole
    assert add(checksum(tensor[:, :16], SHAPE, (0, 0)), checksum(tensor[:, 16:], SHAPE, (0, 16))) == whole
    assert checksum(tensor.t().contiguous().t(), SHAPE) == whole
    assert checksum(tensor.view(torch.uint8), (24, 40 * dtype.itemsize)) == whole
    assert checksum(made(dtype, (24, 80))[:, ::2], SHAPE) == checksum(made(dtype, (24, 80))[:, ::2].contiguous(), SHAPE)


def test_of_vectors_and_of_three_dims() -> None:
    vector, cube = made(shape=(7,)), made(shape=(4, 6, 10))
    assert checksum(vector, (7,)) == checksum(vector[None], (1, 7)) != checksum(vector.flip(0), (7,))
    assert checksum(cube, (4, 6, 10)) == checksum(cube.reshape(4, 60), (4, 60))
    halves = checksum(cube[:, :2], (4, 6, 10), (0, 0, 0)), checksum(cube[:, 2:], (4, 6, 10), (0, 2, 0))
    assert add(*halves) == checksum(cube, (4, 6, 10))


def test_rows_longer_than_any_before_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "_WEIGHTS", {})
    shape = (1, 5000)
    first, rest = made(shape=shape).split([2000, 3000], 1)
    assert add(checksum(first, shape, (0, 0)), checksum(rest, shape, (0, 2000))) == checksum(made(shape=shape), shape)


def test_another_device_adds_up_what_it_holds_itself() -> None:
    found = sums._sum(made().to("meta"), SHAPE, (), sums._FactorsOnDevice())
    assert isinstance(found, Tensor)
    assert found.is_meta


def test_what_is_held_wider_than_in_its_file_is_compared_as_in_the_file() -> None:
    assert torch.equal(narrowed(made(), torch.bfloat16), made(torch.bfloat16))
    assert torch.equal(narrowed(made(torch.bfloat16), torch.float32), made(torch.bfloat16))


@pytest.mark.parametrize("size", [8, 4, 2, 1])
def test_an_accelerator_has_the_same(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "_PIECE", 64)  # in pieces too
    words = made().view(torch.uint8).view(sums._INTS[size])
    expected = sums._on_cpu(words.numpy().view(sums._WORDS[size]), 3, (5, 5 + words.shape[1]))
    assert int(sums._on_device(words, 3, (5, 5 + words.shape[1]), sums._FactorsOnDevice())) % 2**64 == expected


def test_of_many_boxes_it_is_that_of_each() -> None:
    boxes = [(made()[low:], SHAPE, (low, 0)) for low in (0, 7)] + [
        (made(shape=(9,)), (9,), ()),
        (made()[:0], SHAPE, ()),
    ]
    assert box_checksums(iter(boxes)) == [checksum(*box) for box in boxes]
    assert box_checksums([]) == []


def test_what_corrupts_weights_changes_it() -> None:
    tensor = made(torch.bfloat16)
    whole, bits = checksum(tensor, SHAPE), tensor.view(torch.uint8)
    for place in torch.randint(bits.numel(), (50,)).tolist():
        wrong = bits.clone().view(-1)
        wrong[place] ^= 1 << place % 8
        assert checksum(wrong.view(24, 80).view(torch.bfloat16), SHAPE) != whole
    swapped_rows, swapped_columns = tensor.clone(), tensor.clone()
    swapped_rows[[3, 9]] = tensor[[9, 3]]
    swapped_columns[:, [0, 1]] = tensor[:, [1, 0]]
    others = [swapped_rows, swapped_columns, -tensor, tensor.roll(1, 0), torch.zeros_like(tensor)]
    assert len({whole, *(checksum(other, SHAPE) for other in others)}) == 6


def test_a_box_of_half_words_is_refused() -> None:
    tensor = made(torch.bfloat16)
    with pytest.raises(ValueError, match="columns 0 to 6 of \\(24, 40\\) are not whole words of 8 bytes"):
        checksum(tensor[:, :6], SHAPE, (0, 0))


def test_what_was_looked_at_can_be_freed() -> None:
    """Of a tensor that `Tensor.numpy` was asked of, it cannot."""
    tensor = torch.arange(12.0).view(3, 4)
    checksum(tensor, (3, 4))
    assert tensor.untyped_storage().resizable()


# Digests of boxes, against Python's integers and the xxHash authors' own numbers.
def test_cpu_digests_are_xxh3() -> None:
    assert digest(tensor_bytes(torch.empty(0))) == 0x2D06800538D394C2  # XXH3_64bits of nothing, seed 0


def test_strided_boxes_have_the_digest_of_their_elements_in_order() -> None:
    whole = torch.arange(24, dtype=torch.float32).view(4, 6)
    box = whole[1:3, 2:5]
    assert digest(tensor_bytes(box)) == digest(tensor_bytes(box.clone())) != digest(tensor_bytes(whole[1:3, 1:4]))


def _by_integers(data: bytes) -> int:
    size = next(size for size in (8, 4, 2, 1) if len(data) % size == 0)
    mask, total = 2**64 - 1, 0
    letter = {8: "q", 4: "i", 2: "h", 1: "B"}[size]

    def shifted(number: int, by: int) -> int:  # as torch shifts int64: arithmetically
        return (number ^ ((number - (number >> 63 << 64)) >> by)) & mask

    for i, (word,) in enumerate(struct.iter_unpack(letter, data), start=1):
        key = 0x9E3779B97F4A7C15
        total += shifted(word * key & mask, 29) * (shifted(i * key & mask, 31) | 1)
    return (total & mask) - ((total & mask) >> 63 << 64)


@pytest.mark.parametrize("length", [1, 2, 4, 8, 13, 22, 36, 4096])
def test_torch_digests_are_the_sum_they_say(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ends, "_WIDENED", 5)  # in pieces too
    data = bytes(random.Random(length).randbytes(length))
    tensors = [torch.frombuffer(bytearray(b"x" * shift + data), dtype=torch.uint8)[shift:] for shift in (0, 1)]
    assert tensor_digests(tensors).tolist() == [_by_integers(data)] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_torch_digests_see_every_flipped_bit_and_swapped_rows(dtype: torch.dtype) -> None:
    box = torch.randn(6, 10, generator=torch.Generator().manual_seed(0)).to(dtype)
    changed = [box, box.flip(0), box.flip(1)]
    for at in range(box.nbytes * 8):
        other = box.clone()
        other.view(-1).view(torch.uint8)[at // 8] ^= 1 << at % 8
        changed.append(other)
    assert len(set(tensor_digests(changed).tolist())) == len(changed)


# The places that a loader fills, read off without data, and what lies there beside what was sealed.
HIDDEN, WIDTH, EXPERTS, TP = 8, 12, 3, 2
SHAPES = {
    "norm": (HIDDEN,),
    "router": (EXPERTS, HIDDEN),
    **{f"experts.{e}.{x}": (WIDTH, HIDDEN) for e in range(EXPERTS) for x in ("gate", "up")},
    **{f"experts.{e}.down": (HIDDEN, WIDTH) for e in range(EXPERTS)},
}
DTYPES = dict.fromkeys(SHAPES, torch.float32)
SEALED_FROM = {n: torch.randn(s, generator=torch.Generator().manual_seed(i)) for i, (n, s) in enumerate(SHAPES.items())}
SEALED = {name: checksum(tensor, tuple(tensor.shape)) for name, tensor in SEALED_FROM.items()}


class Rank:
    """An engine's rank: gate over up of its share, experts stacked; ``down`` of all experts lies transposed."""

    def __init__(self, rank: int) -> None:
        share = WIDTH // TP
        self.mine = slice(rank * share, (rank + 1) * share)
        self.params = {
            "norm": torch.zeros(HIDDEN),
            "gate.weight": torch.zeros(EXPERTS, HIDDEN),
            "w13": torch.zeros(EXPERTS, 2 * share, HIDDEN),
            "w2": torch.zeros(EXPERTS, share, HIDDEN),
        }
        self.swapped = False

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            if "experts" not in name:
                self.params["norm" if name == "norm" else "gate.weight"].copy_(tensor)
                continue
            expert, what = int(name.split(".")[1]), name.split(".")[2]
            if what == "down":
                self.params["w2"][expert].copy_(tensor[:, self.mine].t())
            else:
                self.params["w13"][expert].chunk(2)[(what == "up") ^ self.swapped].copy_(tensor[self.mine])


@pytest.fixture
def ranks() -> list[Rank]:
    return [Rank(0), Rank(1)]


def reports(ranks: list[Rank]) -> list[ChecksumReport]:
    """Places recorded with a loader that is right; over JSON, as workers answer."""
    out = []
    for rank, right in zip(ranks, (Rank(0), Rank(1)), strict=True):
        held = record(right.load, SHAPES, right.params, DTYPES)
        assert not any(param.any() for param in right.params.values())
        out.append(ReportReader().read(json.dumps(packed_report(make_checksum_report(held, rank.params), ())).encode()))
    return out


def differing(ranks: list[Rank], private: frozenset[str] = frozenset()) -> set[str]:
    found = compare(SEALED, SHAPES, reports(ranks), private)
    assert not found.unchecked
    return set(found.differing)


def test_shards_stacks_and_transposes_are_seen_by_their_names(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.load(SEALED_FROM.items())
    assert differing(ranks) == set()
    held = record(ranks[1].load, SHAPES, ranks[1].params, DTYPES)
    boxes = {one.hf: (one.param, one.box) for one in held}
    assert boxes["experts.2.up"] == ("w13", ((6, 12), (0, 8)))
    assert boxes["experts.0.down"] == ("w2", ((0, 8), (6, 12)))
    assert boxes["norm"] == ("norm", ((0, 8),))


def test_a_flipped_bit_of_one_shard_is_named(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.load(SEALED_FROM.items())
    ranks[1].params["w13"].view(torch.int32)[2, 7, 3] ^= 1
    assert differing(ranks) == {"experts.2.up"}


def test_gate_and_up_exchanged_are_named(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.swapped = True
        rank.load(SEALED_FROM.items())
    assert differing(ranks) == {n for n in SHAPES if n.endswith(("gate", "up"))}


def test_a_replica_that_differs_and_a_lost_tensor_are_named(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.load((n, t) for n, t in SEALED_FROM.items() if n != "experts.1.down")
    ranks[1].params["norm"][0] += 1
    assert differing(ranks) == {"norm", "experts.1.down"}


def test_a_layout_of_the_kernels_own_is_told_from_corruption(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.load(SEALED_FROM.items())
        rank.params["w13"] = rank.params["w13"].flip(1)  # packed behind the loader
    ranks[0].params["gate.weight"][1, 1] += 1
    said = reports(ranks)
    assert compare(SEALED, SHAPES, said, frozenset()).private(said) == {"w13"}
    again = compare(SEALED, SHAPES, said, frozenset({"w13"}))
    assert set(again.differing) == {"router"}
    assert again.unchecked == {n for n in SHAPES if n.endswith(("gate", "up"))}
    assert ServerComparisons().find("it", SEALED, SHAPES, said) == again


def test_a_parameter_too_small_for_its_box_is_not_compared(ranks: list[Rank]) -> None:
    held = record(ranks[0].load, SHAPES, ranks[0].params, DTYPES)
    smaller = ranks[0].params | {"norm": torch.zeros(HIDDEN - 1)}
    assert {hf for _, hf, _, _ in make_checksum_report(held, smaller).rows} == {*SHAPES} - {"norm"}


def test_a_tensor_of_no_elements_is_as_sealed_though_no_rank_holds_it() -> None:
    found = compare({"empty": 0}, {"empty": (0, HIDDEN)}, [ChecksumReport(rows=[], seconds=0.0)], frozenset())
    assert (dict(found.differing), found.unchecked) == ({}, frozenset())


def test_a_learners_report_tells_how_long_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(perf_counter=iter((5.0, 12.0)).__next__)
    monkeypatch.setattr("rl_megatron.weights.checks.reports.time", clock)
    assert sent_checksums([], {}, lambda _, tensor: tensor).seconds == 7.0


class Counted(tuple):  # type: ignore[type-arg]
    """A row of a report that counts how often rows are unpacked."""

    unpacked = 0

    def __iter__(self) -> Iterator[Any]:
        Counted.unpacked += 1
        return super().__iter__()


def test_many_tensors_that_differ_are_found_in_one_look_at_each_row() -> None:
    """As the first load of kernels that keep all experts in a layout of their own."""
    shapes = {f"layers.{i}.up": (2, 3) for i in range(200)}
    said = [
        ChecksumReport(rows=[Counted((f"{name}.packed", name, ((0, 2), (0, 3)), 1)) for name in shapes], seconds=0.0)
    ]
    found = compare(dict.fromkeys(shapes, 2), shapes, said, frozenset())
    assert found.differing == {name: {f"{name}.packed"} for name in shapes}
    assert Counted.unpacked <= len(shapes)
    assert found.private(said) == {"layers.*.up.packed"}


@pytest.mark.parametrize(
    "compute",
    [lambda t: t + 1, lambda t: t.clone().add_(1), lambda t: torch.cat([t[:2], t[:2]])],
    ids=["sum", "copy, changed", "parts, joined"],
)
def test_what_a_loader_computes_is_refused(compute: Callable[[Tensor], Tensor]) -> None:
    param, shapes, dtypes = torch.zeros(4), {"a": (4,)}, {"a": torch.float32}

    def load(tensors: Iterable[tuple[str, Tensor]]) -> None:
        for _, tensor in tensors:
            param.copy_(compute(tensor))

    with pytest.raises(WeightError, match="but computes its values"):
        record(load, shapes, {"p": param}, dtypes)
    assert record(load, shapes, {"p": param}, dtypes, partial=True) == []


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("share", [slice(0, 20), slice(0, 4), slice(3, 15)])
def test_tensors_that_a_loader_joins_are_boxes(dim: int, share: slice) -> None:
    """As SGLang's does with DeepSeek's projections down to both latents. A rank may hold a share of what is joined."""
    wide = {n: torch.randn(size, 6).transpose(0, dim).contiguous() for n, size in (("q", 6), ("kv", 8), ("rope", 6))}
    param = torch.zeros(share.stop - share.start + 2, 6).transpose(0, dim)

    def load(tensors: Iterable[tuple[str, Tensor]]) -> None:
        q, kv, rope = (tensor for _, tensor in tensors)
        joined = torch.cat([torch.cat([q, kv], dim=dim), rope], dim=dim).transpose(0, dim)[share]
        param.transpose(0, dim)[1:-1].copy_(joined)

    held = record(load, {n: tuple(t.shape) for n, t in wide.items()}, {"p": param}, dict.fromkeys(wide, torch.float32))
    assert not param.any()
    load(wide.items())
    for one in held:
        assert one.full_shape == tuple(wide[one.hf].shape)
        assert torch.equal(one.local_slice(param), wide[one.hf][tuple(slice(*part) for part in one.box)])
    assert sum(one.local_slice(param).numel() for one in held) == param.numel() - 12


def test_a_rank_that_padding_leaves_nothing_holds_no_box() -> None:
    """SGLang's loader fills it with no rows of zeros."""
    param = torch.ones(4, HIDDEN)

    def load(tensors: Iterable[tuple[str, Tensor]]) -> None:
        for _ in tensors:
            rows = param.narrow(0, 4, 0)
            rows.copy_(torch.zeros_like(rows))

    assert record(load, {"a": (4, HIDDEN)}, {"p": param}, {"a": torch.float32}) == []


def test_kinds_are_names_without_numbers() -> None:
    assert parameter_kind("model.layers.11.mlp.experts.w13_weight") == "model.layers.*.mlp.experts.w13_weight"


# The file between learner and engine servers: safetensors that others can read; errors name its faults.
MIRRORED = {"a.weight": (3, 4), "b.bias": (5,)}


@pytest.fixture
def mirror(tmp_path: Path) -> Mirror:
    config = tmp_path / "config.json"
    config.write_text("{}")
    path = tmp_path / "weights" / "model.safetensors"
    Mirror.make(path, MIRRORED, torch.bfloat16, config)
    made = Mirror(path, MIRRORED, torch.bfloat16)
    for name, tensor in made.tensors.items():
        tensor.copy_(torch.randn(MIRRORED[name]))
    return made


def test_what_is_served_is_read_and_is_a_hugging_face_folder(mirror: Mirror) -> None:
    mirror.serve(3)
    for tensors in (read(mirror.path, 3), load_file(mirror.path)):
        assert tensors.keys() == MIRRORED.keys()
        assert all(torch.equal(tensors[name], mirror.tensors[name]) for name in MIRRORED)
    assert mirror.path.with_name("config.json").read_text() == "{}"


@pytest.mark.parametrize("how", ["open to all", "another's", "a link"])
def test_a_folder_that_a_stranger_made_is_refused_and_nothing_is_written_through_it(tmp_path: Path, how: str) -> None:
    """With links in it to files of the run's user, as somebody would make it who foretold its name."""
    if how == "another's" and os.geteuid():
        pytest.skip("only root can make a folder that is another's")
    config, victim, folder = tmp_path / "config.json", tmp_path / "victim", tmp_path / "weights"
    config.write_text("{}")
    victim.write_text("mine")
    real = folder.with_name("real") if how == "a link" else folder
    real.mkdir(mode=0o700)
    for name in ("config.json", "model.safetensors"):
        (real / name).symlink_to(victim)
    if how == "a link":
        folder.symlink_to(real)
    elif how == "another's":
        os.chown(folder, 65534, 65534)
    else:
        folder.chmod(0o777)
    with pytest.raises(SyncError, match=r"no folder of user \d+ alone .* weights\.folder"):
        Mirror.make(folder / "model.safetensors", MIRRORED, torch.bfloat16, config)
    assert victim.read_text() == "mine"


def test_the_folder_is_nobody_elses_and_one_of_an_earlier_start_is_taken(mirror: Mirror, tmp_path: Path) -> None:
    assert stat.S_IMODE(mirror.path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(mirror.path.stat().st_mode) == 0o600
    mirror.serve(3)
    Mirror.make(mirror.path, MIRRORED, torch.bfloat16, tmp_path / "config.json")
    assert Mirror(mirror.path, MIRRORED, torch.bfloat16).num_bytes == mirror.num_bytes
    with pytest.raises(SyncError, match="holds version None, not 3"):  # which the earlier start had served
        read(mirror.path, 3)


def test_memory_is_taken_before_the_first_tensor_is_written_or_refused(tmp_path: Path) -> None:
    """Not where the file is made, as weights that are sent straight may never fill it."""
    config, memory = tmp_path / "config.json", Path("/dev/shm")
    config.write_text("{}")
    whole = shutil.disk_usage(memory).total
    with TemporaryDirectory(dir=memory) as folder:
        path = Path(folder) / "w" / "model.safetensors"
        for elements, fits in ((2**19, True), (whole, False)):
            Mirror.make(path, {"a": (elements,)}, torch.bfloat16, config)
            mirror = Mirror(path, {"a": (elements,)}, torch.bfloat16)
            assert 512 * path.stat().st_blocks < 2**20
            if fits:
                mirror.withdraw()
                assert 512 * path.stat().st_blocks >= path.stat().st_size > 2**20
                continue
            needed = path.stat().st_size
            with pytest.raises(SyncError, match=rf"{path}: .* need {needed} bytes .*, and \d+ are free\..*weights"):
                mirror.withdraw()


def test_a_file_that_somebody_removed_is_told_with_what_to_do(mirror: Mirror) -> None:
    """What systemd-logind does to a user's files in /dev/shm at the end of the last session."""
    mirror.withdraw()
    mirror.serve(1)
    shutil.rmtree(mirror.path.parent)
    for act in (mirror.withdraw, lambda: mirror.serve(2)):
        with pytest.raises(SyncError, match=rf"{mirror.path}, .* was removed .* RemoveIPC=no .*weights\.folder"):
            act()


def test_a_version_that_is_not_there_is_refused(mirror: Mirror) -> None:
    mirror.serve(3)
    with pytest.raises(SyncError, match="holds version 3, not 4"):
        read(mirror.path, 4)
    mirror.withdraw()
    with pytest.raises(SyncError, match="holds version None, not 3"):
        read(mirror.path, 3)


def test_a_version_that_is_not_sealed_is_told_from_one_that_is(mirror: Mirror) -> None:
    mirror.serve(3)
    with pytest.raises(SyncError, match="version 3 is not sealed"):
        read_seal(mirror.path, 3)
    with pytest.raises(SyncError, match="holds version 3, not 4"):
        seal(mirror.path, 4, {})
    assert seal(mirror.path, 3, {"a.weight": 5}) == read_seal(mirror.path, 3)
    assert read_seal(mirror.path, 3).checksums == {"a.weight": 5}
    mirror.serve(4)
    with pytest.raises(SyncError, match="version 4 is not sealed"):
        read_seal(mirror.path, 4)


def test_a_flipped_bit_is_in_the_sums(mirror: Mirror) -> None:
    before = seal_from_reports([mirror.sums()], MIRRORED)
    assert before == {name: checksum(tensor, MIRRORED[name]) for name, tensor in mirror.tensors.items()}
    mirror.tensors["b.bias"].view(torch.uint8)[1] ^= 1
    after = seal_from_reports([mirror.sums()], MIRRORED)
    assert [name for name in MIRRORED if before[name] != after[name]] == ["b.bias"]
