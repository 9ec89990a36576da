"""Rules of ``train.stream_micro_batches``: what needs the whole batch before the first backward pass is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rl_megatron.config.run import RunConfig
    from rl_megatron.config.sections.learner import LearnerSection

BUBBLE = 16
"""Micro-batches of a wave for each pipeline stage but one: stages are idle for at most 1/17 of it, 6 %."""


def micro_batches_filled(learner: LearnerSection, *, positions: int, sequences: int) -> int:
    """Micro-batches that so many padded positions, or so many sequences, fill on every data-parallel rank."""
    most, dp = learner.padding.sequences, learner.dims.dp
    by_tokens = positions // (dp * learner.max_tokens_per_micro_batch)
    return by_tokens if most is None else max(by_tokens, sequences // (dp * most))


def problems_of_waves(c: RunConfig) -> Iterator[str]:
    """A line for each part of the run that cannot be trained in waves, and for waves too short or never full."""
    wave = c.train.stream_micro_batches
    if not wave:
        return
    given = f"train.stream_micro_batches={wave}"
    for key, why in [*_of_batches(c), *_of_the_learner(c.learner), *_of_sampling(c)]:
        yield f"{given} with {key}: {why}, or leave train.stream_micro_batches out"
    least = BUBBLE * (c.learner.pp - 1)
    if wave < least:
        yield (
            f"{given} with learner.pp={c.learner.pp}: each wave fills and drains the pipeline; raise it to "
            f"{BUBBLE} * (learner.pp - 1) = {least} or more, or leave it out"
        )
    longest = c.longest_sequence
    completions = c.compared_per_step
    most = micro_batches_filled(c.learner, positions=completions * longest, sequences=completions)
    if wave >= most:
        yield (
            f"{given}: a batch of the longest sequences ({c.named_compared} = {completions} of {longest} tokens) "
            f"fills {most} micro-batches of learner.max_tokens_per_micro_batch={c.learner.max_tokens_per_micro_batch} "
            f"on each of {c.learner.dims.dp} data-parallel ranks, so no wave would begin before the batch is whole; "
            "lower it, or leave it out"
        )


def _of_batches(c: RunConfig) -> Iterator[tuple[str, str]]:
    """What looks at a whole batch before its first gradient, by its key, and what to set instead."""
    a = c.algorithm
    if a.whiten:
        yield "algorithm.whiten=true", "advantages are whitened where the whole batch is; set whiten=false"
    if a.advantage_mean in {"batch", "moving", "tracked"}:
        of = "the batch's" if a.advantage_mean == "batch" else "at first the batch's"
        yield f"algorithm.advantage_mean={a.advantage_mean}", f"the baseline is {of}; set advantage_mean=group or none"
    if a.advantage_std in {"batch", "advantages"}:
        given = f"algorithm.advantage_std={a.advantage_std}"
        yield given, "the std of rewards is the batch's; set advantage_std=group or none"
    if a.whiten_rewards:
        yield "algorithm.whiten_rewards=true", "moments of rewards take in the batch first; set whiten_rewards=false"
    if a.normalise_rewards == "batch":
        yield (
            "algorithm.normalise_rewards=batch",
            "the range of rewards is the batch's; set normalise_rewards=group or none",
        )
    if a.tokens.choose != "all":
        yield (
            f"algorithm.tokens.choose={a.tokens.choose}",
            "the tokens to choose are the batch's; set tokens.choose=all",
        )
    if a.balance.share is not None:
        yield (
            f"algorithm.balance.share={a.balance.share:g}",
            "the limits are of the whole minibatch; set balance.share=null",
        )
    if a.correction.normalises:
        yield f"{a.correction.normalises}=true", "the mean of the weights is the batch's; set normalise=false"
    if a.old_kl_limit is not None:
        yield (
            f"algorithm.old_kl_limit={a.old_kl_limit:g}",
            "the batch's KL is known after its last wave, and its one step is made then; set old_kl_limit=null",
        )
    if a.nll_coefficient:
        yield (
            f"algorithm.nll_coefficient={a.nll_coefficient:g}",
            "its mean is over the batch's right tokens, a second denominator beside the loss's; set nll_coefficient=0",
        )
    if a.credit == "gae":
        yield "algorithm.credit=gae", "the critic has no waves; set credit=completion or discounted"
    if a.pairs:
        yield (
            f"algorithm.preference.beta={a.preference.beta:g}",
            "its mean is over the pairs of the batch, of groups whose rewards differ; choose a policy gradient",
        )
    if a.routing_replay == "r2":
        yield (
            "algorithm.routing_replay=r2",
            "with one optimizer step a batch the learner's own experts are those of the pass that trains; set "
            "routing_replay=off or r3",
        )
    if c.train.epochs > 1:
        yield f"train.epochs={c.train.epochs}", "the first pass would end with a step before others; set epochs=1"
    if c.train.minibatches > 1:
        yield (
            f"train.minibatches={c.train.minibatches}",
            "minibatches are drawn from the whole batch, and short completions are finished first; set minibatches=1",
        )


def _of_the_learner(learner: LearnerSection) -> Iterator[tuple[str, str]]:
    """What wants the last backward pass, or the batch's count of tokens, beforehand."""
    if learner.overlap.gradients:
        yield (
            "learner.overlap.gradients=true",
            "ranks reduce gradients in the last backward pass, and none is known to be it; set overlap.gradients=false",
        )
    if learner.draft.train:
        yield (
            "learner.draft.train=true",
            "its loss is over the batch's tokens, whose number is not known yet, in a step of its own; set "
            "draft.train=false",
        )
    for kind, coefficient in learner.router.losses.items():
        yield (
            f"learner.router.{kind}={coefficient:g}",
            f"it is over the batch's tokens, whose number is not known yet, beside the loss's own count; set {kind}=0",
        )


def _of_sampling(c: RunConfig) -> Iterator[tuple[str, str]]:
    """Engines that do not sample while the learner computes."""
    if not c.rollout.served:
        yield (
            f"rollout.engine={c.rollout.engine}",
            "it samples in the learner's processes, which compute no gradient meanwhile; set rollout.server.replicas, "
            "or rollout=vllm or sglang",
        )
    elif c.rollout.server.colocated:
        yield (
            "rollout.server.colocated=true",
            "servers leave their GPUs while the learner computes; set colocated=false",
        )
