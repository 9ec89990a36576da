"""Metrics of trajectories that an environment or an agent leads."""

from __future__ import annotations

from rl_megatron.observability.metrics.curve import Curve, MetricTuples

ENVIRONMENTS: MetricTuples = (
    ("environment/turns_mean", "turns", "mean over trajectories, with environment.function as all that follow",
     Curve("Policy", "Turns of a trajectory", peak="environment/turns_max")),
    ("environment/turns_max", "turns", "most of a trajectory"),
    ("environment/rows_mean", "rows", "rows to train on of a trajectory; 1 where every context goes on from the last",
     Curve("Policy", "Rows of a trajectory", hide_constant=True)),
    ("environment/row_inflation", "", "tokens of all rows over those that differ, where what a trajectory's rows "
     "begin with in common counts once: what training on branches costs",
     Curve("Policy", "Tokens of rows over different ones", hide_constant=True)),
    ("environment/branches/<name>", "rows", "rows of a trajectory, mean, that began for this reason: the template "
     "drops `thinking`, shows the `context` or a turn's `closing` token otherwise, or `refused` the turn; the "
     "history was `edited` in what the template shows, or asked `again`", Curve("Policy", "Rows begun: <name>")),
    ("environment/kept_prefix_fraction", "", "of turns after a trajectory's first, those whose prompt begins with an "
     "earlier turn's row, token by token",
     Curve("Policy", "Turns that go on from an earlier one's row", hide_constant=True)),
    ("environment/observation_tokens", "tokens", "tokens of a trajectory that it read after its first prompt, mean; "
     "of a later row, those after what it begins with in common with an earlier one",
     Curve("Policy", "Tokens that a trajectory read")),
    ("environment/untrained_fraction", "", "these over all tokens after first prompts; they are never trained on",
     Curve("Policy", "Share of tokens that were read")),
    ("environment/seconds_mean", "s", "mean duration of a trajectory, sampling included",
     Curve("Policy", "Seconds of a trajectory", peak="environment/seconds_p99")),
    ("environment/seconds_p99", "s", "its 99th percentile"),
    ("environment/tool_calls", "calls", "calls of tools in a trajectory that were read, mean",
     Curve("Policy", "Calls of tools", hide_constant=True)),
    ("environment/bad_calls", "turns", "turns of a trajectory with a call that cannot be read, mean",
     Curve("Policy", "Calls that cannot be read")),
    ("environment/stop/<name>", "", "share of trajectories that ended so: `done` (by themselves), `length` (a cut "
     "turn), `turns`, `tokens` or `seconds` (its limits), `bad_call` (a turn that the template "
     "refuses), `environment_error` (with the reward of environment.on_error), or `abandoned`",
     Curve("Policy", "Trajectories that ended: <name>")),
    ("environment/own/<name>", "", "mean over trajectories of a metric that the environment's steps gave, added up",
     Curve("Policy", "Of the environment: <name>")),
    ("endpoint/answered", "turns", "that an agent's clients got over HTTP, mean over trajectories with such clients",
     Curve("Policy", "Turns of a trajectory over HTTP", hide_constant=True)),
    ("endpoint/retried", "requests", "of a trajectory that got a turn which was sampled for an earlier one, mean",
     Curve("Policy", "Requests of a trajectory that were repeated", hide_constant=True)),
    ("endpoint/refused", "requests", "of a trajectory that were refused, mean",
     Curve("Policy", "Requests of a trajectory that were refused", hide_constant=True)),
    ("endpoint/overridden", "turns", "of a trajectory whose client asked for another temperature or top_p, mean",
     Curve("Policy", "Turns asked for otherwise than sampled", hide_constant=True)),
    ("endpoint/overhead_ms_p50", "ms", "of a turn over HTTP, median: from its request's last byte to its answer, less "
     "what it waited for the turn before it and for the engine; what other work of the controller held it up is in "
     "it", Curve("Policy", "Milliseconds of a turn in the endpoint", peak="endpoint/overhead_ms_p99")),
    ("endpoint/overhead_ms_p99", "ms", "its 99th percentile"),
)  # fmt: skip
