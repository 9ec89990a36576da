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
    ("packing/imbalance", "", "work of the slowest rank in each micro-batch divided by the mean over ranks; 1 is "
     "balanced", Curve("Health", "Packing imbalance")),
    ("packing/padding_fraction", "", "share of packed positions that are padding", Curve("Health", "Padding")),
    ("weights/bytes", "bytes", "bytes of weights sent across a process boundary to the engine"),
    ("weights/route", "", "how the weights reached the engine, as text: file, direct, process_group (to engines in the "
     "learner's ranks) or shared_file (through a file system that nodes share)"),
    ("weights/quantization_error", "", "largest relative error of a tensor quantized for engine servers, by Frobenius "
     "norms", Curve("Health", "Weight quantization error")),
    ("engine/healthy", "servers", "engine servers that serve after the step's push; only if servers sample",
     Curve("Health", "Healthy engine servers")),
    ("engine/restarts", "", "restarts of failed engine servers since the run was started",
     Curve("Health", "Engine server restarts")),
    ("tokens/rollout", "tokens", "tokens sampled for the step, including greedy completions and dropped groups and "
     "trajectories, but not requests cut off before their response"),
    ("tokens/train", "tokens", "positions in the optimizer steps, with prompts and without padding"),
    ("tokens_per_second/rollout", "tokens/s", "tokens/rollout divided by seconds/rollout, or by seconds/step with "
     "train.max_staleness", Curve("Speed", "Sampling phase: tokens/s")),
    ("tokens_per_second/train", "tokens/s", "tokens/train divided by seconds/train",
     Curve("Speed", "Training phase: tokens/s")),
    ("flops/train", "FLOP", "FLOPs of forward and backward over tokens/train, of the policy and a trained draft layer; "
     "without recomputation, gradients of frozen weights, sampling and scores (rl_megatron/training/flops.py)"),
    ("mfu/train", "", "flops/train divided by seconds/train and by the bfloat16 peak of the policy's GPUs; only if "
     "that is known", Curve("Speed", "MFU of the training phase")),
    ("seconds/rollout", "s", "time for sampling and rewards"),
    ("seconds/logprobs", "s", "time for log-probs of the old policy in the learner, and of the new one if a feature "
     "needs them"),
    ("seconds/reference", "s", "time for log-probs of the reference; on separate ranks, only the wait after "
     "seconds/logprobs"),
    ("seconds/values", "s", "time for the critic's values; on separate ranks, only the wait after the earlier scores"),
    ("seconds/critic", "s", "time for forward, backward and optimizer of the critic's minibatches; on separate ranks, "
     "only the wait after seconds/train"),
    ("seconds/train", "s", "time for forward, backward and optimizer of all minibatches"),
    ("seconds/weights", "s", "time of the weight push to the engine"),
    ("seconds/verify", "s", "part of seconds/weights: digests of the sent and received tensors, on the slowest rank",
     Curve("Speed", "Weight push: checksums")),
    ("seconds/pause", "s", "part of seconds/weights: pause of sampling, on the server with the longest pause",
     Curve("Speed", "Weight push: sampling paused")),
    ("memory/peak", "bytes", "peak memory of a learner rank since its start: torch's on a GPU, resident on a CPU; only "
     "with two ranks or more", Curve("Speed", "Peak memory of a rank")),
    ("ranks/slowest", "rank", "learner rank with the longest passes, waits included; log.txt names its node; only with "
     "two ranks or more", Curve("Speed", "Slowest rank")),
    ("seconds/eval", "s", "time of the held-out evaluation; only in rows with one"),
    ("checkpoint/bytes", "bytes", "bytes that ranks wrote to the last checkpoint; only in rows after the write"),
    ("checkpoint/write_seconds", "s", "write time of the slowest rank, policy and critic together; in the rows of "
     "checkpoint/bytes", Curve("Speed", "Checkpoint write time")),
    ("checkpoint/step", "", "step of the newest complete checkpoint; only in rows after its completion"),
    ("seconds/checkpoint", "s", "time that training waited for checkpoints; only in rows after one was started or "
     "written"),
    ("seconds/step", "s", "time since the previous row: the step, its evaluation and the wait for checkpoints",
     Curve("Speed", "Step time", compared=True)),
    ("devices/<name>", "devices", "devices of this role: GPUs, or CPU cores of its ranks; those shared with engines "
     "count for the learner"),
    ("metrics/non_finite", "", "values of this row that were not finite and are null; only if there are any"),
)  # fmt: skip

LEARNING: MetricTuples = (
    ("step", "", "step of the job, from 1 to train.steps; 0 in rows of the warm start and for an evaluation before the "
     "first step"),
    ("phase", "", "`warm_start` for supervised steps, the job's name, or `eval` for an evaluation in the background of "
     "later steps"),
    ("warm_start/step", "", "supervised step, from 1 to warm_start.steps; 0 for the evaluation before the first"),
    ("warm_start/loss", "nats", "mean cross-entropy of a supervised token", Curve("Optimization", "Warm-start loss")),
    ("eval/loss", "nats", "loss of held-out rows in dataset jobs; with job=sft, the mean over supervised tokens",
     Curve("Headlines", "Held-out loss")),
    ("eval/perplexity", "", "exponential of eval/loss; only with job=sft",
     Curve("Optimization", "Held-out perplexity")),
    ("eval/preference_accuracy", "", "preference/accuracy of held-out pairs or single answers",
     Curve("Optimization", "Held-out preference accuracy")),
    ("eval/preference_margin", "", "preference/margin of held-out pairs or single answers",
     Curve("Optimization", "Held-out preference margin")),
    ("data/epoch", "", "passes over the data that was trained on; for a mixture, draws divided by the rows of all "
     "sources", Curve("Optimization", "Epochs")),
    ("data/dropped", "sequences", "sequences dropped in the step because they or the other one of their pair are "
     "longer than max_tokens or refused (on_refused), or have no turn to train on. The first step adds those dropped "
     "as .jsonl files were read", Curve("Optimization", "Sequences dropped")),
    ("data/truncated", "sequences", "sequences of the step trained on without tokens beyond sft.max_tokens",
     Curve("Optimization", "Sequences truncated")),
    ("reward/mean", "", "mean reward of the step's completions",
     Curve("Headlines", "Reward", band=", mean ± standard deviation", spread="reward/std")),
    ("reward/std", "", "standard deviation of the rewards of all completions in the step"),
    ("reward/sampled_mean", "", "mean reward of all sampled completions, including those of groups dropped later",
     Curve("Policy", "Reward before filtering")),
    ("reward/part/<name>", "", "unweighted mean of this part of reward.parts, over the completions of "
     "reward/sampled_mean with it", Curve("Policy", "Reward part <name>")),
    ("reward/errors", "completions", "completions whose reward raised an error, timed out or was not finite, and "
     "trajectories whose environment failed", Curve("Policy", "Reward errors")),
    ("reward/timeouts", "completions", "part of reward/errors: completions over reward.timeout_seconds or over an "
     "environment's limits", Curve("Policy", "Reward timeouts")),
    ("source/<name>/reward", "", "reward/mean of this source of data.sources; like all source/ metrics, only with a "
     "mixture", Curve("Policy", "Source <name>: reward")),
    ("source/<name>/zero_advantage", "", "groups/zero_advantage_fraction of this source",
     Curve("Policy", "Source <name>: groups without a gradient")),
    ("source/<name>/share", "", "share of the trained groups from this source",
     Curve("Policy", "Source <name>: share of the groups")),
    ("source/<name>/epoch", "", "passes over this source's prompts, by draws",
     Curve("Policy", "Source <name>: epochs")),
    ("curriculum/retired", "prompts", "prompts no longer drawn because of their pass rate; like all curriculum/ "
     "metrics, only with data.curriculum", Curve("Policy", "Retired prompts")),
    ("curriculum/mean_pass_rate", "", "mean of the prompts' known pass rates", Curve("Policy", "Pass rate of prompts")),
    ("eval/accuracy", "", "share of held-out prompts with a reward of at least eval.success_reward; of the first set "
     "of eval.sets", Curve("Headlines", "Held-out accuracy", limits=(0.0, 1.0), warm_start=True)),
    ("eval/errors", "completions", "samples of eval/accuracy without a finite reward; they count as wrong",
     Curve("Headlines", "Held-out reward errors")),
    ("eval/current_version_fraction", "", "share of an evaluation's tokens sampled with the weights of its step; only "
     "with eval.mode=background", Curve("Evaluation", "Share evaluated by the step's weights")),
    ("eval/<name>/mean_at_<k>", "", "mean@k of this set of eval.sets: share of k samples that are right, mean over "
     "problems", Curve("Evaluation", "Set <name>: mean@<k>", limits=(0.0, 1.0))),
    ("eval/<name>/pass_at_<k>", "", "pass@k: probability that at least one of k samples is right, by the unbiased "
     "estimator", Curve("Evaluation", "Set <name>: pass@<k>", limits=(0.0, 1.0))),
    ("eval/<name>/maj_at_<k>", "", "maj@k: share of problems whose most frequent answer of k samples is right; ties "
     "count in part", Curve("Evaluation", "Set <name>: maj@<k>", limits=(0.0, 1.0))),
    ("eval/<name>/length", "tokens", "mean length of this set's samples over all turns; only of prompts with all "
     "samples", Curve("Evaluation", "Set <name>: response length")),
    ("eval/<name>/truncated", "", "share of the samples of eval/<name>/length with a turn that reached max_new_tokens",
     Curve("Evaluation", "Set <name>: truncated responses")),
    ("eval/<name>/errors", "completions", "samples of this set without a finite reward; they count as wrong",
     Curve("Evaluation", "Set <name>: reward errors")),
    ("loss", "", "policy loss by the algorithm's aggregation, mean over minibatches", Curve("Optimization", "Loss")),
    ("grad_norm", "", "global L2 norm of the gradient before clipping, mean over minibatches",
     Curve("Optimization", "Gradient norm")),
    ("steps/skipped", "steps", "optimizer steps skipped because the gradient was not finite",
     Curve("Optimization", "Optimizer steps skipped")),
    ("steps/completed", "steps", "optimizer steps of the policy, without those that algorithm.old_kl_limit skipped; "
     "only with that key", Curve("Policy", "Optimizer steps per step")),
    ("learning_rate", "", "learning rate of the step; 0 while only the critic is trained",
     Curve("Optimization", "Learning rate")),
    ("advantage/mean", "", "mean advantage of a trained token",
     Curve("Optimization", "Advantage", band=" ± standard deviation", spread="advantage/std")),
    ("advantage/std", "", "standard deviation of the advantages of trained tokens"),
    ("loss/kl", "nats", "KL term of `loss`, coefficient included; only if the loss has one",
     Curve("Optimization", "KL loss")),
    ("loss/nll", "nats", "negative log-likelihood term of `loss`, for right or better answers; only if the loss has "
     "one", Curve("Optimization", "NLL loss")),
    ("kl/reference", "nats", "KL(old || reference) by algorithm.kl.estimator: mean over tokens, then over completions. "
     "With dpo.loss=kto, the z0 of the step's loss, a mean of sums", Curve("Policy", "KL to reference")),
    ("kl/old_policy", "nats", "KL(old || current) per token: k3 estimate from the samples, before each minibatch's "
     "optimizer step", Curve("Policy", "KL to old policy")),
    ("kl/stopped_at", "nats", "kl/old_policy of the minibatch that exceeded algorithm.old_kl_limit; only if one did",
     Curve("Policy", "KL at early stop")),
    ("kl/rollout", "nats", "KL(engine || learner) per token before the update: k3 estimate; in the rows of mismatch/k1",
     Curve("Health", "KL, engine to learner (k3)")),
    ("entropy", "nats", "mean entropy of the policy's next-token distribution at sampled positions",
     Curve("Policy", "Entropy")),
    ("clip_fraction", "", "share of tokens (of sequences, for a sequence ratio) with a gradient that the clip removes "
     "or a cap of the ratio changes (cispo, scalerl, topr, dppo_tv, dppo_kl, ce_gppo); tokens of advantage 0 never "
     "count", Curve("Policy", "Clip fraction")),
    ("clip_fraction/low", "", "part of clip_fraction with a ratio below 1",
     Curve("Policy", "Clip fraction, ratio below 1")),
    ("clip_fraction/high", "", "part of clip_fraction with a ratio of at least 1",
     Curve("Policy", "Clip fraction, ratio above 1")),
    ("ratio/mean", "", "mean importance ratio of the current over the old policy, at the algorithm's level",
     Curve("Policy", "Importance ratio", others=("ratio/max",))),
    ("ratio/max", "", "largest importance ratio of the step"),
    ("ratio/effective_fraction", "", "effective sample size divided by the number of samples: mean(ratio)^2 / "
     "mean(ratio^2)", Curve("Policy", "Effective sample size, share")),
    ("correction/weight_mean", "", "mean importance weight of the learner over the engine; only if the loss corrects "
     "the mismatch", Curve("Health", "Rollout correction weight")),
    ("correction/dropped_fraction", "", "share of tokens with a correction weight of 0",
     Curve("Health", "Tokens dropped by rollout correction")),
    ("tokens/chosen_fraction", "", "share of a minibatch's tokens that algorithm.tokens.choose selected",
     Curve("Optimization", "Share of tokens trained on", limits=(0.0, 1.0))),
    ("demonstration/share", "", "share of trained tokens from demonstrations; like all demonstration/ metrics, only "
     "with algorithm.demonstration_gamma", Curve("Policy", "Share of demonstration tokens", limits=(0.0, 1.0))),
    ("demonstration/probability", "", "mean probability of a demonstration's token under the policy, before its "
     "minibatch's optimizer step", Curve("Policy", "Probability of demonstration tokens", limits=(0.0, 1.0))),
    ("demonstration/reward", "", "mean reward of the step's demonstrations",
     Curve("Policy", "Reward of demonstrations")),
    ("preference/accuracy", "", "share of pairs, or single answers, with a margin above 0",
     Curve("Policy", "Preference accuracy")),
    ("reward_model/score_mean", "", "mean score of the step's texts; only with job=reward_model",
     Curve("Optimization", "Reward model score")),
    ("preference/margin", "nats", "mean of beta * (log-ratio of the chosen minus that of the rejected answer), of "
     "log-probs without a reference; for a reward model, the difference of scores. With dpo.loss=kto, the mean over "
     "answers of beta * (log-ratio - z0), negated for undesirable ones", Curve("Policy", "Preference margin")),
    ("critic/loss", "", "value loss, half a squared error, mean over minibatches",
     Curve("Optimization", "Critic loss")),
    ("critic/grad_norm", "", "global L2 norm of the critic's gradient before clipping",
     Curve("Optimization", "Critic gradient norm")),
    ("critic/value_mean", "", "mean value at a trained position", Curve("Optimization", "Critic value")),
    ("critic/clip_fraction", "", "share of tokens for which the clipped value (algorithm.critic.clip) gives the larger "
     "loss", Curve("Optimization", "Critic clip fraction")),
    ("critic/explained_variance", "", "1 - Var(returns - values) / Var(returns) before the update; 1 is perfect",
     Curve("Optimization", "Critic explained variance")),
)  # fmt: skip


EXPERTS: MetricTuples = (
    ("moe/load_imbalance", "", "tokens of the busiest expert divided by the mean over experts, in the worst layer; 1 "
     "is balanced", Curve("Health", "Expert load imbalance")),
    ("moe/dead_experts", "", "share of experts without a token in an optimizer step, mean over layers",
     Curve("Health", "Dead experts")),
    ("observer/<name>", "", "metric of an observer from an installed package, reduced as the observer declares",
     Curve("Health", "Observer <name>")),
)  # fmt: skip


ENVIRONMENTS: MetricTuples = (
    ("environment/turns_mean", "turns", "mean turns of a trajectory; like all environment/ metrics, only with "
     "environment.function", Curve("Policy", "Turns per trajectory")),
    ("environment/branches/<name>", "rows", "mean number of a trajectory's rows that began because the template drops "
     "`thinking`, renders the `context` or a turn's `closing` token differently, or `refused` the turn, or because the "
     "history was `edited` where the template renders it, or asked `again`", Curve("Policy", "New sequences: <name>")),
    ("environment/seconds_mean", "s", "mean duration of a trajectory, sampling included",
     Curve("Policy", "Trajectory time")),
    ("environment/tool_calls", "calls", "mean number of tool calls in a trajectory that could be parsed",
     Curve("Policy", "Tool calls per trajectory")),
    ("environment/bad_calls", "turns", "mean number of turns in a trajectory with a call that could not be parsed",
     Curve("Policy", "Invalid tool calls")),
    ("environment/stop/<name>", "", "share of trajectories with this end: `done` (ended by itself), `length` (a "
     "truncated turn), `turns`, `tokens` or `seconds` (limits), `bad_call` (the template refuses a turn), "
     "`environment_error` (with the reward of environment.on_error) or `abandoned`",
     Curve("Policy", "Stop reason: <name>")),
    ("environment/own/<name>", "", "sum over a trajectory's steps of a metric that the environment returned, mean over "
     "trajectories", Curve("Policy", "Environment: <name>")),
    ("endpoint/answered", "turns", "turns that an agent's clients received over HTTP, mean over trajectories with such "
     "clients", Curve("Policy", "Turns per trajectory over HTTP")),
    ("endpoint/refused", "requests", "mean rejected requests of such a trajectory",
     Curve("Policy", "Refused requests per trajectory")),
)  # fmt: skip


SAMPLING: MetricTuples = (
    ("staleness/mean", "versions", "trained version minus the version that sampled, mean over completions",
     Curve("Health", "Staleness", others=("staleness/max",))),
    ("staleness/max", "versions", "largest staleness of a completion"),
    ("staleness/share/<name>", "", "share of completions with this staleness: v0, v1, ... up to staleness/max",
     Curve("Health", "Completions of staleness <name>")),
    ("staleness/allowed", "versions", "number of versions that sampling may currently be ahead; with servers from 1 to "
     "train.max_staleness", Curve("Health", "Allowed staleness")),
    ("in_flight/completions", "completions", "completions being sampled or scored at the push; with "
     "train.max_staleness", Curve("Health", "Completions in flight")),
    ("idle/learner_fraction", "", "share of the time since the previous row in which the learner waited for groups; "
     "with train.max_staleness and servers", Curve("Health", "Learner idle")),
    ("idle/engine_fraction", "", "share of the servers' slots without a completion, mean over that time",
     Curve("Health", "Engines idle")),
    ("mismatch/logprob_abs_mean", "nats", "mean |learner - engine| log-prob of a sampled token, with equal weights. "
     "All mismatch/ metrics are from before the update, and absent if the learner does not score the tokens "
     "(docs/troubleshooting.md)", Curve("Health", "Log-prob mismatch", others=("mismatch/logprob_abs_max",))),
    ("mismatch/logprob_abs_max", "nats", "largest such difference"),
    ("mismatch/k1", "nats", "KL(engine || learner) per token: k1 estimate, mean engine - learner log-prob",
     Curve("Health", "KL, engine to learner (k1)")),
    ("response/length_mean", "tokens", "mean length of a completion, stop token included",
     Curve("Policy", "Response length", others=("response/length_max",))),
    ("response/length_max", "tokens", "length of the longest completion"),
    ("response/truncated_fraction", "", "share of completions that reached rollout.max_new_tokens or "
     "rollout.completion_timeout_seconds", Curve("Policy", "Truncated responses")),
    ("groups/trained", "groups", "groups that the step trains on; 0 if there were none and the step was skipped",
     Curve("Policy", "Groups trained on")),
    ("groups/dropped", "groups", "groups dropped for failed rewards, if the configuration says so, and for `poison` "
     "prompts", Curve("Policy", "Groups dropped")),
    ("groups/filtered", "groups", "groups that rollout.dynamic_sampling dropped: with equal rewards (of turns or "
     "parts, if these are compared) before or after the overlong penalty, or with custom advantages that are all 0",
     Curve("Policy", "Groups filtered")),
    ("groups/zero_advantage_fraction", "", "share of groups with equal rewards (of turns or parts, if these are "
     "compared). They give no gradient, except with a critic, with no baseline or one other than the group's mean, a "
     "KL in the reward, a teacher's distribution or algorithm.nll_coefficient",
     Curve("Policy", "Groups without a gradient", compared=True)),
    ("groups/all_correct", "", "share of sampled groups with rewards of at least eval.success_reward in all "
     "completions, before rollout.dynamic_sampling; groups with a failed reward do not count",
     Curve("Policy", "Groups with all completions correct", limits=(0.0, 1.0), compared=True)),
    ("groups/none_correct", "", "share of sampled groups without such a reward, counted in the same way; with partial "
     "credit they may still give a gradient",
     Curve("Policy", "Groups with no completion correct", limits=(0.0, 1.0), compared=True)),
    ("ledger/<name>", "prompts", "prompts `drawn` since the run's start, and their state after the push: `queued` (not "
     "sent), `in_flight` (being sampled or scored), `buffered` (scored), `trained` or `dropped` (ledger.jsonl has step "
     "and reason)", Curve("Health", "Prompts <name>")),
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


def with_current_names(row: JsonRow) -> JsonRow:
    """Returns the row, which an older version may have recorded, by the names of today."""
    return row if RENAMED.keys().isdisjoint(row) else {RENAMED.get(name, name): value for name, value in row.items()}


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

A metric that a run cannot have is absent, not 0. Metrics of servers are absent if the learner's processes sample.

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
