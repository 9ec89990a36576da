"""What a rank computes and holds with halves of layers in the host's memory, on a GPU whose copies are made late."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rl_megatron.algorithms.losses import CrossEntropy
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.types import LossInputs, LossOutput, Samples
from rl_megatron.weights.bytes.parked import Extent, Pinned
from tests.distributed.low_moments import fill
from tests.distributed.test_kept import SHAPES, samples
from tests.samples import sequences_of

if TYPE_CHECKING:
    from tests.recipes.meter import Meter

SHAPE = replace(SHAPES["a dense layer, shared experts"], num_layers=4, dense_layers=1)
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "moved": {},
    "moved, pp2": {"pp": 2},
    "moved, pp2 vpp2": {"pp": 2, "vpp": 2},
}
PARTS: Sequence[tuple[str, ...]] = ((), ("attention", "mlp", "moe"), ("attention",), ("moe",))
METERED = "moved"  # whose bytes on the GPU are counted, which takes as long as its operations
STEPS = 3
SLAB = 2**18


class Watched(Pinned):
    """Pinned memory that knows how much of it is taken, and the most that ever was."""

    most = 0

    @property
    def taken(self) -> int:
        """Bytes."""
        leaving = sum(end - start for _, extents in self._leaving for start, end in extents)
        return self.num_bytes - self._room - leaving

    def take(self, num_bytes: int, stream: Any) -> list[Extent]:
        extents = super().take(num_bytes, stream)
        self.most = max(self.most, self.taken)
        return extents


def learner(layout: str, parts: Sequence[str] = ()) -> LearnerSection:
    moved = {"activations": dict.fromkeys(parts, True)}
    keys = {"device": "cuda", "dtype": "bfloat16", "layers": "torch", "offload": moved, **LAYOUTS[layout]}
    return LearnerSection.model_validate(keys)


def ragged(step: int) -> list[Samples]:
    """Micro-batches of a step: of other numbers and lengths in each, but the last step's, which need no padding."""
    if step == STEPS - 1:
        return [samples(0), samples(1)]
    g = torch.Generator().manual_seed(step)
    out = []
    for _ in range(2 + step):
        lengths = torch.randint(20, 70, (4,), generator=g)
        ids, targets = torch.randint(0, 250, (2, int(lengths.sum())), generator=g)
        out.append(sequences_of(lengths, input_ids=ids, targets=targets))
    return out


def rank_main(rank: int, folder: Path, layout: str) -> None:
    """A policy for each of `PARTS`, or its first two, one after the other."""
    torch.set_num_threads(1)
    from rl_megatron.learner import world
    from rl_megatron.learner.model import kernels, offload
    from tests.distributed.pretended import streams
    from tests.recipes.meter import Meter

    streams.install()
    offload.LEAST = 1  # this model's tensors are small
    # it keeps what a GPU's kernel does
    kernels.F.rms_norm = lambda x, _, weight, eps: kernels._RMSNorm.apply(x, weight, eps)
    device = world.join(learner(layout), rank=rank, rendezvous=f"file://{folder}/rendezvous", seed=0)
    seen: dict[str, Any] = {}
    for parts in PARTS if layout == METERED else PARTS[:2]:
        slabs = Watched(SLAB)
        offload.arena = lambda slabs=slabs: slabs
        with Meter() if layout == METERED else contextlib.nullcontext() as meter:
            seen["+".join(parts)] = passed(learner(layout, parts), device, meter, slabs)
    (folder / f"rank{rank}.json").write_text(json.dumps(seen))
    world.leave()


def passed(given: LearnerSection, device: torch.device, meter: Meter | None, slabs: Watched) -> dict[str, Any]:
    """Each step's loss and norm, and at each micro-batch's loss the bytes on the GPU, of a ``meter``, and those in the
    host's memory."""
    from rl_megatron.learner.megatron import make_policy

    policy = make_policy(SHAPE, given, device, temperature=1.0)
    fill(policy, 0)
    policy.adopt()
    out: dict[str, Any] = {"steps": [], "live": [], "moved": []}

    def loss(inputs: LossInputs) -> LossOutput:
        if meter is not None:
            live.append(meter.live - slabs.num_bytes)
        moved.append(slabs.taken)
        return CrossEntropy()(inputs)

    for step in range(STEPS):
        live: list[int] = []
        moved: list[int] = []
        row = ragged(step)
        count = sum(len(m.input_ids) for m in row)
        said = policy.backward(row, loss, num_tokens=count, num_sequences=4 * len(row))
        out["steps"].append((said and said["loss"].value, policy.step(1e-2).grad_norm))
        out["live"].append(live)
        out["moved"].append(moved)
    out["pinned"], out["most"] = slabs.num_bytes, slabs.most
    weights = torch.cat([tensor.flatten() for tensor in policy.tensors.values()])
    out["weights"] = weights.view(torch.int16).long().sum().item(), weights.double().square().sum().item()
    return out
