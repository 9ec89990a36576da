"""Reduces gradients and gathers parameters while other layers compute (``learner.overlap``), by megatron's buckets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.distributed import DistributedDataParallel

from rl_megatron.errors import RLMegatronError
from rl_megatron.learner.model.attention import DecoderConfig

_NAMED = 5  # an error names at most so many parameters


class Buckets:
    """The buckets of a rank's chunks. Without ``learner.overlap`` its methods do nothing."""

    def __init__(self, config: DecoderConfig, chunks: Sequence[DistributedDataParallel]) -> None:
        self._config, self._chunks = config, chunks
        self._reduces = chunks[0].ddp_config.overlap_grad_reduce if chunks else False
        self._gathers = chunks[0].use_forward_hook if chunks else False
        if self._reduces:  # the schedule holds back the reduction in all micro-batches but the last
            waiting = [chunk.no_sync for chunk in chunks]
            config.no_sync_func = waiting if len(waiting) > 1 else waiting[0]

    def begin(self, *, again: bool) -> None:
        """Call it before a backward pass; ``again``: after another one since the last step.

        Raises RLMegatronError for that, because the gradients of the first are being reduced.
        """
        if self._reduces and again:
            raise RLMegatronError(
                "learner.overlap.gradients=true: a step takes one backward pass, whose gradients are reduced in its "
                "last micro-batch; call step before another backward, or set learner.overlap.gradients=false"
            )

    def end(self) -> None:
        """Call it after a backward pass. Raises RLMegatronError for parameters that got no gradient: megatron would
        wait for them."""
        if not self._reduces:
            return
        late = {p for group in self._groups for p in group.params - group.per_param_grad_ready_counts.keys()}
        if late:
            names = [name for chunk in self._chunks for name, p in chunk.module.named_parameters() if p in late]
            raise RLMegatronError(
                f"learner.overlap.gradients=true: {len(names)} parameters got no gradient, so that it is never reduced "
                f"({', '.join(names[:_NAMED])}); set learner.overlap.gradients=false"
            )

    def wait(self) -> None:
        """Wait until gradients whose reduction has begun are reduced; the next step waits for it once more."""
        for group in self._groups if self._reduces else ():
            if group.grad_reduce_handle is not None:  # else the step begins it
                group.grad_reduce_handle.wait()

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """Backward passes in it leave this rank's gradients to itself."""
        scheduled, self._config.no_sync_func = self._config.no_sync_func, None
        try:
            with contextlib.ExitStack() as stack:
                for chunk in self._chunks:
                    stack.enter_context(chunk.no_sync())
                yield
        finally:
            self._config.no_sync_func = scheduled

    def gather(self) -> None:
        """Gather the parameters that the last step changed and no forward pass has gathered. Every rank calls it."""
        for group in self._groups if self._gathers else ():
            if group.param_gather_handle is not None or not group.param_gather_dispatched:
                group.start_param_sync(force_sync=True)

    @property
    def _groups(self) -> list[Any]:
        return [g for chunk in self._chunks for g in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)]
