"""Metrics of the model's layers: experts, and observers of installed packages."""

from __future__ import annotations

from rl_megatron.observability.metrics.curve import Curve, MetricTuples

EXPERTS: MetricTuples = (
    ("moe/load_imbalance", "", "tokens of the busiest expert over the mean expert, in the worst layer; 1 is balanced",
     Curve("Health", "Expert load, busiest over mean")),
    ("moe/dead_experts", "", "share of experts without a token in an optimizer step, mean over layers",
     Curve("Health", "Experts without tokens")),
    ("moe/routing_entropy", "", "mean entropy of a router's distribution over experts, over that of the uniform one; "
     "near 0 it has collapsed. Prompts' tokens count in these three, padding does not, and a layer that is "
     "recomputed counts once", Curve("Health", "Routers' entropy, over the uniform one's")),
    ("moe/rerouted_fraction", "", "share of (token, layer) whose router would choose other experts than the replayed "
     "ones", Curve("Health", "Tokens rerouted by replay")),
    ("moe/flips_engine", "", "share of (sampled token, layer) with other experts in the engine than in the old "
     "policy; not with r3", Curve("Health", "Routes unlike the engine's")),
    ("moe/flips_engine/<name>", "", "the same of one layer: layer0, layer1, ... of those with experts",
     Curve("Health", "Routes unlike the engine's: <name>")),
    ("moe/flips_update", "", "share of (sampled token, layer) with other experts after the update; 0 with replay",
     Curve("Health", "Routes that the update changes")),
    ("moe/flips_update/<name>", "", "the same of one layer; these, too, with train.route_flips (docs/algorithms.md)",
     Curve("Health", "Routes that the update changes: <name>")),
    ("moe/first_flip/<name>", "", "share of sampled tokens whose lowest layer with such a flip is this, or `none`",
     Curve("Health", "Tokens by first such layer: <name>")),
    ("moe/aux_loss", "", "load-balancing loss of a micro-batch, without its coefficient, mean over layers; 1 is "
     "balanced", Curve("Health", "Expert load: loss of a micro-batch")),
    ("moe/seq_aux_loss", "", "the same of a sequence; these four only with a coefficient in learner.router",
     Curve("Health", "Expert load: loss of a sequence")),
    ("moe/global_aux_loss", "", "the same with the load of all ranks and of the optimizer step's micro-batches so far",
     Curve("Health", "Expert load: loss of all ranks")),
    ("moe/z_loss", "", "mean squared logsumexp of routers' logits, mean over layers",
     Curve("Health", "Routers' z-loss")),
    ("observer/<name>", "", "a metric of an installed package's observer, by the reduction that it names",
     Curve("Health", "Observer <name>")),
)  # fmt: skip
