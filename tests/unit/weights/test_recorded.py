"""The places that a loader fills, read off without data, and what lies there beside what was sealed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_megatron.errors import WeightError
from rl_megatron.weights.checks.checksums import checksum
from rl_megatron.weights.checks.compare import ReportReader, compare
from rl_megatron.weights.checks.places import record
from rl_megatron.weights.checks.reports import Report, checksums_of, kind_of, packed_report

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
                half = self.params["w13"][expert].chunk(2)[(what == "up") ^ self.swapped]
                half.copy_(tensor[self.mine])


@pytest.fixture
def ranks() -> list[Rank]:
    return [Rank(0), Rank(1)]


def reports(ranks: list[Rank]) -> list[Report]:
    """Places recorded with a loader that is right; over JSON, as workers answer."""
    out = []
    for rank, right in zip(ranks, (Rank(0), Rank(1)), strict=True):
        held = record(right.load, SHAPES, right.params, DTYPES)
        assert not any(param.any() for param in right.params.values())
        out.append(ReportReader().read(json.dumps(packed_report(checksums_of(held, rank.params), ())).encode()))
    return out


def differing(ranks: list[Rank], private: frozenset[str] = frozenset()) -> set[str]:
    found = compare(SEALED, SHAPES, reports(ranks), private)
    assert not found.unseen
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
    assert again.unseen == {n for n in SHAPES if n.endswith(("gate", "up"))}


class Counted(tuple):  # type: ignore[type-arg]
    """A row of a report that counts how often rows are unpacked."""

    unpacked = 0

    def __iter__(self) -> Iterator[Any]:
        Counted.unpacked += 1
        return super().__iter__()


def test_many_tensors_that_differ_are_found_in_one_look_at_each_row() -> None:
    """As the first load of kernels that keep all experts in a layout of their own."""
    shapes = {f"layers.{i}.up": (2, 3) for i in range(200)}
    said = [Report(rows=[Counted((f"{name}.packed", name, ((0, 2), (0, 3)), 1)) for name in shapes], seconds=0.0)]
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
    wide = {
        name: torch.randn(size, 6).transpose(0, dim).contiguous() for name, size in (("q", 6), ("kv", 8), ("rope", 6))
    }
    param = torch.zeros(share.stop - share.start + 2, 6).transpose(0, dim)

    def load(tensors: Iterable[tuple[str, Tensor]]) -> None:
        q, kv, rope = (tensor for _, tensor in tensors)
        joined = torch.cat([torch.cat([q, kv], dim=dim), rope], dim=dim).transpose(0, dim)[share]
        param.transpose(0, dim)[1:-1].copy_(joined)

    held = record(load, {n: tuple(t.shape) for n, t in wide.items()}, {"p": param}, dict.fromkeys(wide, torch.float32))
    assert not param.any()
    load(wide.items())
    for one in held:
        assert one.whole == tuple(wide[one.hf].shape)
        assert torch.equal(one.of(param), wide[one.hf][tuple(slice(*part) for part in one.box)])
    assert sum(one.of(param).numel() for one in held) == param.numel() - 12


def test_a_rank_that_padding_leaves_nothing_holds_no_box() -> None:
    """SGLang's loader fills it with no rows of zeros."""
    param = torch.ones(4, HIDDEN)

    def load(tensors: Iterable[tuple[str, Tensor]]) -> None:
        for _ in tensors:
            rows = param.narrow(0, 4, 0)
            rows.copy_(torch.zeros_like(rows))

    assert record(load, {"a": (4, HIDDEN)}, {"p": param}, {"a": torch.float32}) == []


def test_kinds_are_names_without_numbers() -> None:
    assert kind_of("model.layers.11.mlp.experts.w13_weight") == "model.layers.*.mlp.experts.w13_weight"
