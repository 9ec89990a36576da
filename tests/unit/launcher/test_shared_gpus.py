"""What a GPU must hold that the learner shares with servers, and whether it shares one: by closed forms."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.wire.greetings import Setup
from rl_megatron.config.io import load_config
from rl_megatron.errors import ConfigError
from rl_megatron.placement.names import LEARNER
from rl_megatron.placement.ranks import made_up_nodes, placement_of
from rl_megatron.placement.seats import beside_ranks, seats_of
from rl_megatron.scaling.hardware import GB
from rl_megatron.scaling.memory import check_memory, footprints, fullest
from tests.unit.launcher.test_memory import recipe


@pytest.mark.parametrize(
    ("keys", "servers"),
    [
        (("rollout.server.replicas=2",), [2] * 8),
        (("rollout.server.tp=2", "rollout.server.replicas=6"), [2, 2, 2, 2, 1, 1, 1, 1]),
        (("rollout.server.replicas=3",), [3] * 8),
        (("rollout.server.replicas=4", "slurm.nodes=2", "learner.dp=4"), [2] * 16),
        (("slurm.engines.nodes=1", "weights.transport=direct", "rollout.server.tp=4"), [0]),
    ],
)
def test_every_server_on_a_gpu_takes_its_part_of_it(keys: tuple[str, ...], servers: list[int]) -> None:
    """In turns each keeps 2 GB while the learner trains; the fullest GPU has the most servers."""
    job, share = ("run.launcher=slurm", "weights.transport=file", *keys), 0.1
    config, shape = recipe("qwen3_30b_a3b", *job, f"rollout.server.memory_fraction={share}")
    found = footprints(config, shape)
    assert [m.terms["engine"] for m in found] == pytest.approx([n * share * 141 * GB for n in servers])
    assert fullest(config, shape).terms["engine"] == max(m.terms["engine"] for m in found)
    if config.slurm.engines.nodes:
        return
    turns = ("rollout.server.colocated=true", f"rollout.server.memory_fraction={share}")
    training = [m for m in footprints(*recipe("qwen3_30b_a3b", *job, *turns)) if m.phase == "training"]
    assert [m.terms["engine"] for m in training] == [n * 2e9 for n in servers]


def test_servers_that_leave_the_learner_nothing_of_a_gpu_are_refused_whatever_its_size() -> None:
    keys = ("rollout.server.replicas=4", "slurm.gpu_memory_gb=null")
    with pytest.raises(ConfigError, match=r"memory_fraction=0\.25 for each of 4 servers on a GPU .* nothing; lower it"):
        check_memory(*recipe("qwen3_30b_a3b", *keys, "rollout.server.memory_fraction=0.25"))
    assert check_memory(*recipe("qwen3_30b_a3b", *keys, "rollout.server.memory_fraction=0.24")) is None


@pytest.mark.parametrize(("replicas", "here", "servers"), [(8, 8, 1), (16, 8, 2), (2, 6, 0), (2, 8, 0), (8, None, 0)])
def test_a_server_on_a_gpu_of_a_separate_role_takes_its_part_of_it(
    replicas: int, here: int | None, servers: int
) -> None:
    """The critic's two ranks are the fullest, on GPUs 4 and 5 of one machine. In turns they keep all but
    activations there."""
    keys = ("algorithm=ppo", "roles.critic=separate", "learner.dp=4", "learner.ep=4", "learner.tp=1", "learner.pp=1")
    keys += ("roles.layouts.critic.dp=2", "roles.layouts.critic.ep=2", "rollout.server.tp=1", "weights.transport=file")
    keys += ("run.launcher=local", "slurm.gpu_memory_gb=500", f"rollout.server.replicas={replicas}")
    config, shape = recipe("qwen3_30b_a3b", *keys, "rollout.server.memory_fraction=0.2")
    most = fullest(config, shape, here)
    assert (most.role, most.terms["engine"]) == ("critic", servers * 0.2 * 500 * GB)
    turns = recipe("qwen3_30b_a3b", *keys, "rollout.server.memory_fraction=0.2", "rollout.server.colocated=true")
    apart = fullest(*turns, here)
    assert (apart.phase, apart.terms["engine"]) == ("sampling" if servers else "", most.terms["engine"])
    assert most.total - apart.total == (most.terms["activations"] + most.terms["logits"] if servers else 0)
    if servers > 1:
        with pytest.raises(ConfigError, match=r"critic rank 0 needs 516\.\d GB .* Largest: engine; lower rollout"):
            check_memory(config, shape, here)


ONE_MACHINE = (
    "slurm.heterogeneous=false",
    "slurm.engines.gpus_per_node=null",
    "slurm.engines.memory_per_node=null",
    "slurm.engines.cpus_per_server=null",
)


def test_the_advice_for_the_engine_in_the_learners_processes_lowers_it() -> None:
    keys = ("rollout=local", "run.launcher=slurm")
    with pytest.raises(ConfigError, match="Largest: engine; ") as caught:
        check_memory(*recipe("qwen3_30b_a3b", *keys))
    said = str(caught.value).partition("Largest: engine; ")[2]
    assert said == "lower rollout.slots or rollout.max_new_tokens, or take servers (rollout=vllm, sglang)"
    was = fullest(*recipe("qwen3_30b_a3b", *keys)).terms["engine"]
    for lower in ("rollout.slots=16", "rollout.max_new_tokens=512", "rollout=vllm"):
        assert fullest(*recipe("qwen3_30b_a3b", *keys, lower)).terms["engine"] < 0.6 * was


EIGHT = ("run.launcher=slurm", "learner.device=cuda", "learner.tp=4", "learner.ep=4", "slurm.gpus_per_node=8")
EIGHT += ("rollout=vllm", "rollout.server.tp=2", "rollout.server.memory_fraction=0.3")


def test_a_rank_has_the_gpu_of_its_place_on_its_node(tmp_path: Path) -> None:
    """Also where ranks are fewer than GPUs: servers have each node's GPUs from the first on."""
    keys = (*EIGHT, "slurm.nodes=2", "slurm.ntasks_per_node=4", "learner.dp=2")
    config = load_config("tiny_cpu", [*keys, "rollout.server.replicas=4"])
    nodes = made_up_nodes(config)[LEARNER]
    placement = placement_of(config, nodes)
    each = {"ranks_per_node": placement.ranks_per_node, "rendezvous": ""}
    setup = Setup(config=config, model_folder=tmp_path, run_folder=tmp_path, **each)
    ranks = {(placement.node_of(rank), setup.gpu_of(rank)): rank for rank in range(8)}
    assert [gpu for _, gpu in ranks] == [0, 1, 2, 3] * 2
    beside = [[ranks[seat.node, gpu] for gpu in seat.gpus] for seat in seats_of(config, nodes, ())]
    assert beside == beside_ranks(config) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    more = load_config("tiny_cpu", [*keys, "rollout.server.replicas=8"])
    assert beside_ranks(more)[1:4] == [[2, 3], [12, 13], [14, 15]]  # GPUs without a rank are behind the 8 ranks


def test_more_ranks_than_gpus_on_a_node_are_refused() -> None:
    config = load_config("tiny_cpu", [*EIGHT, "slurm.ntasks_per_node=16", "learner.dp=4"])
    with pytest.raises(ConfigError, match=r"ntasks_per_node=16 is more than slurm\.gpus_per_node=8: NCCL .*; lower it"):
        placement_of(config, ("a",))
