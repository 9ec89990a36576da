"""The hand-written gradients against autograd of the plain formulas, in value and gradient."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rl_megatron.learner.model.kernels import fused, grouped
from rl_megatron.learner.packed import Slots
from rl_megatron.models import linear


@pytest.fixture(params=["oneDNN", "torch's own"])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each library of products, whichever is the faster one on this processor."""
    monkeypatch.setattr(linear, "ONEDNN_LEADS", request.param == "oneDNN" and linear.HAS_ONEDNN)
    monkeypatch.setattr(fused, "MIN_ONEDNN_FLOPS", 1)  # tests' are small


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def assert_equal_with_gradients(
    ours: Callable[..., Tensor], plain: Callable[..., Tensor], inputs: Sequence[Tensor]
) -> None:
    """Both on the same inputs; ``plain`` in float64."""
    results = []
    for function, dtype in ((ours, torch.float32), (plain, torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out = function(*leaves)
        grads = torch.autograd.grad(out, leaves, random(*out.shape, seed=9).to(dtype))
        results.append([out, *grads])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)


def plain_rotate(x: Tensor, angle: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


@pytest.mark.usefixtures("products")
def test_linear() -> None:
    x, weight = random(fused.WEIGHT_GRAD_ROWS + 37, 1, 24), random(40, 24)
    assert_equal_with_gradients(fused.linear, F.linear, [x, weight])


def test_rms_norm_of_a_strided_input() -> None:
    def through_slice(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, weight: function(x[..., 8:40], weight)

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    ours = through_slice(lambda x, weight: fused.rms_norm(x, weight, 1e-6))
    assert_equal_with_gradients(ours, through_slice(plain), [random(9, 3, 64), random(32)])


def test_rotate() -> None:
    angle = random(11, 1, 8)
    assert_equal_with_gradients(
        lambda x: fused.rotate(x, angle.cos(), angle.sin()),
        lambda x: plain_rotate(x, angle.double()),
        [random(11, 3, 16)],
    )


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("function", [fused.expert_mlp, grouped.grouped_mlp], ids=["one by one", "in one call"])
@pytest.mark.parametrize(
    "counts", [[200, 0, 37, 64], [0, 0, 0, 5], [1, 130, 2, 300]], ids=["an empty expert", "one expert", "uneven"]
)
def test_expert_mlp(counts: list[int], function: Callable[..., Tensor]) -> None:
    """One expert after the other, as on CPUs, and torch's grouped products, which GPUs have."""
    experts, hidden, width = len(counts), 24, 16
    n = sum(counts)
    weights = [random(2 * width, hidden, seed=e) for e in range(experts)]
    weights += [random(hidden, width, seed=e) for e in range(experts)]

    def ours(x: Tensor, probs: Tensor, *weights: Tensor, recompute: bool = False, stacked: bool = False) -> Tensor:
        halves = weights[:experts], weights[experts:]
        fc1, fc2 = map(torch.stack, halves) if stacked else map(list, halves)
        return function(x, probs, counts, fc1, fc2, recompute=recompute)

    def plain(x: Tensor, probs: Tensor, *weights: Tensor) -> Tensor:
        out = []
        for rows, prob, fc1, fc2 in zip(
            x.split(counts), probs.split(counts), weights[:experts], weights[experts:], strict=True
        ):
            gate, up = (rows @ fc1.T).chunk(2, -1)
            out.append((F.silu(gate) * up * prob[:, None]) @ fc2.T)
        return torch.cat(out)

    inputs = [random(n, hidden), random(n).sigmoid(), *(w / 4 for w in weights)]
    assert_equal_with_gradients(ours, plain, inputs)
    leaves = [x.clone().requires_grad_() for x in inputs]
    kept = torch.autograd.grad(ours(*leaves).sum(), leaves)
    for other in (partial(ours, recompute=True), partial(ours, stacked=True)):
        assert all(map(torch.equal, kept, torch.autograd.grad(other(*leaves).sum(), leaves)))


def test_grouped_products_with_biases() -> None:
    counts, inside, outside = [3, 0, 40, 5], 24, 16

    def ours(x: Tensor, weights: Tensor, biases: Tensor) -> Tensor:
        groups = grouped.groups_of(counts, x)
        return grouped.multiply(x, weights, groups) + grouped.own(groups, x) @ biases

    def plain(x: Tensor, weights: Tensor, biases: Tensor) -> Tensor:
        return torch.cat([rows @ w + b for rows, w, b in zip(x.split(counts), weights, biases, strict=True)])

    assert_equal_with_gradients(ours, plain, [random(48, inside), random(4, inside, outside), random(4, outside)])


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self._names, self.count = names or ("mm", "_grouped_mm", "_linear_pointwise"), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in self._names
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("leads", [False, True])
def test_onednn_compiles_no_kernel_for_a_small_product(leads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "ONEDNN_LEADS", leads and linear.HAS_ONEDNN)
    rows = int(fused.MIN_ONEDNN_FLOPS) // (2 * 64 * 50)
    for a in (random(rows - 1, 64), random(rows, 64)):
        b = random(50, 64)
        with Products("_linear_pointwise") as compiled:
            found = fused.matmul_transposed(a, b)
        assert compiled.count == (leads and linear.HAS_ONEDNN and len(a) == rows)
        torch.testing.assert_close(found, (a.double() @ b.double().T).float(), rtol=1e-5, atol=1e-4)


COUNTS = [3, 0, 40, 5]


def one_by_one(x: Tensor, probs: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
    return fused.expert_mlp(x, probs, COUNTS, fc1, fc2)


def in_one_call(x: Tensor, probs: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
    return grouped.grouped_mlp(x, probs, COUNTS, fc1, fc2, recompute=False)


def apart_in_one_call(x: Tensor, probs: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
    return grouped.grouped_mlp(x, probs, COUNTS, list(fc1), list(fc2), recompute=False)


def products_alone(x: Tensor, probs: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
    groups = grouped.groups_of(COUNTS, x)
    inside = grouped.multiply(x, fc1.mT, groups).chunk(2, -1)[0]
    return grouped.multiply(inside * probs[:, None], fc2.mT, groups)


def linears(x: Tensor, probs: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
    return fused.linear(fused.linear(x, fc1[0]).chunk(2, -1)[0] * probs[:, None], fc2[0])


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("function", [one_by_one, in_one_call, apart_in_one_call, products_alone, linears])
def test_frozen_weights_cost_no_product(function: Callable[..., Tensor]) -> None:
    """Half of those of a backward pass are for weights; other gradients are the same to the bit."""
    given = [random(sum(COUNTS), 24), random(sum(COUNTS)), random(4, 32, 24), random(4, 24, 16)]
    counted, found = dict[tuple[bool, bool], int](), dict[tuple[bool, bool], list[Tensor]]()
    for trained in itertools.product((True, False), repeat=2):
        leaves = [x.clone().requires_grad_(on) for x, on in zip(given, (True, True, *trained), strict=True)]
        out = function(*leaves)
        with Products() as made:
            grads = torch.autograd.grad(out.sum(), [leaf for leaf in leaves if leaf.requires_grad])
        counted[trained], found[trained] = made.count, [*grads]
    assert counted[True, True] > 0
    assert all(4 * count == (2 + sum(trained)) * counted[True, True] for trained, count in counted.items())
    assert all(map(torch.equal, found[False, False], found[True, True]))
    assert torch.equal(found[True, False][2], found[True, True][2])
    assert torch.equal(found[False, True][2], found[True, True][3])


@pytest.mark.parametrize("counts", [[0, 5, 0], [8, 4, 9]])
def test_an_expert_without_rows_has_no_gradient_whatever_torch_leaves(
    counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch 2.13 does on Blackwell."""
    multiply = F.grouped_mm

    def leaving(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        out = multiply(a, b, offs=offs)
        if b.ndim == 2:
            out[[expert for expert, count in enumerate(counts) if not count]] = torch.nan
        return out

    monkeypatch.setattr(F, "grouped_mm", leaving)
    given = [random(sum(counts), 8), random(sum(counts)), random(3, 16, 8), random(3, 8, 8)]
    x, probs, fc1, fc2 = (tensor.requires_grad_() for tensor in given)
    out = grouped.grouped_mlp(x, probs, counts, fc1, fc2, recompute=False)
    out = grouped.multiply(out, fc2, grouped.groups_of(counts, x))
    for grad in torch.autograd.grad(out.sum(), (fc1, fc2)):
        assert [bool(one.any()) for one in grad] == [count > 0 for count in counts]
        assert grad.isfinite().all()


def test_slots_and_back() -> None:
    slots = Slots(
        row=torch.tensor([3, 4, 0, 1, 2, 5, 6, 6]), slot=torch.tensor([2, 3, 4, 0, 1, 5, 6]), padding=torch.tensor([7])
    )
    real = torch.tensor([1.0, 1, 1, 1, 1, 1, 1, 0])[:, None]
    assert_equal_with_gradients(
        lambda x: fused.into_slots(x, slots) * real, lambda x: x[slots.row] * real, [random(7, 3)]
    )
    assert_equal_with_gradients(lambda y: fused.from_slots(y, slots), lambda y: y[slots.slot], [random(8, 3)])
