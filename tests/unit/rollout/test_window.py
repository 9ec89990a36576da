"""The memory in which layers arrive beside vLLM's weights: how much, what is in it, and when it is released."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from rl_megatron.engines.vllm.window import LayerWindow
from rl_megatron.weights.checks.places import ParameterBox, record
from rl_megatron.weights.checks.reports import checksum

LAYERS, WIDTH, HEAD = 6, 64, 40  # a layer has a projection of two tensors and a norm; the head has padding
LAYER_BYTES = 4 * (2 * WIDTH * WIDTH + WIDTH)
HEAD_BYTES = 4 * (HEAD + 8) * WIDTH


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, HEAD + 8, bias=False)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"proj": nn.Linear(WIDTH, 2 * WIDTH, bias=False), "norm": nn.LayerNorm(WIDTH, bias=False)})
            for _ in range(LAYERS)
        )


def shapes() -> dict[str, tuple[int, ...]]:
    out: dict[str, tuple[int, ...]] = {"head": (HEAD, WIDTH)}
    for i in range(LAYERS):
        out |= {f"{i}.q": (WIDTH, WIDTH), f"{i}.k": (WIDTH, WIDTH), f"{i}.norm": (WIDTH,)}
    return out


class Arrivals:
    """A window of a model, and what its modules were given."""

    def __init__(self) -> None:
        with torch.device("meta"):
            model = Model()
        self.params = dict(model.named_parameters())
        names = {module: prefix for prefix, module in model.named_modules()}
        self.taken: dict[str, Tensor] = {}
        self.held = record(self._load, shapes(), self.params, dict.fromkeys(shapes(), torch.float32))
        modules = {m: {"weight": f"{prefix}.weight"} for m, prefix in names.items() if hasattr(m, "weight")}

        def take(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
            assert names[module] not in self.taken
            self.taken[names[module]] = tensors["weight"].clone()

        self.window = LayerWindow(self.held, self.params, modules, torch.device("cpu"), take)

    def _load(self, tensors: object) -> None:
        for name, tensor in tensors:  # type: ignore[attr-defined]
            layer, _, what = name.rpartition(".")
            if not layer:
                self.params["head.weight"][:HEAD].copy_(tensor)
            elif what == "norm":
                self.params[f"layers.{layer}.norm.weight"].copy_(tensor)
            else:
                self.params[f"layers.{layer}.proj.weight"].narrow(0, WIDTH * (what == "k"), WIDTH).copy_(tensor)

    def arrive(self, sent: Mapping[str, Tensor], order: list[ParameterBox]) -> None:
        """Boxes one by one, layers in turn."""
        for one in order:
            turn = int(one.hf.split(".")[0]) + 1 if "." in one.hf else 0
            self.window.coming(turn, [one])
            self.window.boxes[one].copy_(sent[one.hf])
            self.window.whole(one)

    def memory(self) -> int:
        """Bytes that the window has."""
        return sum({id(t): t.untyped_storage().nbytes() for t in self.window._tensors.values()}.values())


def in_turn(held: list[ParameterBox], seed: int) -> list[ParameterBox]:
    """In the order of turns, in any order within one."""
    mixed = random.Random(seed).sample(held, len(held))
    return sorted(mixed, key=lambda one: int(one.hf.split(".")[0]) if "." in one.hf else -1)


@pytest.fixture(scope="module")
def arrivals() -> Arrivals:
    return Arrivals()


@pytest.mark.parametrize("version", [1, 2, 3])
def test_layers_are_given_to_kernels_whole_through_memory_for_two(arrivals: Arrivals, version: int) -> None:
    generator = torch.Generator().manual_seed(version)
    sent = {name: torch.randn(shape, generator=generator) for name, shape in shapes().items()}
    arrivals.taken.clear()
    assert arrivals.memory() == 0
    arrivals.window.begin()
    arrivals.arrive(sent, in_turn(arrivals.held, version))
    report = arrivals.window.finish()
    arrivals.window.release()
    assert arrivals.memory() == 0
    assert LAYER_BYTES <= report.window <= LAYER_BYTES + max(LAYER_BYTES, HEAD_BYTES)
    assert {n: sum_ for n, _, sum_ in report.read} == {n: checksum(t, shapes()[n]) for n, t in sent.items()}
    assert torch.equal(arrivals.taken["head"][:HEAD], sent["head"])
    assert not arrivals.taken["head"][HEAD:].any()  # padding
    for i in range(LAYERS):
        assert torch.equal(arrivals.taken[f"layers.{i}.norm"], sent[f"{i}.norm"])
        assert torch.equal(arrivals.taken[f"layers.{i}.proj"], torch.cat([sent[f"{i}.q"], sent[f"{i}.k"]]))


def test_what_arrived_of_a_failed_version_is_gone(arrivals: Arrivals) -> None:
    """Its whole layers are the kernels' by then; of the others nothing is taken, nor left for the next version."""
    sent = {name: torch.full(shape, torch.nan) for name, shape in shapes().items()}
    order = in_turn(arrivals.held, 0)
    half = [x for x in order if x.hf.split(".")[0] in ("head", "0", "1")] + [x for x in order if x.hf == "2.q"]
    arrivals.taken.clear()
    arrivals.window.begin()
    arrivals.arrive(sent, half)
    arrivals.window.release()
    assert arrivals.memory() == 0
    assert not {name for name in arrivals.taken if name.startswith("layers.2")}
    test_layers_are_given_to_kernels_whole_through_memory_for_two(arrivals, 4)
