from __future__ import annotations

from math import prod

import pytest

from rl_megatron.types import ParallelDims
from rl_megatron.weights.layouts.layout import Layout
from rl_megatron.weights.layouts.tables.qwen3_moe import HF_QWEN3_MOE, MEGATRON_QWEN3_MOE
from rl_megatron.weights.plans.cost import Cost, Links, broadcast_cost, plan_cost
from rl_megatron.weights.plans.plan import plan
from tests.small_models import SMALL_MOE

HF = Layout(table=HF_QWEN3_MOE, shape=SMALL_MOE).local_shapes(0)
MODEL = sum(prod(shape) for shape in HF.values())
EXPERTS = sum(prod(shape) for name, shape in HF.items() if ".experts." in name)
BYTES, LINKS = 2, Links(nic=100.0, nvlink=1000.0, per_node=2)


def costs(dims: ParallelDims, engines: int) -> tuple[Cost, Cost]:
    """Ours and the usual way, into full copies in processes of their own behind the learner's."""
    learner = Layout(table=MEGATRON_QWEN3_MOE, shape=SMALL_MOE, dims=dims)
    target = Layout(table=HF_QWEN3_MOE, shape=SMALL_MOE, dims=ParallelDims(dp=engines))
    placement = {rank: dims.world_size + rank for rank in range(engines)}
    moves = plan(learner, target, placement=placement)
    return (plan_cost(moves, BYTES, LINKS), broadcast_cost(learner, placement.values(), BYTES, LINKS))


def test_two_replicas_feed_two_engines_at_the_speed_of_a_port() -> None:
    ours, usual = costs(ParallelDims(dp=2), 2)
    assert (ours.within, ours.across) == (0, 2 * MODEL * BYTES)
    assert ours.received == {2: MODEL * BYTES, 3: MODEL * BYTES}
    assert max(ours.sent.values()) <= 1.05 * MODEL * BYTES
    assert ours.bound == max(ours.sent.values()) / LINKS.nic
    assert (usual.within, usual.across) == (MODEL * BYTES, MODEL * BYTES)  # one copy enters the node, one is passed on
    assert usual.expected == usual.bound == MODEL * BYTES / LINKS.nic


def test_a_gather_costs_what_each_rank_lacks() -> None:
    _, usual = costs(ParallelDims(ep=2, dp=2), 1)
    assert usual.within == EXPERTS * BYTES  # half of the experts into each of two ranks of one node
    gather, push = EXPERTS / 2 * BYTES / LINKS.nvlink, MODEL * BYTES / LINKS.nic
    assert (usual.bound, usual.expected) == pytest.approx((push, gather + push))
    _, usual = costs(ParallelDims(ep=4, dp=4), 1)
    near, far = EXPERTS // 4, EXPERTS // 2  # a node has half of the experts, a rank a quarter
    assert (usual.within, usual.across) == (4 * near * BYTES, (4 * far + MODEL) * BYTES)
    assert usual.received[0] == (near + far) * BYTES
    gather = max(near * BYTES / LINKS.nvlink, far * BYTES / LINKS.nic)
    assert usual.expected == pytest.approx(gather + MODEL * BYTES / LINKS.nic)


def test_the_expected_time_counts_waiting_in_rounds() -> None:
    ours, _ = costs(ParallelDims(pp=2), 2)
    first, second = (ours.sent[rank] / 2 / LINKS.nic for rank in (0, 1))
    assert (first + second) * LINKS.nic == MODEL * BYTES
    # rounds: 0 to 2 and 1 to 3; then 0 to 3 and 1 to 2, where each waits for the larger half of the model
    assert ours.expected == pytest.approx(2 * max(first, second))
    assert ours.bound == pytest.approx(max(2 * first, 2 * second, first + second))


def test_engines_inside_the_node_use_its_links() -> None:
    learner = Layout(table=MEGATRON_QWEN3_MOE, shape=SMALL_MOE, dims=ParallelDims(ep=2, dp=2))
    moves = plan(learner, Layout(table=HF_QWEN3_MOE, shape=SMALL_MOE, dims=ParallelDims(dp=2)))
    ours = plan_cost(moves, BYTES, LINKS)
    assert (ours.within, ours.across) == (EXPERTS * BYTES, 0)
    assert ours.expected == ours.bound == pytest.approx(EXPERTS / 2 * BYTES / LINKS.nvlink)
