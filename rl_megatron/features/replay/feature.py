"""``algorithm.routing_replay``: the passes of an update use the experts that routers chose before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from typing_extensions import override

from rl_megatron.columns import Column
from rl_megatron.feature import Curve, Feature, Serving, StepHooks
from rl_megatron.rules import SET, TEXT, Excludes, Not, On, Rule
from rl_megatron.section import Section

if TYPE_CHECKING:
    from rl_megatron.config.run import RunConfig
    from rl_megatron.config.sections.algorithm import AlgorithmSection
    from rl_megatron.interfaces import RunComponents
    from rl_megatron.training.scores import ScoredSamples
    from rl_megatron.types import Want

Replay: TypeAlias = Literal["off", "r2", "r3"]


class ReplayKeys(Section):
    """The feature's key of the algorithm."""

    routing_replay: Replay = "off"
    """The experts that the passes of an update use (docs/algorithms.md). off: the router's choice. r2: the choice of
    the learner's pass over the old policy. r3: the engine's choice while it sampled, also in the pass over the old
    policy."""


def replay_source(section: AlgorithmSection) -> Replay:
    """Returns the source of the experts in the passes of an update."""
    assert isinstance(section, ReplayKeys)
    return section.routing_replay


def _asks(config: RunConfig) -> str | None:
    return "algorithm.routing_replay=r3" if replay_source(config.algorithm) == "r3" else None


def _wants(config: RunConfig) -> frozenset[Want]:
    return frozenset({"logprobs", "routes"}) if replay_source(config.algorithm) == "r2" else frozenset()


def make_hooks(config: RunConfig, roles: RunComponents) -> Replayed | None:
    """Returns the hooks of r2. None without replay, and for r3: samples already have the engine's routes."""
    return Replayed() if replay_source(config.algorithm) == "r2" else None


class Replayed(StepHooks):
    """Makes the passes of an update replay the experts of the learner's pass over the old policy (r2)."""

    @override
    def scored(self, found: ScoredSamples) -> ScoredSamples:
        samples = found.samples
        return replace(found, samples=replace(samples, extra={**samples.extra, "routes": found.policy["routes"]}))


_REPLAYS = On("algorithm.routing_replay", Not("off"))
_ROUTES = On("required_columns.routes", SET, TEXT)
_LEAVE_OUT = "leave one of them out"
# fmt: off
_RULES: Sequence[Rule] = (
    Excludes(one=On("rollout.server.running_requests", "keep_cache"),
             other=(On("rollout.engine", Not("local")), _ROUTES),
             why="a server whose cache is full computes a completion again, and then returns the experts of the new "
             "weights for all tokens, also for those that older weights sampled",
             fix="set running_requests=abort, or leave routes out"),
    Excludes(one=On("rollout.stop", Not(())), other=(On("rollout.engine", "vllm"), _ROUTES),
             why="vLLM finds stop texts outside of its engine, which then returns no routes",
             fix="set rollout=sglang or local, or leave one of them out"),
    Excludes(one=On("algorithm.demonstration_gamma"), other=_ROUTES, why="no engine chose its experts", fix=_LEAVE_OUT),
    Excludes(one=_REPLAYS, other=On("shape.num_experts", 0, shown="shape.family"), where="shape",
             why="it has no experts, so there is no routing", fix="set algorithm.routing_replay=off"),
)
# fmt: on

FEATURE = Feature(
    name="replay",
    active=lambda _: True,  # it acts if samples have routes or routes are requested
    keys={"algorithm": ReplayKeys},
    rules=_RULES,
    columns=(
        Column(
            name="routes",  # the experts that each router chose: [positions, MoE layers, experts a token]
            of="positions",
            padding="distinct",
            layers=lambda shape: shape.moe_layers,
        ),
    ),
    asks={"routes": _asks},
    wants=_wants,
    serving=Serving(
        given=lambda config: config.required_columns.get("routes"),
        engines={
            "vllm": "rl_megatron.features.replay.engines:VLLMRoutes",
            "sglang": "rl_megatron.features.replay.engines:SGLangRoutes",
        },
        misfit="{given} needs routes, but it returns none; start it with --enable-return-routed-experts, or leave it "
        "out",
    ),
    learner="rl_megatron.features.replay.learner:Routing",
    step="rl_megatron.features.replay.feature:make_hooks",
    metrics=(
        ("moe/rerouted_fraction", "", "share of (token, layer) pairs with a router that would choose other experts "
         "than the replayed ones", Curve("Health", "Tokens rerouted by replay")),
    ),
    recorded={"moe/rerouted_fraction": (_REPLAYS, "set r2 or r3")},
)  # fmt: skip
