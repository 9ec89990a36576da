"""Where a planned run's servers are: on the learner's GPUs or on nodes of their own, by the fastest degrees."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

from rl_megatron.errors import GB
from tools.planner.layouts import CUTS, Wanted, with_keys
from tools.planner.memory import weights_on_gpu, weights_served
from tools.planner.rl_step import MOST_STALENESS, rollout_seconds, server_shape
from tools.planner.rollouts import Sampled, ServerShape, rows_that_fit

MOST_SERVER_DP = 32
"""The highest degree of a server's data parallelism that is tried."""
SLOTS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
"""The values of ``rollout.slots`` that are tried, beside the default and all rows of a server's cache, if it has as
many."""
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
                "weights.transport": "direct",
            },
        )
        for fraction in _FRACTIONS
    ]
    counts, own = {round(nodes * share) for share in _SHARES}, int(str(wanted.given.get("slurm.engines.nodes", 0)))
    if own or "slurm.nodes" in wanted.given:
        counts = {own or nodes - int(str(wanted.given["slurm.nodes"]))}
    for count in sorted(n for n in counts if 0 < n < nodes):
        apart = {"slurm.nodes": nodes - count, "slurm.engines.nodes": count, "weights.transport": "direct"}
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
        overlaps = "rollout.server.colocated" not in keys and wanted.goal != "step"
        staleness = int(str(wanted.given.get("train.max_staleness", MOST_STALENESS))) if overlaps else 0
        if (servers := _servers(wanted, gpus, fraction, staleness)) is not None:
            yield servers[0], keys | servers[1]


def _servers(wanted: Wanted, gpus: int, fraction: float, staleness: int) -> tuple[float, dict[str, object]] | None:
    """Seconds that a step takes at least, degrees and number of servers that sample fastest on ``gpus``, with at most
    ``staleness``; None if the weights do not fit them."""
    best: tuple[float, dict[str, object]] | None = None
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
        for slots in _slots(wanted, server, dp=dp, replicas=gpus // ranks, staleness=staleness):
            here = _sampled(wanted, server, replicas=gpus // ranks, slots=slots)
            seconds = max(here.steady, min(here.longest / staleness, here.alone)) if staleness else here.alone
            if best is None or seconds < best[0]:
                best = seconds, {**keys, **_requests(wanted, here, slots)}
    return best


def _slots(wanted: Wanted, server: ServerShape, *, dp: int, replicas: int, staleness: int) -> list[int]:
    """Values of ``rollout.slots``, the default first: of those that the server's cache holds, which are all if it
    never has more rows. That of the user alone."""
    usual = wanted.base.rollout.slots
    if "rollout.slots" in wanted.given:
        return [usual]
    room = rows_that_fit(wanted.shape, server, wanted.mean)
    needed = wanted.base.completions_per_step * (1 + staleness) / replicas
    whole = min(int(room) // dp * dp, SLOTS[-1])
    least = dp * wanted.base.most_completions  # vLLM refuses a request of more than a dp replica has
    fitting = sorted({max(least, slots) for slots in (*SLOTS, whole) if slots <= room})
    first = [usual] if least <= usual and min(usual, needed) <= room else []
    return [*first, *(slots for slots in reversed(fitting) if slots != usual)]


def _sampled(wanted: Wanted, server: ServerShape, *, replicas: int, slots: int) -> Sampled:
    own = wanted.given.get("rollout.server.concurrency")
    return rollout_seconds(
        with_keys(wanted.base, {"rollout.slots": slots}),
        wanted.shape,
        server,
        wanted.gpu,
        wanted.lengths,
        replicas=replicas,
        prompt=wanted.prompt,
        concurrency=math.inf if own is None else float(str(own)),
    )


def _requests(wanted: Wanted, here: Sampled, slots: int) -> dict[str, object]:
    """The keys with which servers have so many slots, and requests for all their places, but no more than there are."""
    base, keys = wanted.base.rollout, dict[str, object]()
    if slots != base.slots:
        keys["rollout.slots"] = slots
    if "rollout.server.concurrency" not in wanted.given:
        useful = min(here.requests, base.prompts_per_step * (1 + MOST_STALENESS))
        keys["rollout.server.concurrency"] = max(useful, base.server.concurrency)
    return keys
