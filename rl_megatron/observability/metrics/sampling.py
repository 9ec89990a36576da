"""Metrics of what was sampled: its age, waits, the engine's log-probs, lengths, groups and the ledger."""

from __future__ import annotations

from rl_megatron.observability.metrics.curve import Curve, MetricTuples

SAMPLING: MetricTuples = (
    ("staleness/mean", "versions", "mean of the trained version minus the version that sampled, over the completions",
     Curve("Health", "Staleness", peak="staleness/max", hide_constant=True, first=True)),
    ("staleness/max", "versions", "greatest staleness of a completion"),
    ("staleness/p95", "versions", "95 % of the completions are at most so stale; this and the rest with max_staleness",
     Curve("Health", "Staleness: 95 % of the completions", hide_constant=True)),
    ("staleness/tokens_mean", "versions", "mean staleness of a token, each by the version that sampled it",
     Curve("Health", "Staleness of a token", hide_constant=True)),
    ("staleness/share/<name>", "", "share of the completions that are so stale: v0, v1, ... up to staleness/max",
     Curve("Health", "Share of completions of staleness <name>")),
    ("staleness/allowed", "versions", "how far sampling may be ahead at present; servers go from 1 to max_staleness",
     Curve("Health", "How far sampling may be ahead", hide_constant=True)),
    ("wait/due_seconds", "s", "part of seconds/rollout: waiting for groups that are due, with a batch of younger ones",
     Curve("Health", "Seconds of waiting for groups that are due", hide_constant=True)),
    ("wait/admission_seconds", "s", "since the previous row: fewer completions were in flight than servers have "
     "slots, as no more prompts were admitted; this and idle/engine_fraction only with max_staleness and servers "
     "that the run starts", Curve("Health", "Seconds of spare slots: no more is admitted")),
    ("age/seconds_mean", "s", "from the sending of a group to the step that takes it, mean; not over a resume",
     Curve("Health", "Seconds from a group's sending to its step")),
    ("in_flight/completions", "completions", "completions that were being sampled or scored at the push",
     Curve("Health", "Completions in flight at the push", hide_constant=True, first=True)),
    ("in_flight/tokens", "tokens", "sampled tokens of completions that the push met; only with "
     "rollout.server.running_requests=abort: else servers do not tell",
     Curve("Health", "Tokens in flight at the push", hide_constant=True)),
    ("in_flight/resumed_tokens", "tokens", "tokens of the step's completions from which servers went on after the "
     "last push that each met; this and the next only with max_staleness and servers",
     Curve("Health", "Tokens gone on from after a push", hide_constant=True)),
    ("in_flight/recomputed_tokens", "tokens", "tokens of the step's completions whose keys and values servers "
     "computed again, at each push that they met; prompts come on top; not with running_requests=keep_cache",
     Curve("Health", "Tokens computed again after pushes", hide_constant=True)),
    ("overlap/fraction", "", "0 where sampling and training follow each other, 0.5 where both are always at work",
     Curve("Health", "Overlap of sampling and training")),
    ("overlap/stretch", "", "the time since the previous row over that of the longer half: of the learner's work, "
     "pushes included, or of the sampling with all slots in use; 1 is best. Where both of the next are there, 1 / "
     "(1 - the lesser)", Curve("Health", "A step over its longer half")),
    ("idle/learner_fraction", "", "share of the time since the previous row for which the learner waited for groups; "
     "with max_staleness and servers", Curve("Health", "Learner idle: it waits for groups", first=True)),
    ("idle/engine_fraction", "", "share of the servers' slots without a completion, in the mean of that time",
     Curve("Health", "Engines idle: slots unused", first=True)),
    ("mismatch/logprob_abs_mean", "nats", "mean |learner - engine| log-prob of a sampled token, equal weights; all of "
     "mismatch/ are from before the update, and absent where the learner does not score the batch (docs/mismatch.md)",
     Curve("Health", "Train-rollout log-prob gap", peak="mismatch/logprob_abs_max")),
    ("mismatch/logprob_abs_max", "nats", "greatest such difference"),
    ("mismatch/logprob_abs_p50", "nats", "median of such differences"),
    ("mismatch/logprob_abs_p90", "nats", "90 % of the differences are below this",
     Curve("Health", "Log-prob gap: 90 %", band=", median to 99 %", low="mismatch/logprob_abs_p50",
           high="mismatch/logprob_abs_p99")),
    ("mismatch/logprob_abs_p99", "nats", "99 % of the differences are below this"),
    ("mismatch/k1", "nats", "k1 estimate of KL(engine || learner) per token: mean engine - learner log-prob",
     Curve("Health", "KL, engine from learner, by k1")),
    ("mismatch/k1/<name>", "nats", "the same of the tokens that are so stale: v0, v1, ...; this and the next with "
     "max_staleness", Curve("Health", "KL by k1 at staleness <name>")),
    ("mismatch/ratio/<name>", "", "mean importance ratio of these tokens, learner over engine; its expectation is 1, "
     "however stale they are, unless log-probs are wrong",
     Curve("Health", "Importance ratio to the engine at staleness <name>")),
    ("mismatch/position/<name>", "nats", "mean difference at these positions of the completions: t0 is the first "
     "token, then t1_7, t8_63, t64_511, t512_4095, t4096_up", Curve("Health", "Log-prob gap at tokens <name>")),
    ("mismatch/expert_worst", "", "the greatest mean difference over the tokens of one expert, over the mean of all "
     "tokens; of experts with 32 tokens or more, if the engine returns routes",
     Curve("Health", "Log-prob gap of the worst expert, over all")),
    ("mismatch/expert_layer", "", "that expert's layer, counted from 0 among the layers with experts",
     Curve("Health", "Layer of the expert with the worst gap")),
    ("mismatch/expert_number", "", "that expert's number in its layer",
     Curve("Health", "Number of the expert with the worst gap")),
    ("response/length_mean", "tokens", "mean length of a completion, stop token included",
     Curve("Policy", "Response length", peak="response/length_max")),
    ("response/length_max", "tokens", "longest completion"),
    ("response/truncated_fraction", "", "share of completions that reached rollout.max_new_tokens, or were ended late",
     Curve("Policy", "Truncated responses")),
    ("response/late_fraction", "", "share of completions that rollout.max_seconds ended",
     Curve("Policy", "Responses ended by rollout.max_seconds")),
    ("response/interrupted_fraction", "", "share of completions whose thinking rollout.interrupt ended by a text",
     Curve("Policy", "Responses whose thinking was interrupted")),
    ("groups/trained", "groups", "groups that the step trains on; 0 if it is skipped because there are none",
     Curve("Policy", "Groups trained on", hide_constant=True)),
    ("groups/dropped", "groups", "groups left out: failed rewards if the config says so, and `poison` prompts",
     Curve("Policy", "Groups dropped", hide_constant=True)),
    ("groups/filtered", "groups", "groups of equal rewards (of turns or parts, where these are compared), before the "
     "overlong penalty or after it, or of own advantages that are all 0, left out by rollout.dynamic_sampling",
     Curve("Policy", "Groups of equal rewards left out", hide_constant=True)),
    ("groups/zero_advantage_fraction", "", "share of groups whose rewards (of turns or parts, where these are "
     "compared) are all equal: no gradient where a group's mean is the baseline, but with a critic, another "
     "baseline or none, a KL in the reward, a teacher's distribution or algorithm.nll_coefficient",
     Curve("Health", "Groups with equal rewards")),
    ("groups/shared_states", "", "share of turns that began from the state of another turn of their group, the first "
     "turns among them; only with algorithm.turn_baseline=state",
     Curve("Health", "Turns from a state that others share")),
    ("ledger/<name>", "prompts", "prompts `drawn` since the run's start, and where they are after the push: `queued` "
     "(not sent), `in_flight` (being sampled or scored), `buffered` (scored), `trained`, or `dropped` (ledger.jsonl "
     "says when and why)", Curve("Health", "Prompts <name>", hide_constant=True)),
)  # fmt: skip
