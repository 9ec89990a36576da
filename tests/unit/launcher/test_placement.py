"""Ranks on nodes, against megatron-core's own rank generator."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.rollout import ServerSection
from rl_megatron.errors import ConfigError
from rl_megatron.placement.ranks import group_ranks, layout_said, place
from rl_megatron.placement.seats import seat
from rl_megatron.types import ParallelDims

SMALL = st.sampled_from([1, 2, 4])


@st.composite
def layouts(draw: st.DrawFn) -> ParallelDims:
    tp, cp, dp, pp = (draw(SMALL) for _ in range(4))
    inner = tp * cp * dp
    etp = draw(st.sampled_from([d for d in (1, 2, 4) if inner % d == 0]))
    ep = draw(st.sampled_from([d for d in (1, 2, 4, 8) if inner % (d * etp) == 0]))
    return ParallelDims(tp=tp, pp=pp, ep=ep, etp=etp, cp=cp, dp=dp)


@given(dims=layouts())
def test_groups_are_megatrons(dims: ParallelDims) -> None:
    from megatron.core.parallel_state import RankGenerator

    dense = RankGenerator(tp=dims.tp, ep=1, dp=dims.dp, pp=dims.pp, cp=dims.cp, order="tp-cp-ep-dp-pp")
    rest = dims.tp * dims.cp * dims.dp // (dims.etp * dims.ep)
    expert = RankGenerator(tp=dims.etp, ep=dims.ep, dp=rest, pp=dims.pp, cp=1, order="tp-cp-ep-dp-pp")
    groups = group_ranks(dims)
    for kind in ("tp", "cp", "dp", "pp"):
        assert groups[kind] == dense.get_ranks(kind)
    assert groups["etp"] == expert.get_ranks("tp")
    assert groups["ep"] == expert.get_ranks("ep")
    assert groups["edp"] == expert.get_ranks("dp")


@given(dims=layouts(), each=st.sampled_from([1, 2, 4, 8]))
def test_every_rank_has_one_node_and_tensor_parallelism_stays_inside(dims: ParallelDims, each: int) -> None:
    world = dims.world_size
    nodes = [f"n{i}" for i in range(-(-world // each))]
    try:
        placement = place(dims, nodes, each)
    except ConfigError:
        fits = world == each * len(nodes)
        assert not fits or (len(nodes) > 1 and (each % dims.tp or each % dims.etp))
        return
    on = [placement.node_of(rank) for rank in range(world)]
    assert [on.count(node) for node in nodes] == [each] * len(nodes)
    for kind in ("tp", "etp"):
        assert all(len({on[rank] for rank in group}) == 1 for group in group_ranks(dims)[kind])


def spans(text: str, *, nodes: int, each: int) -> Iterator[str]:
    dims = ParallelDims(**{k: int(v) for k, v in (pair.split("=") for pair in text.split())})
    placement = place(dims, [f"n{i}" for i in range(nodes)], each)
    yield from (f"{kind}:{count}" for kind, count in placement.spans().items())


@pytest.mark.parametrize(
    ("dims", "nodes", "each", "expected"),
    [
        ("tp=4 ep=8 dp=2", 1, 8, "tp:1 dp:1 ep:1"),
        ("tp=8 ep=16 dp=2", 2, 8, "tp:1 dp:2 ep:2"),
        ("tp=8 pp=2", 2, 8, "tp:1 pp:2 etp:1"),
        ("tp=2 pp=4 ep=8 dp=16", 16, 8, "tp:1 dp:4 pp:4 ep:1 edp:4"),
    ],
)
def test_how_far_groups_reach(dims: str, nodes: int, each: int, expected: str) -> None:
    if "etp" in expected:
        dims += " etp=8"
    assert " ".join(spans(dims, nodes=nodes, each=each)) == expected


def test_both_numbers_and_the_change_are_told() -> None:
    with pytest.raises(ConfigError) as caught:
        place(ParallelDims(tp=4, dp=1), ["a", "b"], 4)
    assert "slurm.nodes=2 * slurm.ntasks_per_node=4 = 8 tasks" in str(caught.value)
    assert "= 4 ranks; set learner.dp=2" in str(caught.value)
    with pytest.raises(ConfigError, match=r"learner\.tp=8 does not divide slurm\.ntasks_per_node=4"):
        place(ParallelDims(tp=8, etp=8), ["a", "b"], 4)


def test_a_person_sees_nodes_and_groups() -> None:
    text = place(ParallelDims(tp=8, ep=16, dp=16), [f"n{i}" for i in range(16)], 8).describe()
    assert text.splitlines() == [
        "128 ranks on 16 nodes, 8 on each",
        "  n0: ranks 0-7",
        "  n1: ranks 8-15",
        "  ...",
        "  n15: ranks 120-127",
        "  tp=8: inside a node",
        "  dp=16: across 16 nodes",
        "  ep=16: across 2 nodes",
        "  edp=8: across 8 nodes",
    ]


def test_a_domain_of_nvlink_may_hold_a_tensor_parallel_group() -> None:
    with pytest.raises(ConfigError, match=r"slurm\.ntasks_per_node=4: a tensor-parallel group would leave its node"):
        place(ParallelDims(tp=8, etp=8, dp=2), list("abcd"), 4)
    text = place(ParallelDims(tp=8, etp=8, dp=2), list("abcd"), 4, domain=2).describe()
    assert "  tp=8: across 2 nodes of one NVLink domain" in text
    assert "  dp=2: across 2 nodes of 2 NVLink domains" in text
    with pytest.raises(ConfigError, match=r"ntasks_per_node=4 \* slurm\.nvlink_nodes=2: .* leave its NVLink domain"):
        place(ParallelDims(tp=16, etp=16), list("abcd"), 4, domain=2)


@given(replicas=st.integers(1, 20), tp=st.sampled_from([1, 2, 3, 4, 8]), count=st.integers(1, 5), shared=st.booleans())
def test_servers_stay_inside_a_node_and_do_not_meet_on_gpus_of_their_own(
    replicas: int, tp: int, count: int, shared: bool
) -> None:
    section, nodes = ServerSection(replicas=replicas, tp=tp), [f"n{i}" for i in range(count)]
    fits = -(-replicas // count) * tp <= 8
    try:
        seats = seat(section, nodes, 8, shared=shared)
    except ConfigError:
        assert not fits and not shared  # noqa: PT018
        return
    assert len(seats) == replicas
    assert [s.node for s in seats] == sorted(s.node for s in seats)
    assert all(len(s.gpus) == tp and set(s.gpus) <= set(range(8)) for s in seats)
    taken = [(s.node, gpu) for s in seats for gpu in s.gpus]
    assert shared or len(set(taken)) == len(taken)
    assert not fits or len(set(taken)) == len(taken)
    on = [sum(s.node == node for s in seats) for node in nodes]
    assert max(on) == -(-replicas // count)
    assert all(s.gpus == () for s in seat(section, nodes, 0, shared=shared))


@given(
    replicas=st.integers(1, 6),
    tp=st.sampled_from([1, 2, 4, 8, 16]),
    pp=st.integers(1, 3),
    dp=st.integers(1, 4),
    given_nodes=st.sampled_from([None, 1, 2, 3]),
    count=st.integers(1, 6),
)
def test_servers_on_several_nodes_have_neighbouring_nodes_and_gpus_of_their_own(
    replicas: int, tp: int, pp: int, dp: int, given_nodes: int | None, count: int
) -> None:
    section = ServerSection(replicas=replicas, tp=tp, pp=pp, dp=dp, nodes=given_nodes)
    ranks, nodes = tp * pp * dp, [f"n{i}" for i in range(count)]
    span = given_nodes or math.ceil(ranks / 8)
    try:
        seats = seat(section, nodes, 8, shared=False)
    except ConfigError:
        fits = ranks % span == 0 and ranks // span <= 8 and count % span == 0
        fits = fits and math.ceil(replicas / (count // span)) * (ranks // span) <= 8
        assert not fits or (tp > 8 and given_nodes is None)
        return
    servers = [[s for s in seats if s.server == number] for number in range(replicas)]
    assert [s for server in servers for s in server] == list(seats)
    for server in servers:
        first = nodes.index(server[0].node)
        assert [(s.node, s.part) for s in server] == [(nodes[first + i], i) for i in range(span)]
        assert first % span == 0
        assert len({s.gpus for s in server}) == 1
        assert sum(len(s.gpus) for s in server) == ranks
    taken = [(s.node, gpu) for s in seats for gpu in s.gpus]
    assert len(set(taken)) == len(taken)
    assert {gpu for _, gpu in taken} <= set(range(8))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"tp": 16}, r"tp=16 is more than the 8 GPUs of a node.* allow it with rollout\.server\.nodes=2"),
        ({"tp": 8, "pp": 3, "nodes": 2}, r"nodes=2 of rollout\.server\.tp=8 \* pp=3 need 12 GPUs of each node"),
        ({"tp": 3, "nodes": 2}, r"nodes=2 cannot share out rollout\.server\.tp=3 = 3 GPUs evenly"),
        ({"tp": 8, "pp": 2, "nodes": 2}, r"the servers' nodes are 3, not a multiple of it"),
    ],
)
def test_servers_that_do_not_fit_nodes_are_told(keys: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        seat(ServerSection(**keys), ("a", "b", "c"), 8, shared=False)


@pytest.mark.parametrize(
    ("section", "keys", "text"),
    [
        ("learner", {"recompute": {"uniform": 1}}, "; learner.recompute.uniform=1"),
        ("learner", {"max_tokens_per_micro_batch": 4096}, "; learner.max_tokens_per_micro_batch=4096"),
        ("rollout", {"slots": 4}, "; rollout.slots=4"),
        ("train", {"minibatches": 4}, "; train.minibatches=4"),
        ("learner", {"timeout_seconds": 77.0, "optimizer": {"weight_decay": 0.5}, "router": {"z_loss": 0.1}}, ""),
        ("train", {"steps": 7, "learning_rate": 1e-5}, ""),
    ],
)
def test_a_layout_names_the_keys_that_change_a_steps_cost_alone(
    section: str, keys: dict[str, object], text: str
) -> None:
    assert layout_said(RunConfig.model_validate({section: keys})) == f"learner dp=1{text}"
