"""Where a planned run's servers are: on the learner's GPUs or on nodes of their own, by the fastest degrees."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

from rl_megatron.scaling.hardware import GB
from rl_megatron.scaling.memory import weights_on_gpu, weights_served
from rl_megatron.scaling.planner.layouts import CUTS, Wanted
from rl_megatron.scaling.rl_step import MOST_STALENESS, rollout_seconds, server_shape
from rl_megatron.scaling.rollouts import Sampled

MOST_SERVER_DP = 32
"""The highest degree of a server's data parallelism that is tried."""
_SHARES = (1 / 8, 1 / 4, 1 / 2, 3 / 4)  # of the nodes that servers may have for themselves
_FRACTIONS = (0.6, 0.4, 0.25)  # of a GPU for a server that takes turns with the learner
_CACHE = 0.12  # of a GPU that a server's cache and kernels take at least


def placements(wanted: Wanted) -> Iterator[tuple[float, dict[str, object]]]:
    """Where servers are, with the degrees that sample fastest there: seconds that a step takes at least, and keys of
    rollout.server, slurm and weights."""
    nodes, each = wanted.gpus // wanted.per_node, wanted.per_node
    shared: dict[str, object] = {"slurm.gpus_per_node": each, "slurm.gpu_memory_gb": wanted.gpu.memory}
    places: list[tuple[int, float, dict[str, object]]] = [
        (
            wanted.gpus,
            fraction,
            {
                "slurm.nodes": nodes,
                "rollout.server.colocated": True,
                "learner.offload.while_sampling": "optimizer",
                "weights.transport": "cuda_ipc" if nodes == 1 else "carried",
            },
        )
        for fraction in _FRACTIONS
    ]
    counts, own = {round(nodes * share) for share in _SHARES}, int(str(wanted.given.get("slurm.engines.nodes", 0)))
    if own or "slurm.nodes" in wanted.given:
        counts = {own or nodes - int(str(wanted.given["slurm.nodes"]))}
    for count in sorted(n for n in counts if 0 < n < nodes):
        apart = {"slurm.nodes": nodes - count, "slurm.engines.nodes": count, "weights.transport": "process_group"}
        places.append((count * each, 0.85, apart))
    for gpus, usual, keys in places:
        fraction = float(str(wanted.given.get("rollout.server.memory_fraction") or usual))
        keys |= {**shared, "rollout.server.memory_fraction": fraction}
        if "rollout.server.colocated" in keys and wanted.given.get("train.max_staleness"):
            continue  # refused: servers that take turns with the learner sample nothing meanwhile
        if "rollout.server.colocated" in keys and wanted.given.get("slurm.engines.nodes"):
            continue
        if any(wanted.given.get(key, value) != value for key, value in keys.items()):
            continue
        if "rollout.server.colocated" not in keys and wanted.given.get("rollout.server.colocated"):
            continue
        if (servers := _servers(wanted, gpus, fraction)) is not None:
            overlaps = "rollout.server.colocated" not in keys and wanted.goal != "step"
            engines = servers[0].steady if overlaps else servers[0].alone
            yield engines, keys | servers[1]


def _servers(wanted: Wanted, gpus: int, fraction: float) -> tuple[Sampled, dict[str, object]] | None:
    """Degrees and number of servers that sample fastest on ``gpus``; None if the weights do not fit them."""
    best: tuple[Sampled, dict[str, object]] | None = None
    shape, base, each = wanted.shape, wanted.base, wanted.per_node
    weights = weights_served(base, shape)
    for tp, dp in product(CUTS, range(1, MOST_SERVER_DP + 1)):
        ranks = tp * dp
        spread = dp > 1 and (not shape.num_experts or shape.num_experts % ranks)
        if ranks > gpus or tp > each or shape.num_heads % tp or spread:
            continue
        if (ranks > each and tp < each) or gpus % ranks or each % min(ranks, each):
            continue
        section = base.rollout.server.model_copy(update={"tp": tp, "dp": dp, "memory_fraction": fraction})
        if weights_on_gpu(section, weights) > (fraction - _CACHE) * wanted.gpu.memory * GB:
            continue
        keys: dict[str, object] = {"rollout.server.replicas": gpus // ranks, "rollout.server.tp": tp}
        keys |= {"rollout.server.dp": dp, "rollout.server.ep": ranks if dp > 1 else 1}
        if any(wanted.given.get(key, value) != value for key, value in keys.items()):
            continue
        server = server_shape(base, section, weights, shape, wanted.gpu)
        own = wanted.given.get("rollout.server.concurrency")
        here = rollout_seconds(
            base,
            shape,
            server,
            wanted.gpu,
            wanted.lengths,
            replicas=gpus // ranks,
            prompt=wanted.prompt,
            concurrency=math.inf if own is None else float(str(own)),
        )
        if own is None:  # enough for places of servers, but no more than there can be
            useful = min(here.requests, base.rollout.prompts_per_step * (1 + MOST_STALENESS))
            keys["rollout.server.concurrency"] = max(useful, base.rollout.server.concurrency)
        if best is None or here.alone < best[0].alone:
            best = here, keys
    return best
