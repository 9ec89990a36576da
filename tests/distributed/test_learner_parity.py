"""One process compared with many: the same weights and batch give the same loss and gradient norm in every layout."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.data.packing import pack
from rl_megatron.data.samples import select
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.training.measures import Made
from rl_megatron.types import Batch, Samples, SkippedStep
from rl_megatron.weights.layouts.families import read_shape
from tests.distributed.ranks import fill, ragged_samples, run_ranks
from tests.optimizer_step import train_step
from tests.rows import policy_loss
from tools.planner.memory import footprints

STEPS = 3
BAD = 7  # a sequence
Alone = Mapping[int, tuple[Path, Any]]
"""Models, and what was seen of each."""
CISPO = policy_loss(objective="cispo", aggregation="token_mean")
LAYERS, STAGED = 2, 4  # of a model, and of one that is cut into stages of more than one layer


def make_samples() -> Samples:
    """24 ragged sequences with an advantage each."""
    g = torch.Generator().manual_seed(5)
    samples = ragged_samples(24, g)
    advantages = torch.repeat_interleave(torch.randn(24, generator=g), samples.cu_seqlens.diff())
    return replace(samples, advantages=advantages)


def rank_main(rank: int, learner: LearnerSection, folder: Path, model: Path, max_tokens: int) -> None:
    """One rank: fill from the checkpoint, set old log-probs by the learner itself, train, write what it saw."""
    torch.set_num_threads(1)
    from rl_megatron.learner import world
    from rl_megatron.learner.megatron import make_policy

    shape = read_shape(model)
    rendezvous = f"file://{folder}/rendezvous"
    device = world.join(learner, rank=rank, rendezvous=rendezvous, seed=1)
    megatron = make_policy(shape, learner, device, temperature=0.7)
    fill(megatron, learner, rank, model)
    dp = learner.dims.dp_rank(rank)
    batch = pack(make_samples(), dims=learner.dims, max_tokens=max_tokens)
    said = megatron.score(batch.micro_batches[dp], frozenset({"logprobs", "logits"}))
    seen: dict[str, Any] = {"steps": [], "stage": rank * learner.dims.pp // learner.dims.world_size}
    if said is not None:
        logprobs, logits = said["logprobs"], said["logits"]
        seen["logprobs"] = [x.tolist() for x in logprobs]
        seen["ids"] = [m.input_ids.tolist() for m in batch.micro_batches[dp]]
        seen["logits"] = [gap_to_logits(*each) for each in zip(logits, logprobs, batch.micro_batches[dp], strict=True)]
    for _ in range(STEPS):
        counts = {"num_tokens": batch.num_tokens, "num_sequences": batch.num_sequences}
        result = train_step(megatron, batch.micro_batches[dp], CISPO, 1e-3, **counts)
        if isinstance(result, Made):
            seen["steps"].append((result.loss, result.step.grad_norm))
            seen["metrics"] = {n: m.value for n, m in {**result.of_loss, **result.step.metrics}.items()}
    seen["bytes"] = held_bytes(megatron)
    seen["culprits"] = skipped(megatron, batch, dp)
    seen["parts"] = in_parts(megatron, batch, dp)
    (folder / f"rank{rank}.json").write_text(json.dumps(seen))
    world.leave()


def skipped(megatron: Any, batch: Batch, dp: int) -> list[tuple[int, int]]:
    """A step with an infinite advantage in sequence `BAD`: it changes no bit, nor do gradients that are dropped; the
    micro-batches that it names."""
    from rl_megatron.learner.optimizer import inner_optimizers

    states = [s for part in inner_optimizers(megatron._optimizer) for s in part.optimizer.state.values()]
    held = [*megatron.tensors.values(), *(p for c in megatron._chunks for p in c.parameters())]
    held += [tensor for state in states for tensor in state.values()]
    groups = [group for part in inner_optimizers(megatron._optimizer) for group in part.optimizer.param_groups]
    held += [p for group in groups for p in group["params"]]
    before = [tensor.detach().clone() for tensor in held]
    counts = {"num_tokens": batch.num_tokens, "num_sequences": batch.num_sequences}
    megatron.backward(batch.micro_batches[dp], CISPO, **counts)
    megatron.drop()
    assert all(map(torch.equal, held, before))
    row = [
        replace(m, advantages=torch.full_like(m.advantages, torch.inf)) if BAD in ids else m
        for m, ids in zip(batch.micro_batches[dp], batch.sequences[dp], strict=True)
    ]
    result = train_step(megatron, row, CISPO, 1e-3, **counts)
    assert isinstance(result, SkippedStep)
    assert not math.isfinite(result.grad_norm)
    assert all(map(torch.equal, held, before))
    return [(c.data_rank, c.micro_batch) for c in result.culprits]


def in_parts(megatron: Any, batch: Batch, dp: int) -> dict[str, float]:
    """How a step of one backward pass for each half, with a score between them and a dropped pass before them, differs
    from one of a single pass and nothing else."""
    row, counts = batch.micro_batches[dp], {"num_tokens": batch.num_tokens, "num_sequences": batch.num_sequences}
    half = len(row) // 2
    found = []
    for parts in ([row], [row[:half], row[half:]] if half else [row]):
        losses = []
        if len(parts) > 1:
            megatron.backward(parts[0], CISPO, **counts)
            megatron.drop()
        for part in parts:
            losses.append(megatron.backward(part, CISPO, **counts))
            if len(parts) > 1:
                megatron.score(part, frozenset({"logprobs"}))
        made = megatron.step(0.0)
        buffers = [b.grad_data for c in megatron._trained for b in (*c.buffers, *c.expert_parallel_buffers)]
        gradient = torch.cat([buffer.flatten() for buffer in buffers])  # a copy
        loss = sum(said["loss"].value for said in losses) if losses[0] else 0.0
        found.append((gradient, loss, made.metrics["moe/load_imbalance"].value))
    (gradient, loss, load), (of_parts, *others) = found
    distance = float((of_parts - gradient).norm() / gradient.norm())
    return {"gradient": distance, "loss": abs(others[0] - loss), "load": abs(others[1] - load)}


def held_bytes(megatron: Any) -> dict[str, int]:
    """Of this rank, by what `tools.planner.memory` calls them; megatron pads gradients for their reduction."""
    from rl_megatron.learner.optimizer import inner_optimizers

    chunks = megatron._chunks
    buffers = [b for chunk in chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    states = [s for part in inner_optimizers(megatron._optimizer) for s in part.optimizer.state.values()]
    moments = [tensor for state in states for name, tensor in state.items() if name != "step"]
    return {
        "parameters": sum(p.nbytes for chunk in chunks for p in chunk.parameters()),
        "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
        "optimizer": sum(tensor.nbytes for tensor in moments),
    }


def gap_to_logits(logits: Tensor, logprobs: Tensor, samples: Samples) -> float:
    """Greatest difference between the targets' log-probs and those that the logits give, by torch."""
    wanted = (logits / 0.7).log_softmax(-1).gather(1, samples.targets[samples.mask][:, None])[:, 0]
    return float((logprobs[samples.mask] - wanted).abs().amax()) if len(wanted) else 0.0


def run(folder: Path, model: Path, learner: LearnerSection, max_tokens: int = 4096) -> Any:
    """Spawn a layout's ranks; what the last-stage ranks saw, in rank order."""
    folder.mkdir()
    run_ranks(rank_main, learner.dims.world_size, learner, folder, model, max_tokens)
    seen = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(learner.dims.world_size)]
    assert_as_planned(seen, model, learner)
    batch = pack(make_samples(), dims=learner.dims, max_tokens=max_tokens)
    bad = [[d, m] for d, row in enumerate(batch.sequences) for m, ids in enumerate(row) if BAD in ids]
    for rank, one in enumerate(seen):
        assert one["culprits"] == [place for place in bad if place[0] == learner.dims.dp_rank(rank)]
    return [s for s in seen if s["steps"]]


def assert_as_planned(seen: Any, model: Path, learner: LearnerSection) -> None:
    """Ranks hold what `tools.planner.memory` says that they will."""
    planned = {m.stage: m.terms for m in footprints(RunConfig(learner=learner), read_shape(model))}
    for stage, terms in planned.items():
        ranks = [s["bytes"] for s in seen if s["stage"] == stage]
        for held in ranks:
            assert held["parameters"] == terms["parameters"]
            assert terms["gradients"] <= held["gradients"] < 1.05 * terms["gradients"]
        total = sum(held["optimizer"] for held in ranks)  # one rank's part begins and ends where a buffer is cut
        assert total == pytest.approx(len(ranks) * terms["optimizer"], rel=1e-9)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """By number of layers: one process, one micro-batch."""
    root = tmp_path_factory.mktemp("alone")
    found = {}
    for layers in (LAYERS, STAGED):
        tiny = TinySizes(num_layers=layers, hidden_size=32, num_experts=4)
        model = make_tiny_model(tiny, root / "models", seed=5)  # no token is near a tie of experts
        found[layers] = model, run(root / f"{layers}", model, LearnerSection())[0]
    return found


def assert_same(seen: Any, alone: Any) -> None:
    assert seen
    for rank in seen:
        for (loss, norm), (wanted_loss, wanted_norm) in zip(rank["steps"], alone["steps"], strict=True):
            assert loss == pytest.approx(wanted_loss, rel=1e-5, abs=1e-7)
            assert norm == pytest.approx(wanted_norm, rel=1e-4)
        for name in ("clip_fraction", "ratio/mean", "ratio/min", "ratio/max", "kl/old_policy", "entropy"):
            assert rank["metrics"][name] == pytest.approx(alone["metrics"][name], rel=1e-4, abs=1e-6), name


LAYOUTS = {"dp2": {"dp": 2}, "ep2": {"ep": 2}, "pp2": {"pp": 2}, "pp2-vpp2": {"pp": 2, "vpp": 2}, "tp2": {"tp": 2}}
LAYOUTS |= {"tp2-ep2": {"tp": 2, "ep": 2}, "cp2": {"cp": 2}, "tp2-pp2-ep2": {"tp": 2, "pp": 2, "ep": 2}}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_changes_neither_loss_nor_gradient(name: str, alone: Alone, tmp_path: Path) -> None:
    learner = LearnerSection.model_validate(LAYOUTS[name])
    model, wanted = alone[LAYERS if learner.pp == 1 else STAGED]
    seen = run(tmp_path / "cispo", model, learner, max_tokens=200)
    assert_same(seen, wanted)
    for rank in seen:
        assert rank["parts"] == pytest.approx({"gradient": 0, "loss": 0, "load": 0}, abs=1e-6)
    assert 0 < max(gap for rank in seen for gap in rank.get("logits", [])) < 1e-5


@pytest.mark.parametrize("max_tokens", [64, 300])
def test_number_of_micro_batches_changes_nothing(max_tokens: int, alone: Alone, tmp_path: Path) -> None:
    model, wanted = alone[LAYERS]
    assert_same(run(tmp_path / "m", model, LearnerSection(), max_tokens=max_tokens), wanted)


def test_log_probs_are_those_of_transformers(alone: Alone) -> None:
    from transformers import AutoModelForCausalLM

    model, seen = alone[STAGED]
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    batch: Batch = pack(make_samples(), dims=LearnerSection().dims, max_tokens=4096)
    (samples,) = batch.micro_batches[0]
    assert seen["ids"] == [samples.input_ids.tolist()]
    (found,) = seen["logprobs"]
    for i in range(samples.num_sequences):
        one = select(samples, torch.tensor([i]))
        with torch.no_grad():
            logits = reference(one.input_ids[None]).logits[0] / 0.7
        wanted = logits.log_softmax(-1).gather(1, one.targets[:, None]).squeeze(1)
        start, stop = samples.cu_seqlens[i : i + 2].tolist()
        assert torch.tensor(found[start:stop]).sub(wanted).abs().max() < 1e-4
