"""Plans of public models at cluster scale: balance, volume and cost of the plan itself."""

from __future__ import annotations

from math import prod

import pytest

from rl_megatron.models.named import NAMED
from rl_megatron.options.pipeline import layer_counts
from rl_megatron.types import ParallelDims
from rl_megatron.weights.layouts.layout import Layout, coordinates
from rl_megatron.weights.layouts.tables import deepseek_v3, qwen3_moe
from rl_megatron.weights.plans.plan import plan

LEARNERS = {
    "qwen3-235b-a22b": (ParallelDims(tp=4, pp=8, ep=16, dp=16), "11+12*6+11"),
    "deepseek-v3": (ParallelDims(tp=4, pp=8, ep=32, dp=16), "7+8*6+6"),
    "kimi-k2": (ParallelDims(tp=2, pp=16, ep=16, dp=16), "3+4*14+2"),
}
ENGINES = {
    "full copies": ParallelDims(dp=256),
    "tp8": ParallelDims(tp=8, etp=8, dp=32),
    "dp attention, ep64": ParallelDims(dp=256, ep=64),
}


def layouts(model: str, engine: str) -> tuple[Layout, Layout]:
    shape = NAMED[model]
    dims, counts = LEARNERS[model]
    if shape.latent:
        hf, engines, megatron = (
            deepseek_v3.HF_DEEPSEEK_V3,
            deepseek_v3.ENGINE_DEEPSEEK_V3,
            deepseek_v3.MEGATRON_DEEPSEEK_V3,
        )
    else:
        hf, engines, megatron = qwen3_moe.HF_QWEN3_MOE, qwen3_moe.ENGINE_QWEN3_MOE, qwen3_moe.MEGATRON_QWEN3_MOE
    table = hf if engine == "full copies" else engines
    return (
        Layout(table=megatron, shape=shape, dims=dims, stages=layer_counts(counts)),
        Layout(table=table, shape=shape, dims=ENGINES[engine]),
    )


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model", LEARNERS)
def test_replicas_send_alike_and_receivers_get_what_they_hold(model: str, engine: str) -> None:
    learner, engines = layouts(model, engine)
    ranks, placement = learner.dims.world_size, {r: learner.dims.world_size + r for r in range(256)}
    moves = plan(learner, engines, placement=placement)
    sent, received = [0] * ranks, [0] * 256
    for (a, b), elements in moves.traffic().items():
        sent[a] += elements
        received[b - ranks] += elements
    replicas: dict[object, list[int]] = {}
    for rank in range(ranks):
        replicas.setdefault(coordinates(learner.dims, rank), []).append(sent[rank])
    stages = [sent[start : start + ranks // learner.dims.pp] for start in range(0, ranks, ranks // learner.dims.pp)]
    for group in (*replicas.values(), *stages):
        assert max(group) * len(group) <= 1.05 * sum(group)
    vocab = NAMED[model].vocab_size
    for rank in (0, 101, 255):
        padding = 0
        shapes = engines.local_shapes(rank)
        if engine != "full copies":
            each = shapes["lm_head.weight"][0]
            mine = max(0, min(each, vocab - coordinates(engines.dims, rank).tp * each))
            padding = 2 * (each - mine) * NAMED[model].hidden_size
        assert received[rank] == sum(prod(shape) for shape in shapes.values()) - padding


def test_one_engine_is_fed_evenly_too() -> None:
    """Few destinations: a rank's part of the embedding is a sixth of what a rank sends, unless it is cut."""
    learner, _ = layouts("qwen3-235b-a22b", "tp8")
    engine = Layout(table=qwen3_moe.ENGINE_QWEN3_MOE, shape=learner.shape, dims=ParallelDims(tp=8, etp=8))
    sent = [0] * 512
    for (a, _), elements in plan(learner, engine, placement={r: 512 + r for r in range(8)}).traffic().items():
        sent[a] += elements
    for first in range(0, 512, 64):
        stage = sent[first : first + 64]
        assert max(stage) * 64 <= 1.05 * sum(stage)
