"""``train.route_flips``: the share of tokens with other experts in one pass than in another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_megatron.feature import Curve, Feature
from rl_megatron.rules import Excludes, On
from rl_megatron.section import Section

if TYPE_CHECKING:
    from rl_megatron.config.run import RunConfig, TrainSection
    from rl_megatron.types import Want


class RouteFlipsKeys(Section):
    """The feature's key of training."""

    route_flips: bool = False
    """Whether each step measures the share of tokens with other experts in engine and learner, and before and after the
    update, by layer (``moe/flips_*``). It also measures the share of tokens with a ratio outside 1 +- 0.2
    (``ratio/outside``). Takes one more pass over the batch."""


def counts_flips(section: TrainSection) -> bool:
    """True if each step counts route flips."""
    assert isinstance(section, RouteFlipsKeys)
    return section.route_flips


_KEY = "train.route_flips=true"


def is_only_reader(config: RunConfig) -> bool:
    """True if only this feature requests routes from engines, so that no model reads them."""
    return config.required_columns.get("routes") == _KEY


def _wants(config: RunConfig) -> frozenset[Want]:
    if not counts_flips(config.train):
        return frozenset()
    return frozenset({"logprobs", "routes"}) if is_only_reader(config) else frozenset({"logprobs"})


_FLIPS = On("train.route_flips", True)

FEATURE = Feature(
    name="router_study",
    keys={"train": RouteFlipsKeys},
    may_change=frozenset({"train.route_flips"}),
    rules=(
        Excludes(one=_FLIPS, other=On("shape.num_experts", 0, shown="shape.family"), where="shape",
                 why="it has no experts, so there is no routing", fix="leave it out"),
    ),
    asks={"routes": lambda config: _KEY if counts_flips(config.train) else None},
    wants=_wants,
    step="rl_megatron.features.router_study.step:make_hooks",
    metrics=(
        ("ratio/outside", "", "share of sampled tokens with a ratio that left 1 +- 0.2 in the update; only with "
         "train.route_flips", Curve("Health", "Ratios outside 1 ± 0.2")),
        ("ratio/outside/<name>", "", "the same share among tokens with their first flip (moe/first_flip) in this "
         "layer, or in `none`", Curve("Health", "Ratios outside 1 ± 0.2, first flip in <name>")),
        ("moe/flips_engine", "", "share of (sampled token, layer) pairs with other experts in the engine than in the "
         "old policy; not with r3", Curve("Health", "Routes unlike the engine's")),
        ("moe/flips_update", "", "share of (sampled token, layer) pairs with other experts after the update; 0 with "
         "replay", Curve("Health", "Routes that the update changes")),
        ("moe/first_flip/<name>", "", "share of sampled tokens with this as their lowest layer with such a flip, or "
         "`none`", Curve("Health", "Tokens by first such layer: <name>")),
    ),
    recorded=dict.fromkeys(("moe/flips_update", "moe/first_flip/<name>"), (_FLIPS, "set it to true")),
)  # fmt: skip
