"""The curves of a report: which metric has which title, in which section."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One chart: a metric, with a band (+- ``spread``, or ``low`` to ``high``; ``band`` names it) or a peak.

    A metric with ``<name>``, or with ``<k>`` too, makes a chart for each that a run has recorded.
    """

    title: str
    metric: str
    band: str = ""
    spread: str | None = None
    low: str | None = None
    high: str | None = None
    peak: str | None = None
    limits: tuple[float, float] | None = None
    warm_start: bool = False  # the warm start's rows come first, shaded
    hide_constant: bool = False  # no chart for a constant metric
    compared: bool = False  # only if several runs are compared


HEADLINES = (
    Curve(title="Held-out loss", metric="eval/loss"),
    Curve(title="Held-out accuracy", metric="eval/accuracy", limits=(0.0, 1.0), warm_start=True),
    Curve(title="Held-out samples without a reward", metric="eval/errors", hide_constant=True),
    Curve(title="Reward", metric="reward/mean", band=", mean ± standard deviation", spread="reward/std"),
)
FIRST = (
    *("tokens_per_second/rollout", "tokens_per_second/train", "memory/peak", "engine/healthy", "staleness/mean"),
    *("in_flight/completions", "idle/learner_fraction", "idle/engine_fraction"),
)
"""Metrics whose charts come first on the page of one run."""
SECTIONS: tuple[tuple[str, tuple[Curve, ...]], ...] = (
    (
        "Evaluation",
        (
            *(
                Curve(
                    title=f"Set <name>: {figure}@<k>",
                    metric=f"eval/<name>/{figure}_at_<k>",
                    band=", with its 95 % interval",
                    low=f"eval/<name>/{figure}_at_<k>/low",
                    high=f"eval/<name>/{figure}_at_<k>/high",
                    limits=(0.0, 1.0),
                )
                for figure in ("mean", "pass", "maj", "all")
            ),
            Curve(title="Set <name>: length of a sample", metric="eval/<name>/length"),
            Curve(title="Set <name>: truncated samples", metric="eval/<name>/truncated", hide_constant=True),
            Curve(title="Set <name>: samples without a reward", metric="eval/<name>/errors", hide_constant=True),
            Curve(title="Set <name>: seconds", metric="eval/<name>/seconds"),
            Curve(title="Evaluated by the step's own weights", metric="eval/own_version_fraction", hide_constant=True),
            Curve(title="Evaluations left out", metric="eval/skipped", hide_constant=True),
            Curve(title="Servers that evaluated alone", metric="eval/servers", hide_constant=True),
            Curve(title="Seconds until evaluating servers held the step's weights", metric="seconds/pin"),
        ),
    ),
    (
        "Policy",
        (
            Curve(title="Reward part <name>", metric="reward/part/<name>"),
            Curve(title="Turns of a trajectory", metric="environment/turns_mean", peak="environment/turns_max"),
            Curve(title="Rows of a trajectory", metric="environment/rows_mean", hide_constant=True),
            Curve(title="Tokens of rows over different ones", metric="environment/row_inflation", hide_constant=True),
            Curve(
                title="Turns that go on from an earlier one's row",
                metric="environment/kept_prefix_fraction",
                hide_constant=True,
            ),
            Curve(title="Rows begun: <name>", metric="environment/branches/<name>"),
            Curve(title="Tokens that a trajectory read", metric="environment/observation_tokens"),
            Curve(title="Share of tokens that were read", metric="environment/untrained_fraction"),
            Curve(title="Seconds of a trajectory", metric="environment/seconds_mean", peak="environment/seconds_p99"),
            Curve(title="Trajectories that ended: <name>", metric="environment/stop/<name>"),
            Curve(title="Calls of tools", metric="environment/tool_calls", hide_constant=True),
            Curve(title="Calls that cannot be read", metric="environment/bad_calls"),
            Curve(title="In place of trajectories that failed", metric="environment/spare", hide_constant=True),
            Curve(title="Of the environment: <name>", metric="environment/own/<name>"),
            Curve(title="Turns of a trajectory over HTTP", metric="endpoint/answered", hide_constant=True),
            Curve(title="Requests of a trajectory that were repeated", metric="endpoint/retried", hide_constant=True),
            Curve(title="Requests of a trajectory that were refused", metric="endpoint/refused", hide_constant=True),
            Curve(title="Turns asked for otherwise than sampled", metric="endpoint/overridden", hide_constant=True),
            Curve(
                title="Milliseconds of a turn in the endpoint",
                metric="endpoint/overhead_ms_p50",
                peak="endpoint/overhead_ms_p99",
            ),
            Curve(title="Prompts that have retired", metric="curriculum/retired", hide_constant=True),
            Curve(title="Pass rate of the prompts", metric="curriculum/mean_pass_rate"),
            Curve(title="Draws that were skipped", metric="curriculum/skipped", hide_constant=True),
            Curve(title="Source <name>: reward", metric="source/<name>/reward"),
            Curve(title="Source <name>: reward of all that was sampled", metric="source/<name>/sampled_reward"),
            Curve(title="Source <name>: groups of equal rewards", metric="source/<name>/zero_advantage"),
            Curve(title="Source <name>: response length", metric="source/<name>/length"),
            Curve(title="Source <name>: share of the groups", metric="source/<name>/share"),
            Curve(title="Source <name>: epochs", metric="source/<name>/epoch"),
            Curve(title="Entropy", metric="entropy"),
            Curve(title="KL from the old policy", metric="kl/old_policy"),
            Curve(title="KL at which a step ended", metric="kl/stopped_at"),
            Curve(title="Optimizer steps of a step", metric="steps/made"),
            Curve(
                title="Importance ratio: mean",
                metric="ratio/mean",
                band=", min to max",
                low="ratio/min",
                high="ratio/max",
            ),
            Curve(
                title="Importance ratio: median",
                metric="ratio/p50",
                band=", 1 % to 99 %",
                low="ratio/p01",
                high="ratio/p99",
            ),
            Curve(title="Effective sample size, of all", metric="ratio/effective_fraction"),
            Curve(title="Clip fraction", metric="clip_fraction"),
            Curve(title="Clipped with a ratio below 1", metric="clip_fraction/low", hide_constant=True),
            Curve(title="Clipped with a ratio above 1", metric="clip_fraction/high", hide_constant=True),
            Curve(title="Clip of a minibatch: lower limit", metric="balance/clip_low"),
            Curve(title="Clip of a minibatch: upper limit", metric="balance/clip_high"),
            Curve(
                title="Share of the loss of tokens of positive advantage",
                metric="balance/positive_share",
                limits=(0.0, 1.0),
            ),
            Curve(title="KL to the reference", metric="kl/reference"),
            Curve(title="Coefficient of the KL to the reference", metric="kl/coefficient", hide_constant=True),
            Curve(title="Age of the reference in steps", metric="kl/reference_age", hide_constant=True),
            Curve(title="Weight of the entropy bonus", metric="entropy/coefficient", hide_constant=True),
            Curve(title="Preference pairs: share with the right order", metric="preference/accuracy"),
            Curve(title="Preference pairs: margin", metric="preference/margin"),
            Curve(title="Preference pairs of a step", metric="preference/pairs"),
            Curve(title="Response length", metric="response/length_mean", peak="response/length_max"),
            Curve(title="Truncated responses", metric="response/truncated_fraction"),
            Curve(title="Responses ended by rollout.max_seconds", metric="response/late_fraction"),
            Curve(title="Responses whose thinking was interrupted", metric="response/interrupted_fraction"),
            Curve(title="Ratios beyond float32's range", metric="ratio/clamped_fraction", hide_constant=True),
            Curve(title="Reward of all that was sampled", metric="reward/sampled_mean"),
            Curve(title="Groups trained on", metric="groups/trained", hide_constant=True),
            Curve(title="Groups dropped", metric="groups/dropped", hide_constant=True),
            Curve(title="Groups of equal rewards left out", metric="groups/filtered", hide_constant=True),
            Curve(title="Rewards that failed", metric="reward/errors", hide_constant=True),
            Curve(title="Rewards that were late", metric="reward/late", hide_constant=True),
        ),
    ),
    (
        "Optimization",
        (
            Curve(title="Loss", metric="loss"),
            Curve(title="Gradient norm", metric="grad_norm"),
            Curve(title="Tokens that a choice trains on", metric="tokens/chosen_fraction", limits=(0.0, 1.0)),
            Curve(title="Optimizer steps left out", metric="steps/skipped", hide_constant=True),
            Curve(title="Learning rate", metric="learning_rate", hide_constant=True),
            Curve(title="Loss: KL term", metric="loss/kl"),
            Curve(title="Loss: NLL of right or better answers", metric="loss/nll"),
            Curve(
                title="Advantage: mean", metric="advantage/mean", band=" ± standard deviation", spread="advantage/std"
            ),
            Curve(title="Critic: explained variance", metric="critic/explained_variance"),
            Curve(title="Critic: loss", metric="critic/loss"),
            Curve(title="Critic: gradient norm", metric="critic/grad_norm"),
            Curve(title="Critic: mean value", metric="critic/value_mean"),
            Curve(title="Critic: clip fraction", metric="critic/clip_fraction", hide_constant=True),
            Curve(title="Critic: learning rate", metric="critic/learning_rate", hide_constant=True),
            Curve(title="Warm start: loss by supervised step", metric="warm_start/loss"),
            Curve(title="Held-out perplexity", metric="eval/perplexity"),
            Curve(title="Held-out pairs: share with the right order", metric="eval/preference_accuracy"),
            Curve(title="Held-out pairs: margin", metric="eval/preference_margin"),
            Curve(title="Score: mean", metric="reward_model/score_mean"),
            Curve(title="Learnt tokens of a step", metric="tokens/learnt"),
            Curve(title="Passes over the data", metric="data/epoch"),
            Curve(title="Sequences left out", metric="data/dropped", hide_constant=True),
            Curve(title="Sequences cut", metric="data/cut", hide_constant=True),
            Curve(title="Seconds of waiting for data", metric="data/seconds"),
        ),
    ),
    (
        "Health",
        (
            Curve(
                title="Train-rollout log-prob gap", metric="mismatch/logprob_abs_mean", peak="mismatch/logprob_abs_max"
            ),
            Curve(
                title="Log-prob gap: 90 %",
                metric="mismatch/logprob_abs_p90",
                band=", median to 99 %",
                low="mismatch/logprob_abs_p50",
                high="mismatch/logprob_abs_p99",
            ),
            Curve(title="Log-prob gap at tokens <name>", metric="mismatch/position/<name>"),
            Curve(title="Log-prob gap of the worst expert, over all", metric="mismatch/expert_worst"),
            Curve(title="Layer of the expert with the worst gap", metric="mismatch/expert_layer"),
            Curve(title="Number of the expert with the worst gap", metric="mismatch/expert_number"),
            Curve(title="KL, engine from learner", metric="kl/rollout"),
            Curve(title="KL, engine from learner, by k1", metric="mismatch/k1"),
            Curve(title="KL by k1 at staleness <name>", metric="mismatch/k1/<name>"),
            Curve(title="Importance ratio to the engine at staleness <name>", metric="mismatch/ratio/<name>"),
            Curve(title="Expert load, busiest over mean", metric="moe/load_imbalance"),
            Curve(title="Experts without tokens", metric="moe/dead_experts"),
            Curve(title="Routers' entropy, over the uniform one's", metric="moe/routing_entropy"),
            Curve(title="Tokens rerouted by replay", metric="moe/rerouted_fraction"),
            Curve(title="Routes unlike the engine's", metric="moe/flips_engine"),
            Curve(title="Routes unlike the engine's: <name>", metric="moe/flips_engine/<name>"),
            Curve(title="Routes that the update changes", metric="moe/flips_update"),
            Curve(title="Routes that the update changes: <name>", metric="moe/flips_update/<name>"),
            Curve(title="Tokens by first such layer: <name>", metric="moe/first_flip/<name>"),
            Curve(title="Ratios outside 1 ± 0.2", metric="ratio/outside"),
            Curve(title="Ratios outside 1 ± 0.2, first flip in <name>", metric="ratio/outside/<name>"),
            Curve(title="Expert load: loss of a micro-batch", metric="moe/aux_loss"),
            Curve(title="Expert load: loss of a sequence", metric="moe/seq_aux_loss"),
            Curve(title="Expert load: loss of all ranks", metric="moe/global_aux_loss"),
            Curve(title="Routers' z-loss", metric="moe/z_loss"),
            Curve(title="Draft layer's loss", metric="draft/loss"),
            Curve(title="Draft layer's proposals that are accepted", metric="draft/acceptance"),
            Curve(title="Draft layer's gradient norm", metric="draft/grad_norm"),
            Curve(title="Observer <name>", metric="observer/<name>"),
            Curve(title="Groups with equal rewards", metric="groups/zero_advantage_fraction"),
            Curve(title="Turns from a state that others share", metric="groups/shared_states"),
            Curve(title="Packing imbalance", metric="packing/imbalance"),
            Curve(title="Packing padding", metric="packing/padding_fraction"),
            Curve(title="Waves of a step", metric="waves/count"),
            Curve(title="Trained before the batch was whole", metric="waves/early_fraction"),
            Curve(title="Correction weight", metric="correction/weight_mean"),
            Curve(title="Tokens dropped by the correction", metric="correction/dropped_fraction"),
            Curve(title="Error of quantised weights", metric="weights/quantization_error"),
            Curve(title="Engine servers that serve", metric="engine/healthy", hide_constant=True),
            Curve(title="Engine server restarts", metric="engine/restarts", hide_constant=True),
            Curve(title="Staleness", metric="staleness/mean", peak="staleness/max", hide_constant=True),
            Curve(title="Staleness: 95 % of the completions", metric="staleness/p95", hide_constant=True),
            Curve(title="Staleness of a token", metric="staleness/tokens_mean", hide_constant=True),
            Curve(title="Share of completions of staleness <name>", metric="staleness/share/<name>"),
            Curve(title="How far sampling may be ahead", metric="staleness/allowed", hide_constant=True),
            Curve(title="Seconds of waiting for groups that are due", metric="wait/due_seconds", hide_constant=True),
            Curve(title="Seconds of spare slots: no more is admitted", metric="wait/admission_seconds"),
            Curve(title="Seconds from a group's sending to its step", metric="age/seconds_mean"),
            Curve(title="Completions in flight at the push", metric="in_flight/completions", hide_constant=True),
            Curve(title="Tokens in flight at the push", metric="in_flight/tokens", hide_constant=True),
            Curve(title="Tokens gone on from after a push", metric="in_flight/resumed_tokens", hide_constant=True),
            Curve(title="Tokens computed again after pushes", metric="in_flight/recomputed_tokens", hide_constant=True),
            Curve(title="Overlap of sampling and training", metric="overlap/fraction"),
            Curve(title="A step over its longer half", metric="overlap/stretch"),
            Curve(title="Learner idle: it waits for groups", metric="idle/learner_fraction"),
            Curve(title="Engines idle: slots unused", metric="idle/engine_fraction"),
            Curve(title="Prompts <name>", metric="ledger/<name>", hide_constant=True),
        ),
    ),
    (
        "Speed",
        (
            Curve(title="Seconds a step", metric="seconds/step", compared=True),
            Curve(title="Rollout speed", metric="tokens_per_second/rollout"),
            Curve(title="Training speed", metric="tokens_per_second/train"),
            Curve(title="Share of the GPUs' peak in training (MFU)", metric="mfu/train"),
            Curve(title="Seconds of weight digests", metric="seconds/verify"),
            Curve(title="Seconds for which a push paused sampling", metric="seconds/pause"),
            Curve(title="Bytes of a step's columns to ranks", metric="plane/bytes"),
            Curve(title="Seconds in which these were made", metric="plane/seconds"),
            Curve(title="Seconds for which a step waited for a save's copy", metric="checkpoint/stage_seconds"),
            Curve(title="Seconds in which a checkpoint was written", metric="checkpoint/write_seconds"),
            Curve(title="Passes, median and slowest rank", metric="seconds/passes_median", peak="seconds/passes_max"),
            Curve(title="A fixed computation, slowest rank over median", metric="ranks/slowness"),
            Curve(title="Longest that the controller served nothing, ms", metric="loop/longest_ms"),
            Curve(title="Slowest rank", metric="ranks/slowest"),
            Curve(title="Most memory that a rank has held", metric="memory/peak"),
        ),
    ),
)
