"""Defines the table of metrics, and writes metrics.jsonl, TensorBoard and W&B.

A name that is not in `METRICS` is an error, so docs/metrics.md (rendered from the table) is always complete.
"""

from __future__ import annotations

import difflib
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rl_megatron.errors import ConfigError
from rl_megatron.observability.files import JsonlFile, JsonRow, JsonValue

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Documented:
    """One documented metric, or a family with a ``<name>``. ``unit`` is "" for a ratio or count."""

    name: str
    unit: str
    meaning: str

    @property
    def is_timing(self) -> bool:
        """Whether it depends on the clock or on when the run saved, so that it differs between equal runs."""
        return self.unit in ("s", "ms", "tokens/s", "rank", "s/s") or self.name.startswith(
            ("overlap/", "checkpoint/", "memory/", "mfu/")
        )


def _rows(*rows: tuple[str, str, str]) -> dict[str, Documented]:
    return {name: Documented(name=name, unit=unit, meaning=meaning) for name, unit, meaning in rows}


METRICS: Mapping[str, Documented] = _rows(
    ("step", "", "RL step, 1 to train.steps; 0 for rows of the warm start and for an evaluation before the first step"),
    ("phase", "", "`warm_start` (supervised steps) or `rl`"),
    ("warm_start/step", "", "supervised step, 1 to warm_start.steps; 0 for the evaluation before the first"),
    ("warm_start/loss", "nats", "mean cross-entropy per supervised token"),
    ("reward/mean", "", "mean reward of the step's completions"),
    ("reward/std", "", "standard deviation of the step's rewards, over all completions"),
    ("reward/sampled_mean", "", "mean reward of all sampled completions, including groups that are left out later"),
    (
        "reward/part/<name>",
        "",
        "unweighted mean of that part of reward.parts, over the completions of reward/sampled_mean",
    ),
    ("reward/errors", "completions", "completions whose reward raised, timed out or was not finite"),
    ("eval/accuracy", "", "share of held-out prompts whose reward is at least eval.success_reward"),
    ("loss", "", "policy loss under the algorithm's aggregation, mean over the step's minibatches"),
    ("grad_norm", "", "global L2 norm of the gradient before clipping, mean over the minibatches"),
    ("steps/skipped", "steps", "optimizer steps skipped because their gradient was not finite (train.on_nonfinite)"),
    ("learning_rate", "", "learning rate of the step"),
    ("advantage/mean", "", "mean advantage of a trained token"),
    ("advantage/std", "", "standard deviation of the advantages of trained tokens"),
    ("loss/kl", "nats", "the KL term's part of `loss`, coefficient included; only if the loss has one"),
    ("loss/nll", "nats", "the positive-example term's part of `loss`; only if algorithm.nll_coefficient is set"),
    ("kl/reference", "nats", "KL(old || reference) by algorithm.kl.estimator: completions' mean of their tokens' mean"),
    ("kl/coefficient", "", "weight of the KL to the reference in this step"),
    ("kl/old_policy", "nats", "KL(old || current) per token: k3 estimate from the samples, mean over the minibatches"),
    ("kl/rollout", "nats", "KL(engine || learner) per token before the update: k3 estimate of their mismatch"),
    ("entropy", "nats", "mean entropy of the policy's next-token distribution at sampled positions"),
    ("clip_fraction", "", "share of tokens (of sequences, for a sequence ratio) whose gradient the clip removes"),
    ("clip_fraction/low", "", "the part of clip_fraction with a ratio below 1"),
    ("clip_fraction/high", "", "the part of clip_fraction with a ratio of 1 or above"),
    ("ratio/mean", "", "mean importance ratio, current over old policy, at the algorithm's level"),
    ("ratio/min", "", "least importance ratio of the step"),
    ("ratio/max", "", "greatest importance ratio of the step"),
    ("ratio/p01", "", "1 % of the tokens have an importance ratio below this; from bins, so its log is within 5 %"),
    ("ratio/p50", "", "median importance ratio of the tokens"),
    ("ratio/p99", "", "99 % of the tokens have an importance ratio below this"),
    ("ratio/effective_fraction", "", "effective sample size over the number of samples, mean(ratio)^2 / mean(ratio^2)"),
    ("ratio/outside", "", "share of sampled tokens whose ratio left 1 +- 0.2 in the update (train.route_flips)"),
    ("ratio/outside/<name>", "", "the same of tokens whose first flip (moe/first_flip) is in that layer, or `none`"),
    ("ratio/clamped_fraction", "", "share of ratios clamped to a safe float32 range; anything but 0 is a fault"),
    ("correction/weight_mean", "", "mean importance weight, learner over engine, if the loss corrects the mismatch"),
    ("correction/dropped_fraction", "", "share of tokens whose correction weight is 0"),
    ("preference/pairs", "pairs", "pairs of completions that DPO trained on"),
    ("preference/accuracy", "", "share of pairs whose margin is above 0"),
    (
        "preference/margin",
        "nats",
        "mean of beta * (log-ratio to the reference of the chosen minus that of the rejected)",
    ),
    ("critic/loss", "", "value loss, half a squared error, mean over the minibatches"),
    ("critic/grad_norm", "", "global L2 norm of the critic's gradient before clipping"),
    ("critic/learning_rate", "", "learning rate of the critic"),
    ("critic/value_mean", "", "mean value of a trained position"),
    ("critic/clip_fraction", "", "share of tokens whose clipped value (algorithm.critic.clip) gives the larger loss"),
    ("critic/explained_variance", "", "1 - Var(returns - values) / Var(returns) before the update: 1 is perfect"),
    ("staleness/mean", "versions", "mean of the trained version minus the version that sampled, over the completions"),
    ("staleness/max", "versions", "greatest staleness of a completion"),
    ("staleness/p95", "versions", "95 % of the completions are at most so stale; this and the rest with max_staleness"),
    ("staleness/tokens_mean", "versions", "mean staleness of a token, each by the version that sampled it"),
    ("staleness/share/<name>", "", "share of the completions that are so stale: v0, v1, ... up to staleness/max"),
    ("staleness/allowed", "versions", "how far sampling may be ahead at present; servers go from 1 to max_staleness"),
    ("wait/due_seconds", "s", "part of seconds/rollout: waiting for groups that are due, with a batch of younger ones"),
    ("in_flight/completions", "completions", "completions that were being sampled or scored at the push"),
    ("overlap/fraction", "", "0 where sampling and training follow each other, 0.5 where both are always at work"),
    ("mismatch/logprob_abs_mean", "nats", "mean |learner - engine| log-prob of a sampled token, equal weights"),
    ("mismatch/logprob_abs_max", "nats", "greatest such difference"),
    ("mismatch/logprob_abs_p50", "nats", "median of such differences; this and the rest are from before the update"),
    ("mismatch/logprob_abs_p90", "nats", "90 % of the differences are below this"),
    ("mismatch/logprob_abs_p99", "nats", "99 % of the differences are below this"),
    ("mismatch/k1", "nats", "k1 estimate of KL(engine || learner) per token: mean engine - learner log-prob"),
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
    ("groups/trained", "groups", "groups that the step trains on; 0 if it is skipped because there are none"),
    ("groups/dropped", "groups", "groups left out: failed rewards if the config says so, and `poison` prompts"),
    ("groups/filtered", "groups", "groups of equal shaped rewards, left out by rollout.dynamic_sampling"),
    ("groups/zero_advantage_fraction", "", "share of groups whose rewards are all equal, so they give no gradient"),
    (
        "ledger/<name>",
        "prompts",
        "prompts `drawn` since the run's start, and where they are after the push: `queued` (not sent), `in_flight` "
        "(being sampled or scored), `buffered` (scored), `trained`, or `dropped` (ledger.jsonl says when and why)",
    ),
    ("moe/load_imbalance", "", "tokens of the busiest expert over the mean expert, in the worst layer; 1 is balanced"),
    ("moe/dead_experts", "", "share of experts without a token in an optimizer step, mean over layers"),
    (
        "moe/routing_entropy",
        "",
        "mean entropy of a router's distribution over experts, over that of the uniform one; near 0 it has collapsed. "
        "Prompts' tokens count in these three, padding does not, and a layer that is recomputed counts once",
    ),
    (
        "moe/rerouted_fraction",
        "",
        "share of (token, layer) whose router would choose other experts than the replayed ones",
    ),
    (
        "moe/flips_engine",
        "",
        "share of (sampled token, layer) with other experts in the engine than in the old policy; not with r3",
    ),
    ("moe/flips_engine/<name>", "", "the same of one layer: layer0, layer1, ... of those with experts"),
    ("moe/flips_update", "", "share of (sampled token, layer) with other experts after the update; 0 with replay"),
    ("moe/flips_update/<name>", "", "the same of one layer; these, too, with train.route_flips (docs/algorithms.md)"),
    ("moe/first_flip/<name>", "", "share of sampled tokens whose lowest layer with such a flip is this, or `none`"),
    (
        "moe/aux_loss",
        "",
        "load-balancing loss of a micro-batch, without its coefficient, mean over layers; 1 is balanced",
    ),
    ("moe/seq_aux_loss", "", "the same of a sequence; these four only with a coefficient in learner.router"),
    ("moe/global_aux_loss", "", "the same with the load of all ranks and of the optimizer step's micro-batches so far"),
    ("moe/z_loss", "", "mean squared logsumexp of routers' logits, mean over layers"),
    ("observer/<name>", "", "a metric of an installed package's observer, by the reduction that it names"),
    ("packing/imbalance", "", "work of the slowest rank at each micro-batch over the mean rank's; 1 is even"),
    ("packing/padding_fraction", "", "share of the packed positions that are padding"),
    ("waves/count", "waves", "backward passes of the step, with train.stream_micro_batches"),
    ("waves/early_fraction", "", "share of trained positions whose backward pass was before the batch's last groups"),
    ("weights/bytes", "bytes", "weight bytes that crossed a process boundary to the rollout engine"),
    (
        "weights/route",
        "",
        "how they got there, as text: weights.transport, or `shared_file` through a file system that nodes share",
    ),
    (
        "weights/quantization_error",
        "",
        "largest relative error of a tensor that was quantised for engine servers, as Frobenius norms",
    ),
    ("engine/healthy", "servers", "engine servers that serve after the step's push; only if servers sample"),
    ("engine/restarts", "", "restarts of dead engine servers since the run was started"),
    ("tokens/rollout", "tokens", "tokens sampled in the step"),
    ("tokens/train", "tokens", "positions of the optimizer steps, prompts included, padding excluded"),
    ("tokens_per_second/rollout", "tokens/s", "of seconds/rollout; of seconds/step with train.max_staleness"),
    ("tokens_per_second/train", "tokens/s", "tokens/train over seconds/train"),
    (
        "flops/train",
        "FLOP",
        "FLOPs of the policy's model in forward and backward over tokens/train, without what is computed again; those "
        "of sampling and scores are not counted (rl_megatron/scaling/flops.py)",
    ),
    (
        "mfu/train",
        "",
        "flops/train over seconds/train at the bfloat16 peak of the policy's GPUs; only where that is known",
    ),
    ("seconds/rollout", "s", "sampling and rewards"),
    ("seconds/logprobs", "s", "log-probs of the old policy by the learner, and of the new one (train.route_flips)"),
    ("seconds/reference", "s", "log-probs of the reference; on separate ranks, only the wait after seconds/logprobs"),
    ("seconds/values", "s", "values by the critic; on separate ranks, only the wait after the scores before it"),
    (
        "seconds/critic",
        "s",
        "forward, backward and optimizer of the critic's minibatches; on separate ranks, the wait after seconds/train",
    ),
    ("seconds/train", "s", "forward, backward and optimizer of all minibatches"),
    ("seconds/weights", "s", "weight push to the rollout engine"),
    (
        "seconds/verify",
        "s",
        "part of seconds/weights: digests of the tensors sent and of those received, on the slowest rank",
    ),
    ("seconds/passes_median", "s", "forward and backward passes of the median learner rank, its waits included"),
    ("seconds/passes_max", "s", "the same on the learner rank that took longest"),
    (
        "memory/peak",
        "bytes",
        "the most that a learner rank has held since its start: of its GPU as torch's allocator has it, of a CPU's "
        "resident memory; with two ranks or more",
    ),
    ("ranks/slowest", "rank", "the learner rank that took longest for a fixed computation; with two ranks or more"),
    ("ranks/slowness", "s/s", "its seconds for that over those of the median rank (run.slow_factor)"),
    ("seconds/eval", "s", "held-out evaluation; only in rows that evaluated"),
    ("checkpoint/stage_seconds", "s", "training waited for the copy of the state (checkpoint.async_save)"),
    ("checkpoint/bytes", "bytes", "what ranks wrote into the last checkpoint; only in rows after it was written"),
    ("checkpoint/write_seconds", "s", "the slowest rank wrote into it, policy and critic together; in the same rows"),
    ("checkpoint/step", "", "step of the newest complete checkpoint; only in rows after it was completed"),
    ("seconds/checkpoint", "s", "training waited for checkpoints; only in rows after one was begun or written"),
    ("seconds/step", "s", "since the previous row: the step, its evaluation, the wait for checkpoints"),
    ("loop/longest_ms", "ms", "the longest since the last row that the controller served nothing; log.txt says why"),
    ("metrics/non_finite", "", "values of this row that were NaN or infinite and are null; only if there are any"),
)

_FAMILIES = [
    (re.compile(re.escape(name).replace("<name>", "[a-z][a-z0-9_]*")), metric)
    for name, metric in METRICS.items()
    if "<name>" in name
]

PHASE_SECONDS = ("rollout", "logprobs", "reference", "values", "train", "critic", "weights", "eval", "checkpoint")
"""The parts of ``seconds/step``, in the order in which a step runs them."""


def documented(name: str) -> Documented | None:
    """The table's row for this name; for ``reward/part/style`` it is ``reward/part/<name>``."""
    if "<" in name:
        return None
    return METRICS.get(name) or next((metric for family, metric in _FAMILIES if family.fullmatch(name)), None)


def deterministic(row: JsonRow) -> dict[str, JsonValue]:
    """The row without metrics that depend on the clock: equal runs give rows equal to the bit."""
    return {name: value for name, value in row.items() if not _row_of(name).is_timing}


def render_docs() -> str:
    """docs/metrics.md, from the table."""
    head = """# Metrics

`runs/<name>/metrics.jsonl` holds one JSON object per line: one for each recorded supervised step of the warm start,
then one for each RL step. Names are stable. A value that was NaN or infinite is `null`. TensorBoard tags and W&B keys
are the same names, prefixed by `warm_start/` in rows of the warm start. Log-probs, entropies and KLs are in nats.
Metrics in s, ms, s/s, tokens/s and rank, and mfu, depend on the clock, those of a checkpoint on when the run saved; all
others are equal to the bit in equal runs.

| name | unit | meaning |
|---|---|---|
"""
    rows = ((m.name, m.unit or "-", m.meaning.replace("|", r"\|")) for m in METRICS.values())
    return head + "".join(f"| `{name}` | {unit} | {meaning} |\n" for name, unit, meaning in rows)


def checked(row: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Check a row and make it ready for JSON: NaN and infinity become None, are counted and logged.

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
    if type(out.get("step")) is not int or out.get("phase") not in ("warm_start", "rl"):
        raise ValueError(f"a metrics row needs an integer step and a phase, 'warm_start' or 'rl'; got {list(row)}")
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


class MetricsWriter:
    """Records rows in ``folder``/metrics.jsonl, in TensorBoard files and in W&B. Controller process only.

    Raises ConfigError if ``wandb`` is requested but not installed.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tensorboard: bool = False,
        wandb: Literal["off", "offline", "online"] = "off",
        wandb_project: str = "rl_megatron",
    ) -> None:
        self._file = JsonlFile(folder / "metrics.jsonl")
        self._tensorboard_folder = folder / "tensorboard" if tensorboard else None
        self._tensorboard: dict[str, SummaryWriter] = {}  # by phase
        self._wandb = _start_wandb(folder, wandb, wandb_project) if wandb != "off" else None

    def write(self, row: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
        """Append one row durably. Returns the row as written. Raises ValueError as `checked` does."""
        out = checked(row)
        self._file.append([out])
        tags, x = _tagged(out)
        if self._tensorboard_folder is not None:
            phase = str(out["phase"])
            if phase not in self._tensorboard:
                self._tensorboard[phase] = _open_tensorboard(self._tensorboard_folder / phase, purge_step=x)
            for tag, value in tags.items():
                self._tensorboard[phase].add_scalar(tag, value, x)
            self._tensorboard[phase].flush()
        if self._wandb is not None:
            self._wandb.log(tags)
        return out

    def truncate_after(self, step: int, *, warm_start_step: int | None = None) -> int:
        """Prepare a resume from ``step``: remove later rows and a torn last line. Returns the number of rows removed.

        ``step=-1`` clears the file; ``warm_start_step`` is given for a checkpoint inside the warm start.
        TensorBoard itself hides its later points, from the next row on.
        """
        if warm_start_step is not None:
            return self._file.truncate_after(warm_start_step, "warm_start/step")
        return self._file.truncate_after(step)

    def close(self) -> None:
        """Flush and close all files; mark the W&B run as finished."""
        self._file.close()
        for writer in self._tensorboard.values():
            writer.close()
        if self._wandb is not None:
            self._wandb.finish()


def _tagged(row: JsonRow) -> tuple[dict[str, float], int]:
    """A row's numbers by TensorBoard and W&B tag, and their x.

    A warm start has its own x axis, and in TensorBoard its own folder: a purge of RL steps after a resume compares
    only x, so it would remove the warm start's points too.
    """
    warm = row["phase"] == "warm_start"
    numbers = {n: v for n, v in row.items() if isinstance(v, int | float) and not (warm and n == "step")}
    if not warm:
        return numbers, int(numbers["step"])
    tags = {n if n.startswith("warm_start/") else f"warm_start/{n}": v for n, v in numbers.items()}
    return tags, int(tags.get("warm_start/step", 0))


def _open_tensorboard(folder: Path, *, purge_step: int) -> SummaryWriter:
    from torch.utils.tensorboard import SummaryWriter  # a second to import: only for runs that ask for it

    return SummaryWriter(str(folder), purge_step=purge_step)


def _start_wandb(folder: Path, mode: str, project: str) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(
            f"log.wandb={mode} needs the package wandb, which is not installed; "
            "install it with `pip install 'rl-megatron[wandb]'` or set log.wandb=off"
        ) from error
    run = wandb.init(project=project, name=folder.name, id=folder.name, dir=str(folder), mode=mode, resume="allow")
    run.define_metric("warm_start/*", step_metric="warm_start/step")
    run.define_metric("*", step_metric="step")
    return run
