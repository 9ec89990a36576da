"""The request for a planned run, its learner's layouts with their seconds, and the placements of its servers.

Servers are on the learner's GPUs or on separate nodes, by the fastest degrees.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby, product
from typing import Any, Literal

from rl_megatron.config.learner_checks import DEEPEP_RANKS
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import GB
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import ParallelDims
from tools.planner.hardware import Gpu
from tools.planner.memory import CHANGES, weights_on_gpu, weights_served
from tools.planner.rl_step import (
    MOST_STALENESS,
    RolloutEstimate,
    ServerShape,
    filled,
    learner_work,
    rollout_seconds,
    rows_that_fit,
    score_seconds,
    server_shape,
)
from tools.planner.time import LearnerWork, step_seconds

Goal = Literal["tokens", "memory", "step"]
Timed = tuple[float, dict[str, object]]
"""Seconds of training and log-probs in a step, and the keys of the layout."""
CUTS = (1, 2, 4, 8)
"""Degrees of tensor and context parallelism that are tried."""
MOST_STAGES, MOST_EXPERT_RANKS = 32, 128
COUPLED_KEYS: Mapping[str, str] = {
    term: change.removeprefix(f"set roles.{term}=separate, ") for term, change in CHANGES.items()
}
"""`CHANGES` without roles on separate GPUs, which no planned layout has."""
_USUAL = 8192  # tokens of a micro-batch; longer ones do not make products faster
_FEW_EXPERTS = 16  # up to this many experts of a layer, each is large enough to cut (etp)
_AXES = ("tp", "pp", "vpp", "ep", "etp", "cp", "dp")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """A run to plan: on ``gpus`` of a kind, with completions of ``lengths`` and prompts of ``prompt`` tokens.

    ``base`` has the keys that the user gave and defaults of the others; ``given`` are the user's values by key, which
    the search leaves unchanged.
    """

    base: RunConfig
    shape: ModelShape
    gpu: Gpu
    gpus: int
    lengths: Sequence[float]
    prompt: float
    goal: Goal = "tokens"
    given: Mapping[str, object] = field(default_factory=dict)

    @property
    def per_node(self) -> int:
        """The number of GPUs of a node."""
        return min(self.gpus, self.gpu.per_node)

    @property
    def mean(self) -> float:
        """The mean number of tokens of a sequence with its prompt."""
        return sum(self.lengths) / len(self.lengths) + self.prompt


def with_keys(base: RunConfig, keys: Mapping[str, object]) -> RunConfig:
    """Returns the configuration with ``section.key`` values of the search, which are not checked."""
    learner: dict[str, Any] = {}
    server: dict[str, Any] = {}
    slurm: dict[str, Any] = {}
    sections: dict[str, dict[str, Any]] = {"learner": learner, "rollout.server": server, "slurm": slurm}
    for name, value in keys.items():
        section, _, key = name.rpartition(".")
        sections.setdefault(section, {})[key] = value
    for name in ("recompute", "offload"):
        if given := sections.get(f"learner.{name}"):
            learner[name] = getattr(base.learner, name).model_copy(update=given)
    if "slurm.engines" in sections:
        slurm["engines"] = base.slurm.engines.model_copy(update=sections["slurm.engines"])
    update: dict[str, Any] = {
        "learner": base.learner.model_copy(update=learner),
        "slurm": base.slurm.model_copy(update=slurm),
        "rollout": base.rollout.model_copy(
            update={**sections.get("rollout", {}), "server": base.rollout.server.model_copy(update=server)}
        ),
    }
    for section in ("weights", "train", "checkpoint"):
        if section in sections:
            update[section] = getattr(base, section).model_copy(update=sections[section])
    return base.model_copy(update=update)


def timed_layouts(wanted: SearchRequest, world: int) -> Iterator[Timed]:
    """Seconds of training and log-probs in a step for each layout of ``world`` ranks, without recomputing anything."""
    base, mean = wanted.base, wanted.mean
    work = learner_work(base, wanted.shape, wanted.gpu, mean)
    for keys in layouts(wanted, world):
        dims = ParallelDims(**{axis: int(str(keys[f"learner.{axis}"])) for axis in _AXES})
        tokens, micro_batches = filled(base, float(str(keys["learner.max_tokens_per_micro_batch"])), dims.dp, mean)
        this = replace(
            work,
            dims=dims,
            stages=base.learner.stages or _counts(wanted.shape.num_layers, dims.pp, dims.vpp),
            tokens=tokens,
            micro_batches=micro_batches,
            dispatcher="alltoall" if keys["learner.dispatcher"] == "alltoall" else "by_node",
        )
        yield _seconds(wanted, this), keys


def learner_seconds(wanted: SearchRequest, config: RunConfig) -> float:
    """Returns seconds of training and log-probs in a step, with the configuration's recomputation and offloading."""
    return _seconds(wanted, learner_work(config, wanted.shape, wanted.gpu, wanted.mean))


def _seconds(wanted: SearchRequest, work: LearnerWork) -> float:
    train = wanted.base.train
    return step_seconds(work) * train.minibatches * train.epochs + score_seconds(wanted.base, work)


def layouts(wanted: SearchRequest, world: int) -> Iterator[dict[str, object]]:
    """Yields degrees that fill the learner's GPUs, with the other keys that the plan's time depends on."""
    shape, base = wanted.shape, wanted.base
    longest = base.longest_sequence
    heads = [shape.num_heads, shape.num_kv_heads if shape.latent is None else shape.num_heads]
    heads += [] if shape.delta is None else [shape.delta.key_heads]
    tps = [tp for tp in CUTS if tp <= wanted.per_node and all(n % tp == 0 for n in heads)]
    cuts = 0 < shape.num_experts <= _FEW_EXPERTS and not (shape.expert_bias or shape.stacked_experts)

    def etps(tp: int) -> list[int]:
        if not shape.num_experts:
            return [tp]
        return sorted({1, int(str(wanted.given.get("learner.etp", tp if cuts else 1)))})

    cps = [cp for cp in CUTS if cp == 1 or longest / cp >= 8192 or wanted.given.get("learner.cp") == cp]
    vpps = sorted({1, 2, 4, int(str(wanted.given.get("learner.vpp", 1)))})
    for tp, cp in product(tps, cps):
        for pp in range(1, min(MOST_STAGES, shape.num_layers) + 1):
            if world % (tp * cp * pp):
                continue
            dp = world // (tp * cp * pp)
            for ep, etp, vpp in product(_expert_degrees(wanted), etps(tp), vpps):
                if tp * cp * dp % (ep * etp) or (vpp > 1 and (pp == 1 or pp * vpp > shape.num_layers)):
                    continue
                degrees = {"tp": tp, "pp": pp, "vpp": vpp, "ep": ep, "etp": etp, "cp": cp, "dp": dp}
                yield from _with_work(wanted, longest, degrees)


def _with_work(wanted: SearchRequest, longest: int, degrees: Mapping[str, int]) -> Iterator[dict[str, object]]:
    """Yields a layout's keys: its stages' layers, each dispatcher, micro-batches of the longest sequence or of two."""
    own, chunks = wanted.base.learner, degrees["pp"] * degrees["vpp"]
    if own.stages is not None and len(own.stages) != chunks:
        return
    stages = own.stage_layers or stage_layers(wanted.shape.num_layers, degrees["pp"], degrees["vpp"])
    dispatchers = ["alltoall"]
    given = wanted.given.get("learner.dispatcher")
    if (group := degrees["ep"] * degrees["etp"]) > wanted.gpu.domain and (group in DEEPEP_RANKS or given):
        dispatchers.append("deepep")
    if wanted.given.get("learner.dispatcher") == "hybridep":
        dispatchers = ["hybridep"]
    sizes = [longest, 2 * longest] if longest < _USUAL else [longest]
    if size := wanted.given.get("learner.max_tokens_per_micro_batch"):
        sizes = [int(str(size))]
    for dispatcher, size in product(dispatchers, sizes):
        keys: dict[str, object] = {f"learner.{axis}": degree for axis, degree in degrees.items()}
        keys |= {"learner.stage_layers": stages, "learner.dispatcher": dispatcher}
        keys["learner.max_tokens_per_micro_batch"] = size
        if all(wanted.given.get(key, value) == value for key, value in keys.items()):
            yield keys


def _expert_degrees(wanted: SearchRequest) -> list[int]:
    """Returns degrees that divide the experts: powers of two and multiples of 24, at most 128, and the user's."""
    count, given = wanted.shape.num_experts, wanted.given.get("learner.ep")
    usual = [
        ep for ep in range(1, min(count, MOST_EXPERT_RANKS) + 1) if ep & (ep - 1) == 0 or ep % 24 == 0 or ep == given
    ]
    return [ep for ep in usual if count % ep == 0] or [1]


@cache
def _counts(layers: int, pp: int, vpp: int) -> tuple[int, ...]:
    """Returns the layers of each chunk, fewer in chunks with the output layer or the embedding."""
    chunks = pp * vpp
    each, lacking = -(-layers // chunks), -layers % chunks
    counts = [each] * chunks
    for i in [chunks - 1, 0, *range(chunks - 2, 0, -1)][:lacking]:
        counts[i] -= 1
    if lacking >= 3 and each > 2:  # two fewer on the last: its output layer takes as long as some layers
        counts[-1] -= 1
        counts[next(i for i in range(1, chunks) if counts[i] < each)] += 1
    return tuple(counts)


@cache
def stage_layers(layers: int, pp: int, vpp: int) -> str | None:
    """Returns the layers of each chunk in the form of ``learner.stage_layers``; None if all are equal."""
    counts = _counts(layers, pp, vpp)
    if len(set(counts)) == 1:
        return None
    runs = ((count, len(list(same))) for count, same in groupby(counts))
    return "+".join(f"{count}*{times}" if times > 1 else f"{count}" for count, times in runs)


def _servers(keys: Mapping[str, object]) -> str:
    degrees = [int(str(keys.get(f"rollout.server.{name}", 1))) for name in ("replicas", "tp", "dp")]
    gpus = degrees[1] * degrees[2]
    return f"{degrees[0]} server{'' if degrees[0] == 1 else 's'} of {gpus} GPU{'' if gpus == 1 else 's'}"


def described(keys: Mapping[str, object]) -> str:
    """Describes a layout in a few words."""
    d = {axis: keys.get(f"learner.{axis}", 1) for axis in ("tp", "pp", "vpp", "ep", "etp", "cp", "dp")}
    if d["ep"] == 1 and d["etp"] == d["tp"]:  # the default, and the only value of a model without experts
        del d["etp"]
    learner = " ".join(f"{axis}{degree}" for axis, degree in d.items() if degree != 1)
    apart = keys.get("slurm.engines.nodes")
    where = f"{_servers(keys)} on {apart} nodes" if apart else f"{_servers(keys)} on the same GPUs"
    saved = [
        ", ".join(value) if isinstance(value, tuple) else name.rpartition(".")[2]
        for name, value in keys.items()
        if name.startswith(("learner.recompute", "learner.offload.optimizer", "learner.head_dtype"))
    ]
    waits = ["without async_save"] if "checkpoint.async_save" in keys else []
    return ", ".join([*filter(None, [learner]), where, *(["with " + ", ".join(saved)] if saved else []), *waits])


MOST_SERVER_DP = 32
"""The highest degree of a server's data parallelism that is tried."""
SLOTS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
"""The values of ``rollout.slots`` that are tried if a server's cache has that many rows, besides the default and all
rows of the cache."""
_SHARES = (1 / 8, 1 / 4, 1 / 2, 3 / 4)  # shares of the nodes that are only for servers
_FRACTIONS = (0.6, 0.4, 0.25)  # shares of a GPU for a server that takes turns with the learner
_CACHE = 0.12  # the least share of a GPU for a server's cache and kernels


def placements(wanted: SearchRequest) -> Iterator[tuple[float, dict[str, object]]]:
    """Yields placements of servers, with the degrees that sample fastest there: seconds that a step takes at least, and
    keys of rollout.server, slurm and weights."""
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
            continue  # invalid: servers that take turns with the learner do not sample while it trains
        if "rollout.server.colocated" in keys and wanted.given.get("slurm.engines.nodes"):
            continue
        if any(wanted.given.get(key, value) != value for key, value in keys.items()):
            continue
        if "rollout.server.colocated" not in keys and wanted.given.get("rollout.server.colocated"):
            continue
        overlaps = "rollout.server.colocated" not in keys and wanted.goal != "step"
        staleness = int(str(wanted.given.get("train.max_staleness", MOST_STALENESS))) if overlaps else 0
        if (servers := _best_servers(wanted, gpus, fraction, staleness)) is not None:
            yield servers[0], keys | servers[1]


def _best_servers(
    wanted: SearchRequest, gpus: int, fraction: float, staleness: int
) -> tuple[float, dict[str, object]] | None:
    """Returns the least seconds of a step, and degrees and number of servers that sample fastest on ``gpus``, with at
    most ``staleness``; None if the weights do not fit them."""
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
            seconds = (
                max(here.steady, min(here.longest / staleness, here.lone_seconds)) if staleness else here.lone_seconds
            )
            if best is None or seconds < best[0]:
                best = seconds, {**keys, **_requests(wanted, here, slots)}
    return best


def _slots(wanted: SearchRequest, server: ServerShape, *, dp: int, replicas: int, staleness: int) -> list[int]:
    """Returns values of ``rollout.slots`` that the server's cache holds, the default first; the default also if a
    server's rows all fit the cache. A user's value is the only one."""
    usual = wanted.base.rollout.slots
    if "rollout.slots" in wanted.given:
        return [usual]
    room = rows_that_fit(wanted.shape, server, wanted.mean)
    needed = wanted.base.completions_per_step * (1 + staleness) / replicas
    whole = min(int(room) // dp * dp, SLOTS[-1])
    least = dp * wanted.base.max_completions  # vLLM rejects a request of more than a dp replica has
    fitting = sorted({max(least, slots) for slots in (*SLOTS, whole) if slots <= room})
    first = [usual] if least <= usual and min(usual, needed) <= room else []
    return [*first, *(slots for slots in reversed(fitting) if slots != usual)]


def _sampled(wanted: SearchRequest, server: ServerShape, *, replicas: int, slots: int) -> RolloutEstimate:
    own = wanted.given.get("rollout.server.max_concurrent_groups")
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


def _requests(wanted: SearchRequest, here: RolloutEstimate, slots: int) -> dict[str, object]:
    """Returns keys that give servers ``slots``, and requests for all of them, up to the number that a run has."""
    base, keys = wanted.base.rollout, dict[str, object]()
    if slots != base.slots:
        keys["rollout.slots"] = slots
    if "rollout.server.max_concurrent_groups" not in wanted.given:
        useful = min(here.requests, base.prompts_per_step * (1 + MOST_STALENESS))
        keys["rollout.server.max_concurrent_groups"] = max(useful, base.server.max_concurrent_groups)
    return keys
