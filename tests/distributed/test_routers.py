"""Losses and biases that balance the load of experts, and frozen routers, in every layout and split of a batch.

The oracle is transformers' model in float64: the losses as `learner.routers.balance` writes them, of logits that are
made here from the routers' inputs, and torch's gradient of them. All layouts run in two processes, started once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from rl_megatron.algorithms.losses import CrossEntropy
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.data.packing import pack
from rl_megatron.types import Batch, Samples, SkippedStep
from rl_megatron.weights.layouts.families import read_shape
from tests.distributed.ranks import fill, ragged_samples, run_ranks, worlds
from tests.family_models import save_model
from tests.rows import policy_loss
from tools.planner.memory import footprints

if TYPE_CHECKING:
    from rl_megatron.learner.trained import MegatronLearner

SEQUENCES, VOCABULARY, RATE = 12, 61, 0.125
COEFFICIENTS = {"aux_loss": 0.5, "seq_aux_loss": 2.0, "global_aux_loss": 1.5, "z_loss": 0.25}
NO_LOSS = policy_loss(objective="cispo", aggregation="token_mean")  # of advantages that are 0
LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {  # keys, tokens of a micro-batch
    "one": ({}, 4096),
    "one, four micro-batches": ({}, 70),
    "ep2": ({"ep": 2}, 70),
    "tp2, experts recomputed": ({"tp": 2, "recompute": {"moe": True}}, 70),
    "cp2": ({"cp": 2}, 70),
    "pp2-vpp2, recomputed": ({"pp": 2, "vpp": 2, "recompute": {"uniform": 1}}, 90),
}


def section(keys: dict[str, Any], **router: Any) -> LearnerSection:
    return LearnerSection.model_validate({**keys, "router": router})


def make_samples() -> Samples:
    samples = ragged_samples(SEQUENCES, torch.Generator().manual_seed(5))
    return replace(samples, input_ids=samples.input_ids % VOCABULARY, targets=samples.targets % VOCABULARY)


def make(folder: Path, learner: LearnerSection, rank: int, device: torch.device) -> MegatronLearner:
    """A policy with the folder's weights."""
    from rl_megatron.learner.megatron import make_policy
    from rl_megatron.weights.layouts.families import megatron_layout

    shape = read_shape(folder)
    policy = make_policy(shape, learner, device, temperature=1.0)
    layout = megatron_layout(shape, learner.dims)
    assert {name: tuple(t.shape) for name, t in policy.tensors.items()} == layout.local_shapes(rank)  # what is pushed
    fill(policy, learner, rank, folder)
    return policy


def kept(policy: MegatronLearner, part: str) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in policy.tensors.items() if part in name}


def balanced(folder: Path, keys: dict[str, Any], max_tokens: int, rank: int, device: torch.device) -> dict[str, Any]:
    """A step that is skipped, which moves and leaves nothing, then one at rate 0 with all losses and moving biases."""
    learner = section(keys, bias_update_rate=RATE, **COEFFICIENTS)
    policy = make(folder, learner, rank, device)
    batch = pack(make_samples(), dims=learner.dims, max_tokens=max_tokens)
    row, counts = batch.micro_batches[dp := learner.dims.dp_rank(rank)], denominators(batch)
    routes, before = policy.score(row, frozenset({"routes"})), kept(policy, "expert_bias")
    infinite = [replace(m, advantages=torch.full_like(m.advantages, torch.inf)) for m in row]
    policy.backward(infinite, NO_LOSS, **counts)
    assert isinstance(policy.step(0.0), SkippedStep)
    assert all(torch.equal(tensor, before[name]) for name, tensor in kept(policy, "expert_bias").items())
    half = len(row) // 2 if learner.vpp == 1 else 0
    for part in (row[:half], row[half:]) if half else (row,):
        policy.backward(part, NO_LOSS, **counts)
    result = policy.step(0.0)
    assert not isinstance(result, SkippedStep)
    packed = policy._pack(row)
    moved = kept(policy, "expert_bias")
    return {
        "sequences": batch.sequences[dp],
        "dp": dp,
        "routes": None if routes is None else routes["routes"],
        "norm": result.grad_norm,
        "padding": sum(int((m.source < 0).sum()) for m in packed),
        "copies": len(packed) - len(row),
        "metrics": {name: metric.value for name, metric in result.metrics.items()},
        "biases": {name: (before[name], moved[name]) for name in moved},
    }


def denominators(batch: Batch) -> dict[str, int]:
    return {"num_tokens": batch.num_tokens, "num_sequences": batch.num_sequences}


def frozen(folder: Path, keys: dict[str, Any], max_tokens: int, rank: int, device: torch.device, to: Path) -> None:
    """Others' gradients are equal to the bit; routers stay; it resumes; ranks hold the bytes that are planned."""
    policies = [make(folder, section(keys, frozen=still), rank, device) for still in (False, True)]
    batch = pack(make_samples(), dims=policies[0]._dims, max_tokens=max_tokens)
    row = batch.micro_batches[policies[0]._dims.dp_rank(rank)]
    found = []
    for policy in policies:
        policy.backward(row, CrossEntropy(), **denominators(batch))
        trained = [p for chunk in policy._trained for p in chunk.named_parameters() if p[1].requires_grad]
        found.append({name: p.main_grad.clone() for name, p in trained})
    free, still = found
    assert {name for name in free if name not in still} == {name for name in free if ".router." in name} != set()
    assert all(torch.equal(gradient, free[name]) for name, gradient in still.items())
    policy, before = policies[1], {name: tensor.clone() for name, tensor in policies[1].tensors.items()}
    policy.step(1e-2)
    changed = {name for name, tensor in policy.tensors.items() if not torch.equal(tensor, before[name])}
    assert any(".experts." in name for name in changed)  # an expert without tokens stays
    assert not any(".router." in name for name in changed)
    planned = {m.stage: m.terms for m in footprints(RunConfig(learner=section(keys, frozen=True)), read_shape(folder))}
    buffers = [b for chunk in policy._trained for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    terms = planned[policy._dims.pp * rank // policy._dims.world_size]
    assert terms["gradients"] <= sum(b.grad_data.nbytes for b in buffers) < 1.05 * terms["gradients"]
    policy.save(to)
    other = make(folder, section(keys, frozen=True), rank, device)
    other.load(to)
    for one in (policy, other):
        one.backward(row, CrossEntropy(), **denominators(batch))
        one.step(1e-2)
    theirs = other.tensors
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in policy.tensors.items())


def rank_main(rank: int, root: Path) -> None:
    for layout, learner, device in worlds(rank, root, {name: section(keys) for name, (keys, _) in LAYOUTS.items()}):
        keys, max_tokens = LAYOUTS[layout]
        torch.save(balanced(root / "model", keys, max_tokens, rank, device), root / f"{layout}-{rank}.pt")
        if learner.dims.world_size > 1:
            frozen(root / "model", keys, 2 * max_tokens, rank, device, root / f"saved-{layout}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The losses as they are written, of one model of transformers."""

    parameters: list[Tensor]
    logits: list[Tensor]  # [N, E] of each layer with a router, in the samples' order
    load: Tensor  # [layers, E] tokens whose chosen experts an expert is among
    top_k: int
    samples: Samples

    def values(self, rows: Any) -> dict[str, Tensor]:
        """Each loss, as a sum over layers; ``rows`` [D][M] are sequences."""
        found = [self.of_layer(logits, rows) for logits in self.logits]
        return {kind: torch.stack([of_layer[kind] for of_layer in found]).sum() for kind in COEFFICIENTS}

    def of_layer(self, logits: Tensor, rows: Any) -> dict[str, Tensor]:
        p = logits.sigmoid() / logits.sigmoid().sum(1, keepdim=True)
        chosen = torch.zeros_like(p).scatter_(1, p.topk(self.top_k).indices, 1.0)
        total, experts = int(self.samples.mask.sum()), p.shape[1]

        def loss(mine: Tensor, load: Tensor) -> Tensor:
            """Switch's of the tokens ``mine``, with the load of ``load``, weighted by its tokens."""
            f, mean = chosen[load].mean(0) / self.top_k, p[mine].mean(0)
            return experts * (f * mean).sum() * len(mine) / total

        batches = [[self.tokens(batch) for batch in row] for row in rows]
        sequences = [self.tokens([i]) for i in range(SEQUENCES)]
        so_far = [torch.cat([x for row in batches for x in row[: m + 1]]) for m in range(len(batches[0]))]
        return {
            "aux_loss": torch.stack([loss(x, x) for row in batches for x in row]).sum(),
            "seq_aux_loss": torch.stack([loss(x, x) for x in sequences]).sum(),
            "global_aux_loss": torch.stack([loss(x, so_far[m]) for row in batches for m, x in enumerate(row)]).sum(),
            "z_loss": logits.logsumexp(1).square()[self.samples.mask].mean(),
        }

    def tokens(self, sequences: Any) -> Tensor:
        """The trained tokens of the sequences."""
        cu = self.samples.cu_seqlens.tolist()
        found = torch.cat([torch.arange(cu[i], cu[i + 1]) for i in sequences])
        return found[self.samples.mask[found]]

    def norm(self, values: dict[str, Tensor]) -> float:
        """Of the gradient of all losses, whose ``values`` are given, with their coefficients."""
        loss = torch.stack([COEFFICIENTS[kind] * value for kind, value in values.items()]).sum()
        found = torch.autograd.grad(loss, self.parameters, retain_graph=True, allow_unused=True)
        return float(torch.stack([g.norm() for g in found if g is not None]).norm())


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[Any]], Written]:
    """What the ranks of each layout saw, and the oracle."""
    root = tmp_path_factory.mktemp("routers")
    model = save_model("glm4_moe", root / "model").double()
    for layout in LAYOUTS:
        (root / f"saved-{layout}").mkdir()
    run_ranks(rank_main, 2, root)
    model.set_experts_implementation("eager")  # torch's grouped product takes no float64
    gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    inputs: list[list[Tensor]] = [[] for _ in gates]
    load = torch.zeros(len(gates), model.config.num_local_experts)
    for gate, into, counts in zip(gates, inputs, load, strict=True):
        gate.register_forward_pre_hook(lambda _, given, into=into: into.append(given[0].flatten(0, -2)))
        gate.register_forward_hook(partial(add_choices, counts))
    samples = make_samples()
    for ids in samples.input_ids.split(samples.cu_seqlens.diff().tolist()):
        model(ids[None])
    written = Written(
        parameters=list(model.parameters()),
        logits=[torch.cat(x) @ gate.weight.T for x, gate in zip(inputs, gates, strict=True)],
        load=load,
        top_k=model.config.num_experts_per_tok,
        samples=samples,
    )
    found = {layout: [torch.load(path) for path in sorted(root.glob(f"{layout}-[01].pt"))] for layout in LAYOUTS}
    return found, written


def add_choices(counts: Tensor, _gate: Any, _given: Any, said: tuple[Tensor, ...]) -> None:
    """Adds the experts that a gate of transformers chose to ``counts`` [E]."""
    counts += said[2].flatten().bincount(minlength=len(counts))


def rows_of(ranks: list[Any]) -> list[Any]:
    """The sequences [D][M] of a layout's ranks."""
    by_rank = {rank["dp"]: rank["sequences"] for rank in ranks}
    return [by_rank[dp] for dp in sorted(by_rank)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_their_gradient_are_those_of_the_formula(layout: str, seen: Any) -> None:
    ranks, written = seen[0][layout], seen[1]
    rows = rows_of(ranks)
    assert len(rows[0]) >= (1 if layout == "one" else 2)
    wanted, layers = written.values(rows), len(written.logits)
    norm = written.norm(wanted)
    for rank in ranks:
        for kind, value in wanted.items():
            assert rank["metrics"][f"moe/{kind}"] == pytest.approx(value.item() / layers, rel=1e-5), kind
        assert rank["norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_load_and_entropy_are_those_of_sequences_alone(layout: str, seen: Any) -> None:
    """Neither padding counts, nor a layer that is recomputed, nor a copy of a micro-batch."""
    ranks, written = seen[0][layout], seen[1]
    assert any(rank["padding"] for rank in ranks) == any(kind in layout for kind in ("tp2", "cp2"))
    assert all(rank["copies"] for rank in ranks) == ("vpp2" in layout)
    p = torch.stack(written.logits).sigmoid()
    p = p / p.sum(-1, keepdim=True)
    entropy = -(p * p.log()).sum(-1).mean() / torch.tensor(p.shape[-1]).log()
    wanted = {
        "moe/load_imbalance": (written.load.amax(1) / written.load.mean(1)).max(),
        "moe/dead_experts": (written.load == 0).double().mean(),
        "moe/routing_entropy": entropy,
    }
    for rank in ranks:
        for name, value in wanted.items():
            assert rank["metrics"][name] == pytest.approx(value.item(), rel=1e-5), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_biases_move_by_the_rate_against_the_load_of_the_trained_tokens(layout: str, seen: Any) -> None:
    ranks, written = seen[0][layout], seen[1]
    counts = torch.zeros(len(written.logits), written.logits[0].shape[1])
    for rank in (rank for rank in ranks if rank["routes"] is not None):
        for sequences, routes in zip(rank["sequences"], rank["routes"], strict=True):
            lengths = written.samples.cu_seqlens.diff()
            trained = torch.cat([written.samples.mask.split(lengths.tolist())[i] for i in sequences])
            for layer in range(len(counts)):
                counts[layer] += torch.bincount(routes[trained][:, layer].flatten().long(), minlength=counts.shape[1])
    assert counts.sum() == int(written.samples.mask.sum()) * written.top_k * len(counts)
    first = len(counts) and 1  # of the model's layers the first has no router
    for rank in ranks:
        for name, (before, after) in rank["biases"].items():
            load = counts[int(name.split(".")[2]) - first]
            wanted = before + RATE * (load.mean() - load).sign()
            assert torch.equal(after, wanted), name
            assert not torch.equal(after, before)
    assert len({name for rank in ranks for name in rank["biases"]}) == len(counts)
