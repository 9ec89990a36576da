"""Defines a metric, joins the rows of all subjects into one table, and checks rows of a run by it.

A name that is not in `METRICS` is an error, so docs/metrics.md (rendered from the table) is always complete.
"""

from __future__ import annotations

import difflib
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rl_megatron.feature import Curve, MetricTuples, features
from rl_megatron.observability.files import STEPS, JsonRow, JsonValue

COSTS: MetricTuples = (
    ("packing/imbalance", "", "work of the slowest rank at each micro-batch over the mean rank's; 1 is even",
     Curve("Health", "Packing imbalance")),
    ("packing/padding_fraction", "", "share of the packed positions that are padding",
     Curve("Health", "Padding")),
    ("weights/bytes", "bytes", "weight bytes that crossed a process boundary to the rollout engine"),
    ("weights/route", "", "how they got there, as text: file, direct, process_group (into engines in the learner's "
     "ranks); shared_file through a file system that nodes share"),
    ("weights/quantization_error", "", "largest relative error of a tensor that was quantized for engine servers, as "
     "Frobenius norms", Curve("Health", "Weight quantization error")),
    ("engine/healthy", "servers", "engine servers that serve after the step's push; only if servers sample",
     Curve("Health", "Healthy engine servers")),
    ("engine/restarts", "", "restarts of dead engine servers since the run was started",
     Curve("Health", "Engine server restarts")),
    ("tokens/rollout", "tokens", "tokens sampled for the step, also of groups and trajectories that are left out, and "
     "greedily; not of what was cut off before its answer came"),
    ("tokens/train", "tokens", "positions of the optimizer steps, prompts included, padding excluded"),
    ("tokens_per_second/rollout", "tokens/s", "of seconds/rollout; of seconds/step with train.max_staleness",
     Curve("Speed", "Sampling phase: tokens/s")),
    ("tokens_per_second/train", "tokens/s", "tokens/train over seconds/train",
     Curve("Speed", "Training phase: tokens/s")),
    ("flops/train", "FLOP", "FLOPs of the policy's model, and of a draft layer that is trained, in forward and "
     "backward over tokens/train, without what is computed again and gradients of frozen weights; those of sampling "
     "and scores are not counted (rl_megatron/training/flops.py)"),
    ("mfu/train", "", "flops/train over seconds/train at the bfloat16 peak of the policy's GPUs; only where that is "
     "known", Curve("Speed", "MFU of the training phase")),
    ("seconds/rollout", "s", "sampling and rewards"),
    ("seconds/logprobs", "s", "log-probs of the old policy by the learner, and of the new one if a feature asks"),
    ("seconds/reference", "s", "log-probs of the reference; on separate ranks, only the wait after seconds/logprobs"),
    ("seconds/values", "s", "values by the critic; on separate ranks, only the wait after the scores before it"),
    ("seconds/critic", "s", "forward, backward and optimizer of the critic's minibatches; on separate ranks, the wait "
     "after seconds/train"),
    ("seconds/train", "s", "forward, backward and optimizer of all minibatches"),
    ("seconds/weights", "s", "weight push to the rollout engine"),
    ("seconds/verify", "s", "part of seconds/weights: digests of the tensors sent and of those received, on the "
     "slowest rank", Curve("Speed", "Weight push: checksums")),
    ("seconds/pause", "s", "part of seconds/weights: the push paused sampling, on the server that it paused longest",
     Curve("Speed", "Weight push: sampling paused")),
    ("memory/peak", "bytes", "the most that a learner rank has held since its start: of its GPU as torch's allocator "
     "has it, of a CPU's resident memory; with two ranks or more",
     Curve("Speed", "Peak memory of a rank")),
    ("ranks/slowest", "rank", "the learner rank whose passes took longest, its waits included; log.txt names its node; "
     "with two ranks or more", Curve("Speed", "Slowest rank")),
    ("seconds/eval", "s", "held-out evaluation; only in rows that evaluated"),
    ("checkpoint/bytes", "bytes", "what ranks wrote into the last checkpoint; only in rows after it was written"),
    ("checkpoint/write_seconds", "s", "the slowest rank wrote into it, policy and critic together; in the same rows",
     Curve("Speed", "Checkpoint write time")),
    ("checkpoint/step", "", "step of the newest complete checkpoint; only in rows after it was completed"),
    ("seconds/checkpoint", "s", "training waited for checkpoints; only in rows after one was begun or written"),
    ("seconds/step", "s", "since the previous row: the step, its evaluation, the wait for checkpoints",
     Curve("Speed", "Step time", compared=True)),
    ("devices/<name>", "devices", "the role of this name held: GPUs, or on CPUs the cores that its ranks compute "
     "with; what learner and engines share is the learner's"),
    ("metrics/non_finite", "", "values of this row that were NaN or infinite and are null; only if there are any"),
)  # fmt: skip

LEARNING: MetricTuples = (
    ("step", "", "step of the job, 1 to train.steps; 0 for rows of the warm start and for an evaluation before the "
     "first step"),
    ("phase", "", "`warm_start` (supervised steps), the job's name, or `eval`: an evaluation of that step beside "
     "later ones"),
    ("warm_start/step", "", "supervised step, 1 to warm_start.steps; 0 for the evaluation before the first"),
    ("warm_start/loss", "nats", "mean cross-entropy per supervised token",
     Curve("Optimization", "Warm-start loss")),
    ("eval/loss", "nats", "loss of held-out rows, of jobs on written text: of job=sft the mean per learned token",
     Curve("Headlines", "Held-out loss")),
    ("eval/perplexity", "", "exponential of eval/loss, with job=sft", Curve("Optimization", "Held-out perplexity")),
    ("eval/preference_accuracy", "", "preference/accuracy of held-out pairs or answers",
     Curve("Optimization", "Held-out preference accuracy")),
    ("eval/preference_margin", "", "preference/margin of held-out pairs or answers",
     Curve("Optimization", "Held-out preference margin")),
    ("data/epoch", "", "passes over the data that were trained on; of a mixture, draws by the rows of all sources",
     Curve("Optimization", "Epochs")),
    ("data/dropped", "sequences", "of the step, left out because they, or the other one of their pair, are longer "
     "than max_tokens or refused (on_refused), and rows without a turn to learn; at the first step also those that "
     "were left out as .jsonl files were read", Curve("Optimization", "Sequences dropped")),
    ("data/truncated", "sequences", "of the step, trained on without their tokens beyond sft.max_tokens",
     Curve("Optimization", "Sequences truncated")),
    ("reward/mean", "", "mean reward of the step's completions",
     Curve("Headlines", "Reward", band=", mean ± standard deviation", spread="reward/std")),
    ("reward/std", "", "standard deviation of the step's rewards, over all completions"),
    ("reward/sampled_mean", "", "mean reward of all sampled completions, including groups that are left out later",
     Curve("Policy", "Reward before filtering")),
    ("reward/part/<name>", "", "unweighted mean of that part of reward.parts, over the completions of "
     "reward/sampled_mean whose reward has it", Curve("Policy", "Reward part <name>")),
    ("reward/errors", "completions", "completions whose reward raised, timed out or was not finite, and trajectories "
     "whose environment failed", Curve("Policy", "Reward errors")),
    ("reward/timeouts", "completions", "part of reward/errors: those that took longer than reward.timeout_seconds, or "
     "than an environment's limits", Curve("Policy", "Reward timeouts")),
    ("source/<name>/reward", "", "reward/mean of that source of data.sources; this and the rest only with a mixture",
     Curve("Policy", "Source <name>: reward")),
    ("source/<name>/zero_advantage", "", "groups/zero_advantage_fraction of that source",
     Curve("Policy", "Source <name>: groups without a gradient")),
    ("source/<name>/share", "", "share of the groups trained on that are of that source",
     Curve("Policy", "Source <name>: share of the groups")),
    ("source/<name>/epoch", "", "passes over that source's prompts that were drawn",
     Curve("Policy", "Source <name>: epochs")),
    ("curriculum/retired", "prompts", "prompts that are drawn no more for their pass rate; this and the rest only "
     "with data.curriculum", Curve("Policy", "Retired prompts")),
    ("curriculum/mean_pass_rate", "", "mean of the prompts' pass rates, of those that are known",
     Curve("Policy", "Pass rate of prompts")),
    ("eval/accuracy", "", "share of held-out prompts whose reward is at least eval.success_reward; of eval.sets the "
     "first", Curve("Headlines", "Held-out accuracy", limits=(0.0, 1.0), warm_start=True)),
    ("eval/errors", "completions", "samples of eval/accuracy without a finite reward; they count as wrong",
     Curve("Headlines", "Held-out reward errors")),
    ("eval/current_version_fraction", "", "share of an evaluation's tokens by the weights of its step, with "
     "eval.mode=background", Curve("Evaluation", "Share evaluated by the step's weights")),
    ("eval/<name>/mean_at_<k>", "", "mean@k of that set of eval.sets: mean over problems of the share of k samples "
     "right", Curve("Evaluation", "Set <name>: mean@<k>", limits=(0.0, 1.0))),
    ("eval/<name>/pass_at_<k>", "", "chance that one of k samples is right, by the unbiased estimate (pass_at)",
     Curve("Evaluation", "Set <name>: pass@<k>", limits=(0.0, 1.0))),
    ("eval/<name>/maj_at_<k>", "", "share of problems whose most frequent answer of k samples is right; ties in part",
     Curve("Evaluation", "Set <name>: maj@<k>", limits=(0.0, 1.0))),
    ("eval/<name>/length", "tokens", "mean length of a sample of that set, all its turns together; of prompts whose "
     "samples are all there", Curve("Evaluation", "Set <name>: response length")),
    ("eval/<name>/truncated", "", "share of these samples of which a turn reached max_new_tokens",
     Curve("Evaluation", "Set <name>: truncated responses")),
    ("eval/<name>/errors", "completions", "its samples without a finite reward; they count as wrong",
     Curve("Evaluation", "Set <name>: reward errors")),
    ("loss", "", "policy loss under the algorithm's aggregation, mean over the step's minibatches",
     Curve("Optimization", "Loss")),
    ("grad_norm", "", "global L2 norm of the gradient before clipping, mean over the minibatches",
     Curve("Optimization", "Gradient norm")),
    ("steps/skipped", "steps", "optimizer steps skipped because their gradient was not finite",
     Curve("Optimization", "Optimizer steps skipped")),
    ("steps/completed", "steps", "optimizer steps of the policy, without those that algorithm.old_kl_limit left out; "
     "only with it", Curve("Policy", "Optimizer steps per step")),
    ("learning_rate", "", "learning rate of the step; 0 while the critic trains alone",
     Curve("Optimization", "Learning rate")),
    ("advantage/mean", "", "mean advantage of a trained token",
     Curve("Optimization", "Advantage", band=" ± standard deviation", spread="advantage/std")),
    ("advantage/std", "", "standard deviation of the advantages of trained tokens"),
    ("loss/kl", "nats", "the KL term's part of `loss`, coefficient included; only if the loss has one",
     Curve("Optimization", "KL loss")),
    ("loss/nll", "nats", "the part of `loss` of right or better answers' negative log-likelihood; only if it has one",
     Curve("Optimization", "NLL loss")),
    ("kl/reference", "nats", "KL(old || reference) by algorithm.kl.estimator: completions' mean of their tokens' mean; "
     "with dpo.loss=kto the z0 of the step's loss, a mean of sums",
     Curve("Policy", "KL to reference")),
    ("kl/old_policy", "nats", "KL(old || current) per token: k3 estimate from the samples, each before its "
     "minibatch's step", Curve("Policy", "KL to old policy")),
    ("kl/stopped_at", "nats", "kl/old_policy of the minibatch at which it passed algorithm.old_kl_limit; only then",
     Curve("Policy", "KL at early stop")),
    ("kl/rollout", "nats", "KL(engine || learner) per token before the update: k3 estimate; where there is mismatch/k1",
     Curve("Health", "KL, engine to learner (k3)")),
    ("entropy", "nats", "mean entropy of the policy's next-token distribution at sampled positions",
     Curve("Policy", "Entropy")),
    ("clip_fraction", "", "share of tokens (of sequences, for a sequence ratio) whose gradient the clip removes, or a "
     "cap of the ratio makes another (cispo, scalerl, topr, dppo_tv, dppo_kl, ce_gppo); none of advantage 0",
     Curve("Policy", "Clip fraction")),
    ("clip_fraction/low", "", "the part of clip_fraction with a ratio below 1",
     Curve("Policy", "Clip fraction, ratio below 1")),
    ("clip_fraction/high", "", "the part of clip_fraction with a ratio of 1 or above",
     Curve("Policy", "Clip fraction, ratio above 1")),
    ("ratio/mean", "", "mean importance ratio, current over old policy, at the algorithm's level",
     Curve("Policy", "Importance ratio", others=("ratio/max",))),
    ("ratio/max", "", "greatest importance ratio of the step"),
    ("ratio/effective_fraction", "", "effective sample size over the number of samples, mean(ratio)^2 / mean(ratio^2)",
     Curve("Policy", "Effective sample size, share")),
    ("correction/weight_mean", "", "mean importance weight, learner over engine, if the loss corrects the mismatch",
     Curve("Health", "Rollout correction weight")),
    ("correction/dropped_fraction", "", "share of tokens whose correction weight is 0",
     Curve("Health", "Tokens dropped by rollout correction")),
    ("tokens/chosen_fraction", "", "share of a minibatch's tokens that algorithm.tokens.choose chose",
     Curve("Optimization", "Share of tokens trained on", limits=(0.0, 1.0))),
    ("demonstration/share", "", "share of the trained tokens that are of demonstrations; this and the next two only "
     "with algorithm.demonstration_gamma", Curve("Policy", "Share of demonstration tokens", limits=(0.0, 1.0))),
    ("demonstration/probability", "", "mean probability that the policy gives a token of a demonstration, before its "
     "minibatch's step", Curve("Policy", "Probability of demonstration tokens", limits=(0.0, 1.0))),
    ("demonstration/reward", "", "mean reward of the step's demonstrations",
     Curve("Policy", "Reward of demonstrations")),
    ("preference/accuracy", "", "share of pairs, or single answers, whose margin is above 0",
     Curve("Policy", "Preference accuracy")),
    ("reward_model/score_mean", "", "mean score of the texts of the step, with job=reward_model",
     Curve("Optimization", "Reward model score")),
    ("preference/margin", "nats", "mean of beta * (log-ratio to the reference, or without one log-prob, of the chosen "
     "minus that of the rejected); of a reward model the difference of their scores; with dpo.loss=kto the mean over "
     "answers of beta * (log-ratio - z0), negated for undesirable ones",
     Curve("Policy", "Preference margin")),
    ("critic/loss", "", "value loss, half a squared error, mean over the minibatches",
     Curve("Optimization", "Critic loss")),
    ("critic/grad_norm", "", "global L2 norm of the critic's gradient before clipping",
     Curve("Optimization", "Critic gradient norm")),
    ("critic/value_mean", "", "mean value of a trained position", Curve("Optimization", "Critic value")),
    ("critic/clip_fraction", "", "share of tokens whose clipped value (algorithm.critic.clip) gives the larger loss",
     Curve("Optimization", "Critic clip fraction")),
    ("critic/explained_variance", "", "1 - Var(returns - values) / Var(returns) before the update: 1 is perfect",
     Curve("Optimization", "Critic explained variance")),
)  # fmt: skip


EXPERTS: MetricTuples = (
    ("moe/load_imbalance", "", "tokens of the busiest expert over the mean expert, in the worst layer; 1 is balanced",
     Curve("Health", "Expert load imbalance")),
    ("moe/dead_experts", "", "share of experts without a token in an optimizer step, mean over layers",
     Curve("Health", "Dead experts")),
    ("observer/<name>", "", "a metric of an installed package's observer, by the reduction that it names",
     Curve("Health", "Observer <name>")),
)  # fmt: skip


ENVIRONMENTS: MetricTuples = (
    ("environment/turns_mean", "turns", "mean over trajectories, with environment.function as all that follow",
     Curve("Policy", "Turns per trajectory")),
    ("environment/branches/<name>", "rows", "rows of a trajectory, mean, that began for this reason: the template "
     "drops `thinking`, shows the `context` or a turn's `closing` token otherwise, or `refused` the turn; the "
     "history was `edited` in what the template shows, or asked `again`", Curve("Policy", "New sequences: <name>")),
    ("environment/seconds_mean", "s", "mean duration of a trajectory, sampling included",
     Curve("Policy", "Trajectory time")),
    ("environment/tool_calls", "calls", "calls of tools in a trajectory that were read, mean",
     Curve("Policy", "Tool calls per trajectory")),
    ("environment/bad_calls", "turns", "turns of a trajectory with a call that cannot be read, mean",
     Curve("Policy", "Invalid tool calls")),
    ("environment/stop/<name>", "", "share of trajectories that ended so: `done` (by themselves), `length` (a cut "
     "turn), `turns`, `tokens` or `seconds` (its limits), `bad_call` (a turn that the template "
     "refuses), `environment_error` (with the reward of environment.on_error), or `abandoned`",
     Curve("Policy", "Stop reason: <name>")),
    ("environment/own/<name>", "", "mean over trajectories of a metric that the environment's steps gave, added up",
     Curve("Policy", "Environment: <name>")),
    ("endpoint/answered", "turns", "that an agent's clients got over HTTP, mean over trajectories with such clients",
     Curve("Policy", "Turns per trajectory over HTTP")),
    ("endpoint/refused", "requests", "of a trajectory that were refused, mean",
     Curve("Policy", "Refused requests per trajectory")),
)  # fmt: skip


SAMPLING: MetricTuples = (
    ("staleness/mean", "versions", "mean of the trained version minus the version that sampled, over the completions",
     Curve("Health", "Staleness", others=("staleness/max",))),
    ("staleness/max", "versions", "greatest staleness of a completion"),
    ("staleness/share/<name>", "", "share of the completions that are so stale: v0, v1, ... up to staleness/max",
     Curve("Health", "Completions of staleness <name>")),
    ("staleness/allowed", "versions", "how far sampling may be ahead at present; servers go from 1 to max_staleness",
     Curve("Health", "Allowed staleness")),
    ("in_flight/completions", "completions", "completions that were being sampled or scored at the push",
     Curve("Health", "Completions in flight")),
    ("idle/learner_fraction", "", "share of the time since the previous row for which the learner waited for groups; "
     "with max_staleness and servers", Curve("Health", "Learner idle")),
    ("idle/engine_fraction", "", "share of the servers' slots without a completion, in the mean of that time",
     Curve("Health", "Engines idle")),
    ("mismatch/logprob_abs_mean", "nats", "mean |learner - engine| log-prob of a sampled token, equal weights; all of "
     "mismatch/ are from before the update, and absent if the learner does not score it (docs/troubleshooting.md)",
     Curve("Health", "Log-prob mismatch", others=("mismatch/logprob_abs_max",))),
    ("mismatch/logprob_abs_max", "nats", "greatest such difference"),
    ("mismatch/k1", "nats", "k1 estimate of KL(engine || learner) per token: mean engine - learner log-prob",
     Curve("Health", "KL, engine to learner (k1)")),
    ("response/length_mean", "tokens", "mean length of a completion, stop token included",
     Curve("Policy", "Response length", others=("response/length_max",))),
    ("response/length_max", "tokens", "longest completion"),
    ("response/truncated_fraction", "", "share of completions that reached rollout.max_new_tokens, or were ended late",
     Curve("Policy", "Truncated responses")),
    ("groups/trained", "groups", "groups that the step trains on; 0 if it is skipped because there are none",
     Curve("Policy", "Groups trained on")),
    ("groups/dropped", "groups", "groups left out: failed rewards if the config says so, and `poison` prompts",
     Curve("Policy", "Groups dropped")),
    ("groups/filtered", "groups", "groups of equal rewards (of turns or parts, where these are compared), before the "
     "overlong penalty or after it, or of own advantages that are all 0, left out by rollout.dynamic_sampling",
     Curve("Policy", "Groups filtered")),
    ("groups/zero_advantage_fraction", "", "share of groups whose rewards (of turns or parts, where these are "
     "compared) are all equal: no gradient where a group's mean is the baseline, but with a critic, another "
     "baseline or none, a KL in the reward, a teacher's distribution or algorithm.nll_coefficient",
     Curve("Policy", "Groups without a gradient", compared=True)),
    ("groups/all_correct", "", "share of sampled groups with rewards of at least eval.success_reward in all "
     "completions; before rollout.dynamic_sampling filters groups; groups with a failed reward do not count",
     Curve("Policy", "Groups with all completions correct", limits=(0.0, 1.0), compared=True)),
    ("groups/none_correct", "", "share of sampled groups without such a reward, counted in the same way; in a reward "
     "with partial credit these groups may still have a gradient",
     Curve("Policy", "Groups with no completion correct", limits=(0.0, 1.0), compared=True)),
    ("ledger/<name>", "prompts", "prompts `drawn` since the run's start, and where they are after the push: `queued` "
     "(not sent), `in_flight` (being sampled or scored), `buffered` (scored), `trained`, or `dropped` (ledger.jsonl "
     "says when and why)", Curve("Health", "Prompts <name>")),
)  # fmt: skip


logger = logging.getLogger(__name__)


_TIMED_UNITS = ("s", "ms", "tokens/s", "rank", "s/s")
_TIMED = ("idle/", "checkpoint/", "memory/", "mfu/", "endpoint/", "devices/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Documented:
    """One documented metric, or a family with a ``<name>`` or ``<k>``. ``unit`` is "" for a ratio or count."""

    name: str
    unit: str
    meaning: str
    curve: Curve | None

    @property
    def is_timing(self) -> bool:
        """True if it depends on the clock, on when the run saved, on devices and what ranks hold or on connections, and
        not on the data alone."""
        return self.unit in _TIMED_UNITS or self.name.startswith(_TIMED)


_OF_FEATURES = tuple(row for feature in features().values() for row in feature.metrics)

METRICS: Mapping[str, Documented] = {
    name: Documented(name=name, unit=unit, meaning=meaning, curve=replace(drawn[0], metric=name) if drawn else None)
    for name, unit, meaning, *drawn in (*LEARNING, *_OF_FEATURES, *SAMPLING, *ENVIRONMENTS, *EXPERTS, *COSTS)
}

_FAMILIES = [
    (re.compile(re.escape(name).replace("<name>", "[a-z][a-z0-9_]*").replace("<k>", "[1-9][0-9]*")), metric)
    for name, metric in METRICS.items()
    if "<" in name
]

RENAMED: Mapping[str, str] = {
    "data/cut": "data/truncated",
    "eval/own_version_fraction": "eval/current_version_fraction",
    "reward/late": "reward/timeouts",
    "steps/made": "steps/completed",
}
"""Name in rows of older versions -> name."""

PHASES = ("warm_start", *STEPS, "eval")

PHASE_SECONDS = ("rollout", "logprobs", "reference", "values", "train", "critic", "weights", "eval", "checkpoint")
"""The parts of ``seconds/step``, in the order in which a step runs them."""


def documented(name: str) -> Documented | None:
    """Returns the table's row for this name; for ``reward/part/style`` it is ``reward/part/<name>``."""
    if "<" in name:
        return None
    return METRICS.get(name) or next((metric for family, metric in _FAMILIES if family.fullmatch(name)), None)


def describe_unknown(name: str) -> str:
    """Returns what is wrong with a name that is not documented: the name that replaced it, or where the names are."""
    return f"no such metric; {f'it is called {RENAMED[name]}' if name in RENAMED else 'docs/metrics.md lists them'}"


def deterministic(row: JsonRow) -> dict[str, JsonValue]:
    """Returns the row without metrics that depend on the clock: equal runs give rows equal to the bit."""
    return {name: value for name, value in row.items() if not _row_of(name).is_timing}


def render_docs() -> str:
    """Renders docs/metrics.md from the table."""
    head = f"""# Metrics

`runs/<name>/metrics.jsonl` holds one JSON object per line: one for each recorded supervised step of the warm start,
then one for each step of the job. Names are stable. A value that was NaN or infinite is `null`. TensorBoard tags and
W&B keys are the same names, prefixed by `warm_start/` in rows of the warm start. Log-probs, entropies and KLs are in
nats. Metrics in {", ".join(_TIMED_UNITS)}, and those of {", ".join(f"`{name}`" for name in _TIMED)}
depend on the clock, on when the run saved, on devices and what ranks hold, or on connections. Equal runs have equal
values of all others, to the bit, unless servers sample ahead: then the order in which they answer changes them.

Means and shares of tokens, sequences and pairs are over all minibatches of the step together, unless the meaning names
minibatches.

A metric that a run cannot have is absent, not 0: those "with max_staleness" if train.max_staleness is 0, those of
servers if the learner's processes sample.

| name | unit | meaning |
|---|---|---|
"""
    rows = ((m.name, m.unit or "-", m.meaning.replace("|", r"\|")) for m in METRICS.values())
    return head + "".join(f"| `{name}` | {unit} | {meaning} |\n" for name, unit, meaning in rows)


def checked_row(row: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Checks a row and makes it ready for JSON: NaN and infinity become None, are counted and logged.

    Raises ValueError for a name that is not in the table and for a row without ``step`` and ``phase``.
    """
    out: dict[str, JsonValue] = {}
    bad = []
    for name, value in row.items():
        _row_of(name)
        if isinstance(value, float) and not math.isfinite(value):
            bad.append(f"{name}={value}")
            out[name] = None
        else:
            out[name] = value
    if type(out.get("step")) is not int or out.get("phase") not in PHASES:
        raise ValueError(f"a metrics row needs an integer step and a phase of {PHASES}; got {list(row)}")
    if bad:
        logger.warning("step %s (%s): not finite: %s", out["step"], out["phase"], ", ".join(bad))
        out["metrics/non_finite"] = len(bad)
    return out


def _row_of(name: str) -> Documented:
    metric = documented(name)
    if metric is None:
        near = difflib.get_close_matches(name, METRICS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"metric {name!r} is not documented{hint} Add a new metric to observability/metrics.py")
    return metric


if __name__ == "__main__":
    print(render_docs(), end="")
