"""Compares the sequences of a step with the data-parallel ranks that share them."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.preflight.subject import Found, Subject, note


def check(subject: Subject) -> Iterator[Found]:
    """Yields a note if an optimizer step has fewer sequences than data-parallel ranks."""
    config, ranks = subject.config, subject.config.learner.dims.dp
    sequences = config.completions_per_step // config.train.minibatches
    if sequences < ranks:
        yield note(
            f"an optimizer step has {sequences} sequences ({config.named_completions} / train.minibatches="
            f"{config.train.minibatches}) for {ranks} data-parallel ranks (learner.dp), so {ranks - sequences} of them "
            "are idle; raise rollout.prompts_per_step, or lower train.minibatches"
        )
