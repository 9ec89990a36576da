"""Log-probs and hand-written gradients against torch's own: values, entropy, gradients, and bytes that are held."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.learner import heads as module
from rl_megatron.learner.heads import head_logprobs, logit_norms, token_logprobs
from rl_megatron.learner.model import kernels
from rl_megatron.learner.packed import Slots
from rl_megatron.models import operations
from rl_megatron.weights.layouts.learner import Elements, Rank
from tests.small_models import TINY_MOE
from tools.planner import terms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab", "rows"), [(37, 37), (37, 48)])
@pytest.mark.parametrize("chunk", [3, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_value_entropy_and_gradient_are_those_of_log_softmax(
    dtype: torch.dtype, vocab: int, rows: int, chunk: int, temperature: float
) -> None:
    g = torch.Generator().manual_seed(0)
    logits = (torch.randn(10, rows, generator=g) * 4).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (10,), generator=g)
    weight, entropy_weight = torch.randn(2, 10, generator=g)
    before = logits.detach().clone()

    logprobs, entropy = token_logprobs(logits, targets, temperature=temperature, vocab_size=vocab, chunk=chunk)
    (logprobs * weight).sum().backward(retain_graph=True)
    assert logits.grad is not None
    of_logprobs, logits.grad = logits.grad, None
    (logprobs * weight + entropy * entropy_weight).sum().backward()

    exact = logits.detach().double()[:, :vocab].requires_grad_()
    log_p = (exact / temperature).log_softmax(-1)
    wanted = log_p.gather(1, targets[:, None]).squeeze(1)
    wanted_entropy = -(log_p.exp() * log_p).sum(-1)
    (alone,) = torch.autograd.grad((wanted * weight.double()).sum(), exact, retain_graph=True)
    (wanted * weight.double() + wanted_entropy * entropy_weight.double()).sum().backward()
    assert exact.grad is not None
    rounding = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(logprobs.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), wanted_entropy, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(of_logprobs[:, :vocab].double(), alone, rtol=rounding, atol=rounding)
    torch.testing.assert_close(logits.grad[:, :vocab].double(), exact.grad, rtol=rounding, atol=rounding)
    assert not logits.grad[:, vocab:].any()
    assert torch.equal(logits.detach(), before)


@pytest.mark.parametrize(("vocab", "rows"), [(37, 37), (37, 48)])
@pytest.mark.parametrize("chunk", [3, 64])
def test_norms_are_those_of_the_gradient_in_the_logits(vocab: int, rows: int, chunk: int) -> None:
    """Of float64's autograd, and of the paper's closed form; also of a target that is nearly certain, or nearly
    impossible, where float32's closed form is rounding alone."""
    g = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(10, rows, generator=g) * 4, torch.randint(0, vocab, (10,), generator=g)
    logits[0, targets[0]], logits[1, targets[1]] = 18.0, -200.0
    before = logits.clone()
    cut = {"rows": rows, "temperature": 0.7, "vocab_size": vocab, "chunk": chunk}
    found = logit_norms(logits, targets, lambda x: x, **cut)
    scaled = (logits.double()[:, :vocab] / 0.7).requires_grad_()
    said = scaled.log_softmax(-1).gather(1, targets[:, None])
    (gradient,) = torch.autograd.grad(said.sum(), scaled)
    wanted, p = gradient.square().sum(1), scaled.detach().softmax(-1)
    torch.testing.assert_close(wanted, 1 - 2 * said.detach().exp().squeeze(1) + p.square().sum(1), rtol=0, atol=1e-14)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=0)
    assert 0 < found[0] < 1e-8  # where 1 - 2 p + the sum of all p² is 0 in float32
    assert torch.equal(logits, before)


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]], requires_grad=True)
    logprobs, entropy = token_logprobs(logits, torch.tensor([1, 2]), temperature=1.0, vocab_size=3)
    logprobs.sum().backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert logprobs.tolist() == pytest.approx([-2e4, -1.0986123])
    assert entropy.tolist() == pytest.approx([0.0, 1.0986123])


def head_case(tokens: int, hidden: int, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, an output layer's weight, and targets below ``rows``."""
    g = torch.Generator().manual_seed(0)
    states, weight = torch.randn(tokens, hidden, generator=g), torch.randn(rows, hidden, generator=g) / hidden**0.5
    return states.to(dtype), weight.to(dtype), torch.randint(0, rows, (tokens,), generator=g)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("main_grad", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("chunk", "block"), [(3, 16), (64, 8192)])
def test_a_float32_head_is_float64s_within_its_own_rounding(
    dtype: torch.dtype, main_grad: torch.dtype | None, chunk: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WEIGHT_ROWS", block)
    vocab, temperature = 37, 0.7
    states, weight, targets = head_case(10, 64, 48, dtype)
    targets = targets % vocab
    hidden, weight = states.requires_grad_(), torch.nn.Parameter(weight)
    if main_grad is not None:
        weight.main_grad = torch.ones_like(weight, dtype=main_grad)  # type: ignore[attr-defined]
    of_logprobs, of_entropy = torch.randn(2, 10, generator=torch.Generator().manual_seed(1))
    found = head_logprobs(hidden, weight, targets, temperature=temperature, vocab_size=vocab, chunk=chunk)
    (found[0] * of_logprobs + found[1] * of_entropy).sum().backward()

    exact_hidden, exact_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    log_p = (exact_hidden @ exact_weight[:vocab].T / temperature).log_softmax(-1)
    wanted = log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)
    (wanted[0] * of_logprobs + wanted[1] * of_entropy).sum().backward()
    plain = token_logprobs(hidden @ weight.T, targets, temperature=temperature, vocab_size=vocab)
    for ours, others, true in zip(found, plain, wanted, strict=True):
        assert (ours - true).abs().max() < 2e-6
        assert dtype == torch.float32 or (others - true).abs().max() > 1e-3
    rounding = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad.double(), exact_hidden.grad, rtol=rounding[dtype], atol=rounding[dtype])
    of_weight = weight.grad if main_grad is None else weight.main_grad.float() - 1  # type: ignore[attr-defined]
    assert of_weight is not None
    assert weight.grad is None or main_grad is None
    bound = rounding[main_grad or dtype]
    torch.testing.assert_close(of_weight.double(), exact_weight.grad, rtol=bound, atol=bound)


class Held(TorchDispatchMode):
    """Counts the bytes that operations within have made and that are still there, and their most."""

    now = most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {x.untyped_storage()._cdata for x in args if isinstance(x, Tensor)}
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else (made,):
            if isinstance(one, Tensor) and one.untyped_storage()._cdata not in before:
                storage = one.untyped_storage()
                before.add(storage._cdata)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.gone, storage.nbytes())
        return made

    def gone(self, count: int) -> None:
        self.now -= count


@pytest.mark.parametrize(("dtype", "gradient"), [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16",) * 2])
def test_a_float32_head_holds_the_bytes_of_its_term(dtype: str, gradient: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, hidden, rows, chunk, block = 512, 256, 4096, 32, 128
    for at in (module, terms):
        monkeypatch.setattr(at, "WEIGHT_ROWS", block)
    monkeypatch.setattr(terms, "LOGITS_TOKENS", chunk)
    states, weight, targets = head_case(tokens, hidden, rows, getattr(torch, dtype))
    states.requires_grad_()
    weight = torch.nn.Parameter(weight)
    weight.main_grad = torch.zeros_like(weight, dtype=getattr(torch, gradient))  # type: ignore[attr-defined]
    with Held() as held:
        found = head_logprobs(states, weight, targets, temperature=1.0, vocab_size=rows, chunk=chunk)
        (found[0] + found[1]).sum().backward()
    none = Elements(dense=0, experts=0)
    rank = Rank(
        stage=0,
        parameters=none,
        trained_parameters=none,
        matrices=none,
        tokens=tokens,
        layers=(),
        inputs=(),
        longest=1,
        largest=1,
    )
    learner = LearnerSection.model_validate({"head_dtype": "float32", "dtype": dtype, "gradient_dtype": gradient})
    term = terms.logits_bytes(learner, replace(TINY_MOE, hidden_size=hidden, vocab_size=rows), rank)
    assert held.most + states.nbytes == pytest.approx(term, rel=0.03)


# The hand-written gradients against autograd of the plain formulas, in value and gradient.
@pytest.fixture(params=["oneDNN", "torch's own"])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each library of products, whichever is the faster one on this processor."""
    monkeypatch.setattr(operations, "ONEDNN_LEADS", request.param == "oneDNN" and operations.HAS_ONEDNN)
    monkeypatch.setattr(kernels, "MIN_ONEDNN_FLOPS", 1)  # tests' are small


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
        results.append([out, *torch.autograd.grad(out, leaves, random(*out.shape, seed=9).to(dtype))])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)


def plain_rotate(x: Tensor, angle: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


@pytest.mark.usefixtures("products")
def test_linear() -> None:
    x, weight = random(kernels.WEIGHT_GRAD_ROWS + 37, 1, 24), random(40, 24)
    assert_equal_with_gradients(kernels.linear, F.linear, [x, weight])


def test_rms_norm_and_rotate() -> None:
    def through_slice(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, weight: function(x[..., 8:40], weight)

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    ours = through_slice(lambda x, weight: kernels.rms_norm(x, weight, 1e-6))
    assert_equal_with_gradients(ours, through_slice(plain), [random(9, 3, 64), random(32)])
    angle = random(11, 1, 8)
    assert_equal_with_gradients(
        lambda x: kernels.rotate(x, angle.cos(), angle.sin()),
        lambda x: plain_rotate(x, angle.double()),
        [random(11, 3, 16)],
    )


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("function", [kernels.expert_mlp, kernels.grouped_mlp], ids=["one by one", "in one call"])
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
        groups = kernels.make_expert_groups(counts, x)
        return kernels.multiply(x, weights, groups) + kernels.own(groups, x) @ biases

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
    monkeypatch.setattr(operations, "ONEDNN_LEADS", leads and operations.HAS_ONEDNN)
    rows = int(kernels.MIN_ONEDNN_FLOPS) // (2 * 64 * 50)
    for a in (random(rows - 1, 64), random(rows, 64)):
        b = random(50, 64)
        with Products("_linear_pointwise") as compiled:
            found = kernels.matmul_transposed(a, b)
        assert compiled.count == (leads and operations.HAS_ONEDNN and len(a) == rows)
        torch.testing.assert_close(found, (a.double() @ b.double().T).float(), rtol=1e-5, atol=1e-4)


COUNTS = [3, 0, 40, 5]


def one_by_one(x: Tensor, probs: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
    return kernels.expert_mlp(x, probs, COUNTS, fc1, fc2)


def in_one_call(x: Tensor, probs: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
    return kernels.grouped_mlp(x, probs, COUNTS, fc1, fc2, recompute=False)


def apart_in_one_call(x: Tensor, probs: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
    return kernels.grouped_mlp(x, probs, COUNTS, list(fc1), list(fc2), recompute=False)


def products_alone(x: Tensor, probs: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
    groups = kernels.make_expert_groups(COUNTS, x)
    return kernels.multiply(kernels.multiply(x, fc1.mT, groups).chunk(2, -1)[0] * probs[:, None], fc2.mT, groups)


def linears(x: Tensor, probs: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
    return kernels.linear(kernels.linear(x, fc1[0]).chunk(2, -1)[0] * probs[:, None], fc2[0])


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
def test_an_expert_without_rows_has_no_gradient_at_all(counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
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
    out = kernels.grouped_mlp(x, probs, counts, fc1, fc2, recompute=False)
    out = kernels.multiply(out, fc2, kernels.make_expert_groups(counts, x))
    for grad in torch.autograd.grad(out.sum(), (fc1, fc2)):
        assert [bool(one.any()) for one in grad] == [count > 0 for count in counts]
        assert grad.isfinite().all()


def test_slots_and_back() -> None:
    row = torch.tensor([3, 4, 0, 1, 2, 5, 6, 6])
    slots = Slots(row=row, slot=torch.tensor([2, 3, 4, 0, 1, 5, 6]), padding=torch.tensor([7]))
    real = torch.tensor([1.0, 1, 1, 1, 1, 1, 1, 0])[:, None]
    assert_equal_with_gradients(
        lambda x: kernels.into_slots(x, slots) * real, lambda x: x[slots.row] * real, [random(7, 3)]
    )
    assert_equal_with_gradients(lambda y: kernels.from_slots(y, slots), lambda y: y[slots.slot], [random(8, 3)])
