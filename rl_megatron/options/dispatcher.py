"""``learner.dispatcher``: what sends tokens to the ranks of their experts."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from rl_megatron.errors import ConfigError
from rl_megatron.options.option import Keywords, Option
from rl_megatron.section import Section

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape


class DispatcherKeys(Section):
    """The key of `Dispatcher`."""

    dispatcher: Literal["alltoall", "deepep", "hybridep"] = "alltoall"
    """What sends tokens to the ranks of their experts. alltoall: NCCL's or gloo's all-to-all, a copy of a token for
    each of its experts. deepep: DeepEP's kernels, a copy for each node that has some; hybridep: those of DeepEP's
    branch hybrid-ep. Both need GPUs and bfloat16, and take buffers of their own that no plan counts; neither has been
    run."""


class Dispatcher(Option):
    """Chooses megatron-core's dispatcher. Its all-gather needs micro-batches of equal length, and ours are packed."""

    keys = DispatcherKeys

    def problems(self, learner: LearnerSection, shape: ModelShape | None) -> Iterator[str]:
        """DeepEP on CPUs, in float32, without ranks to send to, and for a model without experts."""
        if learner.dispatcher == "alltoall":
            return
        given, d = f"learner.dispatcher={learner.dispatcher}", learner.dims
        if learner.device == "cpu":
            yield f"{given} with learner.device=cpu: its kernels need GPUs; set learner.dispatcher=alltoall"
        if learner.dtype == "float32":
            yield f"{given} with learner.dtype=float32: its kernels send bfloat16; set learner.dtype=bfloat16"
        if d.ep * d.etp == 1:
            yield f"{given} with learner.ep=1 and learner.etp=1: no token leaves its rank; leave it out"
        if shape is not None and not shape.num_experts:
            yield f"{given}: model_type={shape.family!r} has no experts; leave it out"

    def megatron(self, learner: LearnerSection, shape: ModelShape) -> Keywords:
        """The dispatcher, for dense models too: megatron-core checks it against ``variable_seq_lengths``.

        Raises ConfigError if the package is missing.
        """
        lengths: dict[str, object] = {"variable_seq_lengths": True}
        if learner.dispatcher == "alltoall":
            return Keywords(model={"moe_token_dispatcher_type": "alltoall", **lengths})
        if importlib.util.find_spec("deep_ep") is None:
            raise ConfigError(
                f"learner.dispatcher={learner.dispatcher}: the package deep_ep is not installed here "
                "(https://github.com/deepseek-ai/DeepEP; hybridep needs its branch hybrid-ep); install it, or set "
                "learner.dispatcher=alltoall"
            )
        backend = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": learner.dispatcher}
        return Keywords(model={**backend, **lengths})
