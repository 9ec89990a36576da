"""Rules of what a run keeps beside its metrics: checkpoints and profiles that it could not have are refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rl_megatron.config.run import RunConfig


def problems_of_keeping(c: RunConfig) -> Iterator[str]:
    """A line for each rule that the configuration breaks."""
    yield from _checkpoint_problems(c)
    yield from _profile_problems(c)


def _checkpoint_problems(c: RunConfig) -> Iterator[str]:
    """A line for each rule by which no checkpoint, or none but the last, would be kept."""
    saves, every = c.checkpoint, c.checkpoint.every
    given = f"checkpoint.keep_best={saves.keep_best}"
    if not saves.keep_best:
        return
    if not every:
        yield f"{given} with checkpoint.every=0: only the last step's checkpoint is written; set checkpoint.every"
    elif c.eval.mode != "blocking":
        yield (
            f"{given} with eval.mode={c.eval.mode}: a checkpoint is written before its step's evaluation ends; set "
            "eval.mode=blocking"
        )
    elif not c.eval.every or every % c.eval.every:
        yield (
            f"{given} compares eval/accuracy, which is measured every "
            f"eval.every={c.eval.every} steps, but checkpoints are written every checkpoint.every={every}; make this a "
            "multiple of that"
        )


def _profile_problems(c: RunConfig) -> Iterator[str]:
    asked, ranks = c.profile, c.learner.dims.world_size
    if asked.steps and max(asked.steps) > c.train.steps and c.written_epochs is None:
        yield f"profile.steps has {max(asked.steps)}, but train.steps={c.train.steps}; leave out later ones"
    if max(asked.ranks) >= ranks:
        yield (
            f"profile.ranks has {max(asked.ranks)}, but learner.tp, cp, dp and pp make {ranks} ranks, from 0 on; give "
            "some of these"
        )
    if c.learner.device == "cpu" and asked.memory:
        yield "profile.memory=true with learner.device=cpu: it is for GPUs; leave it out"
