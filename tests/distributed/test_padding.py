"""Micro-batches that are padded to a few sizes: what padding adds counts nowhere.

The oracle is the same learner without `learner.padding`, whose loss and gradient are transformers'
(test_families.py). All layouts run in two processes that are started once.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.data.packing import pack
from rl_megatron.options.padding import PaddingSection
from rl_megatron.options.table import problems
from rl_megatron.types import Batch
from tests.distributed.ragged import ragged_samples
from tests.distributed.ranks import run_ranks, worlds
from tests.distributed.test_overlap import make
from tests.family_models import save_model
from tests.rows import policy_loss

SEQUENCES, VOCABULARY, MOST = 14, 61, 5
PADDING: dict[str, Any] = {"tokens": "64,96,120", "sequences": MOST}
LOSS = policy_loss(objective="cispo", aggregation="seq_mean_token_mean")
BALANCED = {"aux_loss": 0.5, "seq_aux_loss": 2.0, "global_aux_loss": 1.5, "z_loss": 0.25, "bias_update_rate": 0.125}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense, tp2": ("qwen3", {"tp": 2}),
    "dense, cp2": ("qwen3", {"cp": 2}),
    "experts, tp2-ep2": ("deepseek_v3", {"tp": 2, "ep": 2, "router": BALANCED}),
    "experts, cp2": ("glm4_moe", {"cp": 2, "router": BALANCED}),
}


def make_batch(learner: LearnerSection) -> Batch:
    g = torch.Generator().manual_seed(5)
    samples = ragged_samples(SEQUENCES, g)
    advantages = torch.repeat_interleave(torch.randn(SEQUENCES, generator=g), samples.cu_seqlens.diff())
    ids, targets = samples.input_ids % VOCABULARY, samples.targets % VOCABULARY
    samples = replace(samples, input_ids=ids, targets=targets, advantages=advantages)
    return pack(samples, dims=learner.dims, max_tokens=120, padding=PaddingSection(sequences=MOST))


def seen_by(folder: Path, keys: dict[str, Any], rank: int, device: torch.device) -> dict[str, Any]:
    """A step at rate 0 of this learner, and what its kernels see the shapes of."""
    learner = LearnerSection.model_validate({"max_tokens_per_micro_batch": 120, **keys})
    assert list(problems(learner)) == []
    policy, batch = make(folder, learner, rank, device), make_batch(learner)
    row = batch.micro_batches[learner.dims.dp_rank(rank)]
    loss = policy.backward(row, LOSS, num_tokens=batch.num_tokens, num_sequences=batch.num_sequences)
    gradients = {name: p.main_grad.clone() for name, p in policy._trained[0].named_parameters()}
    result = policy.step(0.0)
    scores = policy.score(row, frozenset({"logprobs", "routes"} if "router" in keys else {"logprobs"}))
    packed = policy._pack(row)
    return {
        "loss": loss["loss"].value if loss else None,
        "norm": result.grad_norm,
        "gradients": gradients,
        "scores": scores and {name: torch.cat([x.double() for x in found]) for name, found in scores.items()},
        "metrics": {name: metric.value for name, metric in result.metrics.items() if name.startswith("moe/")},
        "biases": {name: t.clone() for name, t in policy.tensors.items() if "expert_bias" in name},
        "shapes": {(len(m.input_ids), len(m.attention.cu_seqlens_q), m.num_segments) for m in packed},
        "padding": [int((m.source < 0).sum()) for m in packed],
    }


def rank_main(rank: int, root: Path) -> None:
    layouts = {name: LearnerSection.model_validate(keys) for name, (_, keys) in LAYOUTS.items()}
    for layout, _, device in worlds(rank, root, layouts):
        family, keys = LAYOUTS[layout]
        found = [seen_by(root / family, {**keys, **more}, rank, device) for more in ({}, {"padding": PADDING})]
        torch.save(found, root / f"{layout} {rank}.pt")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[dict[str, Any]]]]:
    """Of each layout what each rank says without padding and with it."""
    root = tmp_path_factory.mktemp("padding")
    for family in sorted({family for family, _ in LAYOUTS.values()}):
        save_model(family, root / family)
    run_ranks(rank_main, 2, root)
    return {name: [torch.load(root / f"{name} {rank}.pt", weights_only=False) for rank in range(2)] for name in LAYOUTS}


def apart(one: Tensor, other: Tensor) -> float:
    """The largest difference over the largest value."""
    return float((one - other).abs().max() / other.abs().max().clamp(min=1e-3))


def gradient_of(name: str, layout: str, seen: Any, mine: dict[str, Any], side: int) -> Tensor:
    """A rank's gradient; of what sees the rank's own tokens alone, under sequence parallelism, that of both ranks."""
    if "tp2" in layout and any(part in name for part in ("norm", "router", "down_proj")):
        return torch.stack([rank[side]["gradients"][name] for rank in seen[layout]]).sum(0)
    return mine["gradients"][name]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_gradients_scores_and_balance_are_those_without(layout: str, seen: Any) -> None:
    for plain, padded in seen[layout]:
        assert padded["loss"] == pytest.approx(plain["loss"], rel=1e-6, abs=1e-8)
        assert padded["norm"] == pytest.approx(plain["norm"], rel=1e-5)
        for name in plain["gradients"]:
            whole = [gradient_of(name, layout, seen, mine, side) for side, mine in enumerate((plain, padded))]
            assert apart(*whole) < 1e-5, name
        for name, scores in (plain["scores"] or {}).items():
            assert apart(padded["scores"][name], scores) < (1e-6 if name == "logprobs" else 1e-9), name
        assert padded["metrics"] == pytest.approx(plain["metrics"], rel=1e-5)
        for name, bias in plain["biases"].items():
            assert torch.equal(padded["biases"][name], bias), name
    assert ("experts" in layout) == bool(seen[layout][0][0]["metrics"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernels_see_few_shapes(layout: str, seen: Any) -> None:
    cp = LAYOUTS[layout][1].get("cp", 1)
    for plain, padded in seen[layout]:
        assert len(plain["shapes"]) >= 3  # of few micro-batches
        assert {tokens * cp for tokens, *_ in padded["shapes"]} <= {64, 96, 120}
        assert {tuple(counts) for _, *counts in padded["shapes"]} == {(MOST + 2, MOST + 1)}
        assert sum(padded["padding"]) > sum(plain["padding"]) + 10


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"padding": {"tokens": "96,64,120"}}, "do not rise; sort them"),
        ({"padding": {"tokens": "64,96"}}, "the last size must be that"),
        ({"padding": {"tokens": "62,120"}, "cp": 2, "tp": 2}, "62 is no multiple of 8; round the sizes up"),
        ({"padding": {"sequences": 3}}, "without learner.padding.tokens: micro-batches would still have any number"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(keys: dict[str, Any], why: str) -> None:
    (said,) = problems(LearnerSection.model_validate({"max_tokens_per_micro_batch": 120, **keys}))
    assert why in said
