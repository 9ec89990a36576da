"""Makes the optimizer steps of one model; skips, explains and limits those whose gradient is not finite.

Computes the metrics of steps together. Learning rates as functions of the step, and the steps of a number of epochs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from rl_megatron.algorithms.losses import MEANS_OF_RATIOS
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import RLMegatronError
from rl_megatron.interfaces import Learner
from rl_megatron.observability.recorder import Row
from rl_megatron.types import Batch, Loss, Metric, Over, Prompt, Samples, SkippedStep, StepResult

logger = logging.getLogger(__name__)

_SHOWN = 8  # names in a message


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """An optimizer step that was made: ``loss``, its metrics, and the step's result."""

    loss_metrics: Mapping[str, Metric[float]]
    result: StepResult

    @property
    def loss(self) -> float:
        """The loss of the batch."""
        return self.loss_metrics["loss"].value


def policy_row(steps: Sequence[CompletedStep]) -> Row:
    """Returns metrics over the policy's optimizer steps: loss, gradient norm, and those of loss and observers."""
    if not steps:
        return {}
    row = _merged([made.loss_metrics for made in steps]) | {"grad_norm": _grad_norm(steps)}
    row |= _merged([made.result.observer_metrics for made in steps])
    if "sampled/share" in row:
        row = _token_means(row)
    if "ratio/share" in row:
        share = float(row["ratio/share"] or 0)
        row |= {name: float(row[name] or 0) / share for name in MEANS_OF_RATIOS}
        del row["ratio/share"]
        first, second = float(row["ratio/mean"] or 0), float(row.pop("ratio/second_moment") or 0)
        row["ratio/effective_fraction"] = first**2 / second if second else math.nan
    return row


def _token_means(row: Row) -> Row:
    """Returns the row with means over sampled tokens, and over demonstrated ones, in place of their sums over both. A
    mean over no token is left out."""
    sampled, shown = float(row.pop("sampled/share") or 0), float(row["demonstration/share"] or 0)
    means = {**dict.fromkeys(("entropy", "kl/old_policy"), sampled), "demonstration/probability": shown}
    kept = {name: x for name, x in row.items() if sampled or not name.startswith(("ratio", "clip_fraction"))}
    row = {name: x for name, x in kept.items() if name not in means}
    return row | {name: float(kept[name] or 0) / share for name, share in means.items() if share}


def critic_row(steps: Sequence[CompletedStep]) -> Row:
    """Returns metrics over the critic's optimizer steps, without observers, as these would overwrite the policy's."""
    if not steps:
        return {}
    row = _merged([made.loss_metrics for made in steps])
    return {"critic/loss": row.pop("loss"), "critic/grad_norm": _grad_norm(steps), **row}


def _grad_norm(steps: Sequence[CompletedStep]) -> float:
    return math.fsum(made.result.grad_norm for made in steps) / len(steps)


def _merged(steps: Sequence[Mapping[str, Metric[float]]]) -> Row:
    """Merges each metric of the optimizer steps that have it."""
    found: dict[str, list[Metric[float]]] = {}
    for step in steps:
        for name, metric in step.items():
            if metric.weight or metric.reduction != "mean":
                found.setdefault(name, []).append(metric)
    row: Row = {}
    for name, parts in found.items():
        row[name] = _OVER[parts[0].reduction](parts)
    return row


def _weighted_mean(parts: Sequence[Metric[float]]) -> float:
    return math.fsum(p.value * p.weight for p in parts) / math.fsum(p.weight for p in parts)


_OVER: Mapping[Over, Callable[[Sequence[Metric[Any]]], float]] = {
    "sum": lambda parts: math.fsum(p.value for p in parts),
    "mean": _weighted_mean,
    "min": lambda parts: min(p.value for p in parts),
    "max": lambda parts: max(p.value for p in parts),
}


@dataclass(frozen=True, slots=True)
class KLLimitReached:
    """The step was skipped, because the policy is ``kl`` nats from the old one."""

    kl: float


_MOST = 3  # steps skipped in a row; more end the run


@dataclass(slots=True, kw_only=True)
class OptimizerSteps:
    """The optimizer steps of the model ``name``. A step with NaN or infinity in its gradient is skipped, so that a
    strange batch costs a step. It changes no bit of weights or of the optimizer's state."""

    name: str
    skipped_in_a_row: int = 0

    async def step(
        self, learner: Learner, batch: Batch, loss: Loss, learning_rate: float, prompts: Iterable[Prompt]
    ) -> CompletedStep | None:
        """Makes one optimizer step of ``learner`` on the whole batch; ``prompts`` name sequences in messages.

        Logs a skipped step and returns None. Raises RLMegatronError if more than three in a row were.
        """
        said = await learner.backward(batch, loss)
        return self._judge(await learner.step(learning_rate), said, batch.micro_batches, prompts)

    async def step_near(
        self,
        learner: Learner,
        batch: Batch,
        loss: Loss,
        learning_rate: float,
        prompts: Iterable[Prompt],
        *,
        max_kl: float | None,
    ) -> CompletedStep | KLLimitReached | None:
        """Makes a step as `step` does, or drops the gradients if ``kl/old_policy`` of the batch, of the model before
        the step, is above ``max_kl``."""
        said = await learner.backward(batch, loss)
        if max_kl is not None:
            kl = said["kl/old_policy"].value
            assert isinstance(kl, float)
            if kl > max_kl:
                await learner.zero_grad()
                return KLLimitReached(kl)
        return self._judge(await learner.step(learning_rate), said, batch.micro_batches, prompts)

    def _judge(
        self,
        result: StepResult | SkippedStep,
        of_loss: Mapping[str, Metric[float]],
        micro_batches: Sequence[Sequence[Samples]],
        prompts: Iterable[Prompt],
    ) -> CompletedStep | None:
        """Returns, logs and raises for `step` by the ``result`` of a step on all ``micro_batches`` [D][M]."""
        if isinstance(result, StepResult):
            self.skipped_in_a_row = 0
            return CompletedStep(of_loss, result)
        self.skipped_in_a_row += 1
        told = f"the {self.name}'s gradient norm is {result.grad_norm}: {_cause(result, micro_batches, prompts)}"
        if self.skipped_in_a_row > _MOST:
            raise RLMegatronError(
                f"{told}. The weights did not change, but {self.skipped_in_a_row} optimizer steps in a row failed "
                "like this: "
                "fix these prompts and rewards, or lower the learning rate, then resume from the last checkpoint"
            )
        logger.warning(
            "%s. This optimizer step is skipped, %d of at most %d in a row", told, self.skipped_in_a_row, _MOST
        )
        return None


def _cause(result: SkippedStep, micro_batches: Sequence[Sequence[Samples]], prompts: Iterable[Prompt]) -> str:
    ranks: dict[tuple[int, int], list[str]] = {}
    for c in result.culprits:
        ranks.setdefault((c.data_rank, c.micro_batch), []).append(f"{c.rank} on {c.node}")
    if not ranks:
        return (
            "no micro-batch reproduces it alone: either finite gradients have a norm beyond float32, or memory or "
            "processor failed"
        )
    known = {p.token_ids: p.id for p in prompts}
    told = [
        f"micro-batch {m + 1} of data-parallel rank {d} (rank {_listed(who)}; prompt "
        f"{_listed(_prompts_of(micro_batches[d][m], known))})"
        for (d, m), who in ranks.items()
    ]
    return f"by {_listed(told)}"


def _prompts_of(samples: Samples, known: dict[tuple[int, ...], str]) -> list[str]:
    """Returns the ids of the prompts that the sequences begin with, each once; the longest that matches counts."""
    found: dict[str, None] = {}
    for first, end in zip(samples.cu_seqlens[:-1].tolist(), samples.cu_seqlens[1:].tolist(), strict=True):
        tokens = tuple(samples.input_ids[first:end].tolist())
        begun = [ids for ids in known if tokens[: len(ids)] == ids]
        if begun:
            found[repr(known[max(begun, key=len)])] = None
    return list(found) or ["unknown"]


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def schedule(config: RunConfig, step: int, *, after: int = 0) -> float:
    """Returns the factor of the learning rate at RL step ``step`` (from 1): linear warm-up, then the configured decay,
    to ``train.lr_min`` over ``train.learning_rate``. A model that is trained ``after`` some steps has 0 in these.
    """
    if step <= after:
        return 0.0
    train = config.train
    warm = min(1.0, (step - after) / train.lr_warmup_steps) if train.lr_warmup_steps else 1.0
    left = (train.steps - step + 1) / max(1, train.steps - after - train.lr_warmup_steps)
    shapes = {"none": 1.0, "linear": left, "cosine": 0.5 - 0.5 * math.cos(math.pi * min(1.0, left))}
    floor = train.lr_min / train.learning_rate
    return min(warm, floor + (1 - floor) * shapes[train.lr_decay])


def learning_rate(config: RunConfig, step: int) -> float:
    """Returns the policy's learning rate at ``step``. Its schedule begins once the critic no longer trains alone."""
    section = config.algorithm
    after = section.critic.only_steps if section.needs_critic else 0
    return config.train.learning_rate * schedule(config, step, after=after)


def critic_learning_rate(config: RunConfig, step: int) -> float:
    """Returns the critic's learning rate at ``step``, on the same schedule from the first step on."""
    rate = config.algorithm.critic.learning_rate
    return (config.train.learning_rate if rate is None else rate) * schedule(config, step)


def steps_for_epochs(epochs: float, rows: int, batch_size: int) -> int:
    """Returns the steps of ``epochs`` passes over ``rows``; ``epochs`` is read as written, as the float 1.1 is more."""
    return math.ceil(Fraction(str(epochs)) * rows / batch_size)
