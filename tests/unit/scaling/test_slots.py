"""How many sequences the servers of a plan have at once, where the user does not say."""

from __future__ import annotations

from launcher.programs.scale import asked_of, configuration_file
from rl_megatron.scaling.memory import weights_served
from rl_megatron.scaling.planner.fitting import PlannedRun
from rl_megatron.scaling.planner.layouts import Wanted, with_keys
from rl_megatron.scaling.planner.places import SLOTS, placements
from rl_megatron.scaling.planner.search import search
from rl_megatron.scaling.rl_step import server_shape
from rl_megatron.scaling.rollouts import rows_that_fit


def room_of(plan: PlannedRun, wanted: Wanted) -> float:
    """The rows that the cache of a plan's server holds."""
    config, shape = plan.config, wanted.shape
    server = server_shape(config, config.rollout.server, weights_served(config, shape), shape, wanted.gpu)
    return rows_that_fit(shape, server, wanted.mean)


def test_servers_have_the_slots_that_take_the_least_time_of_those_that_their_cache_holds() -> None:
    keys = ("qwen3-30b-a3b", "gpus=16", "gpu=h100", "rollout.prompts_per_step=256", "learner.pp=2", "learner.vpp=1")
    given = asked_of(keys)
    best = search(given.wanted).plans[0]
    each = {slots: search(asked_of((*keys, f"rollout.slots={slots}")).wanted).plans[0] for slots in SLOTS}
    fitting = [plan.step.seconds for slots, plan in each.items() if slots <= room_of(plan, given.wanted)]
    assert best.step.seconds <= min(fitting)
    assert best.step.seconds < 0.9 * each[512].step.seconds
    slots = best.config.rollout.slots
    assert best.keys["rollout.slots"] == slots > 512
    assert f"slots: {slots}\n" in configuration_file(given, best)
    assert "rollout.slots" not in each[512].keys


def test_several_servers_are_planned_where_one_would_gather_too_many_rows() -> None:
    """A GPU of 128 reads 3.5 GB of experts of Qwen3-235B-A22B for a token, one of 32 14 GB, 5 ms more; but to gather
    and scatter 3,072 rows of 8 KB in 94 layers, over a node's eight links of 50 GB/s, takes 17 ms, and 768 rows 3 ms.
    """
    wanted = asked_of(("qwen3-235b-a22b", "gpus=512", "gpu=h100", "slurm.engines.nodes=48")).wanted
    ((_, placed),) = placements(wanted)
    server = with_keys(wanted.base, placed).rollout.server
    assert (server.count, server.ranks) == (12, 32)


def test_servers_get_no_more_slots_than_their_cache_holds() -> None:
    """Of long completions, of which it holds fewer than the default's 512."""
    keys = ("qwen3-30b-a3b", "gpus=16", "gpu=h100", "rollout.max_new_tokens=39936", "slurm.engines.nodes=1")
    wanted = asked_of(keys).wanted
    best = search(wanted).plans[0]
    assert best.config.rollout.slots <= room_of(best, wanted) < 512


def test_each_replica_of_a_server_has_the_slots_of_a_request_and_a_cache_is_used_whole() -> None:
    """vLLM refuses servers of fewer; between two of the values that are tried lies up to half of a cache."""
    keys = ("qwen3-235b-a22b", "gpus=64", "gpu=h100", "rollout.max_new_tokens=39936")
    for group in (16, 64):
        wanted = asked_of((*keys, f"rollout.group_size={group}")).wanted
        for _, placed in placements(wanted):
            rollout = with_keys(wanted.base, placed).rollout
            assert rollout.slots // rollout.server.dp >= group
    few = asked_of((*keys, "rollout.group_size=2")).wanted
    found = {with_keys(few.base, placed).rollout.slots for _, placed in placements(few)}
    assert any(64 < slots < 512 for slots in found - {*SLOTS})
