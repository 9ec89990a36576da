"""Sequences of a step against the data-parallel ranks that share them."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.preflight.subject import Found, Subject, note


def check(subject: Subject) -> Iterator[Found]:
    """See `preflight.subject.Check`."""
    rollout, train, ranks = subject.config.rollout, subject.config.train, subject.config.learner.dims.dp
    sequences = rollout.prompts_per_step * rollout.group_size // train.minibatches
    if sequences < ranks:
        yield note(
            f"an optimizer step has rollout.prompts_per_step={rollout.prompts_per_step} * rollout.group_size="
            f"{rollout.group_size} / train.minibatches={train.minibatches} = {sequences} sequences for "
            f"{ranks} data-parallel ranks (learner.dp), so {ranks - sequences} of them have nothing to do; raise "
            "rollout.prompts_per_step, or lower train.minibatches"
        )
