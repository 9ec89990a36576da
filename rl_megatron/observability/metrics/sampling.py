"""Metrics of what was sampled: its age, waits, the engine's log-probs, lengths, groups and the ledger."""

from __future__ import annotations

SAMPLING = (
    ("staleness/mean", "versions", "mean of the trained version minus the version that sampled, over the completions"),
    ("staleness/max", "versions", "greatest staleness of a completion"),
    ("staleness/p95", "versions", "95 % of the completions are at most so stale; this and the rest with max_staleness"),
    ("staleness/tokens_mean", "versions", "mean staleness of a token, each by the version that sampled it"),
    ("staleness/share/<name>", "", "share of the completions that are so stale: v0, v1, ... up to staleness/max"),
    ("staleness/allowed", "versions", "how far sampling may be ahead at present; servers go from 1 to max_staleness"),
    ("wait/due_seconds", "s", "part of seconds/rollout: waiting for groups that are due, with a batch of younger ones"),
    (
        "wait/admission_seconds",
        "s",
        "since the previous row: fewer completions were in flight than servers have slots, as no more prompts were "
        "admitted; this and idle/engine_fraction only with max_staleness and servers that the run starts",
    ),
    ("age/seconds_mean", "s", "from the sending of a group to the step that takes it, mean; not over a resume"),
    ("in_flight/completions", "completions", "completions that were being sampled or scored at the push"),
    (
        "in_flight/tokens",
        "tokens",
        "sampled tokens of completions that the push met; only with rollout.server.running_requests=abort: else "
        "servers do not tell",
    ),
    (
        "in_flight/resumed_tokens",
        "tokens",
        "tokens of the step's completions from which servers went on after the last push that each met; this and the "
        "next only with max_staleness and servers",
    ),
    (
        "in_flight/recomputed_tokens",
        "tokens",
        "tokens of the step's completions whose keys and values servers computed again, at each push that they met; "
        "prompts come on top; not with running_requests=keep_cache",
    ),
    ("overlap/fraction", "", "0 where sampling and training follow each other, 0.5 where both are always at work"),
    (
        "overlap/stretch",
        "",
        "the time since the previous row over that of the longer half: of the learner's work, pushes included, or of "
        "the sampling with all slots in use; 1 is best. Where both of the next are there, 1 / (1 - the lesser)",
    ),
    (
        "idle/learner_fraction",
        "",
        "share of the time since the previous row for which the learner waited for groups; with max_staleness and "
        "servers",
    ),
    ("idle/engine_fraction", "", "share of the servers' slots without a completion, in the mean of that time"),
    (
        "mismatch/logprob_abs_mean",
        "nats",
        "mean |learner - engine| log-prob of a sampled token, equal weights; all of mismatch/ are from "
        "before the update, and absent where the learner does not score the batch (docs/mismatch.md)",
    ),
    ("mismatch/logprob_abs_max", "nats", "greatest such difference"),
    ("mismatch/logprob_abs_p50", "nats", "median of such differences"),
    ("mismatch/logprob_abs_p90", "nats", "90 % of the differences are below this"),
    ("mismatch/logprob_abs_p99", "nats", "99 % of the differences are below this"),
    ("mismatch/k1", "nats", "k1 estimate of KL(engine || learner) per token: mean engine - learner log-prob"),
    (
        "mismatch/k1/<name>",
        "nats",
        "the same of the tokens that are so stale: v0, v1, ...; this and the next with max_staleness",
    ),
    (
        "mismatch/ratio/<name>",
        "",
        "mean importance ratio of these tokens, learner over engine; its expectation is 1, however stale they are, "
        "unless log-probs are wrong",
    ),
    (
        "mismatch/position/<name>",
        "nats",
        "mean difference at these positions of the completions: t0 is the first token, then t1_7, t8_63, t64_511, "
        "t512_4095, t4096_up",
    ),
    (
        "mismatch/expert_worst",
        "",
        "the greatest mean difference over the tokens of one expert, over the mean of all tokens; of experts with 32 "
        "tokens or more, if the engine returns routes",
    ),
    ("mismatch/expert_layer", "", "that expert's layer, counted from 0 among the layers with experts"),
    ("mismatch/expert_number", "", "that expert's number in its layer"),
    ("response/length_mean", "tokens", "mean length of a completion, stop token included"),
    ("response/length_max", "tokens", "longest completion"),
    ("response/truncated_fraction", "", "share of completions that reached rollout.max_new_tokens, or were ended late"),
    ("response/late_fraction", "", "share of completions that rollout.max_seconds ended"),
    ("response/interrupted_fraction", "", "share of completions whose thinking rollout.interrupt ended by a text"),
    ("groups/trained", "groups", "groups that the step trains on; 0 if it is skipped because there are none"),
    ("groups/dropped", "groups", "groups left out: failed rewards if the config says so, and `poison` prompts"),
    (
        "groups/filtered",
        "groups",
        "groups of equal rewards (of turns or parts, where these are compared), before the overlong penalty or after "
        "it, or of own advantages that are all 0, left out by rollout.dynamic_sampling",
    ),
    (
        "groups/zero_advantage_fraction",
        "",
        "share of groups whose rewards (of turns or parts, where these are compared) are all equal: no gradient where "
        "a group's mean is the baseline, but with a critic, another baseline or none, a KL in the reward, a teacher's "
        "distribution or algorithm.nll_coefficient",
    ),
    (
        "groups/shared_states",
        "",
        "share of turns that began from the state of another turn of their group, the first turns among them; only "
        "with algorithm.turn_baseline=state",
    ),
    (
        "ledger/<name>",
        "prompts",
        "prompts `drawn` since the run's start, and where they are after the push: `queued` (not sent), `in_flight` "
        "(being sampled or scored), `buffered` (scored), `trained`, or `dropped` (ledger.jsonl says when and why)",
    ),
)
