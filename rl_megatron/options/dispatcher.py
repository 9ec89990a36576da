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


DEEPEP_RANKS = (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)
"""Groups of ranks that DeepEP has settings for (deep_ep/buffer.py, get_dispatch_config)."""


_CHUNK = 64  # HYBRIDEP_TOKEN_ALIGNMENT of megatron-core 0.19.2
_HYBRIDEP = "hybrid_ep_cpp"  # what the branch hybrid-ep compiles, and the others do not


class DispatcherKeys(Section):
    """The key of `Dispatcher`."""

    dispatcher: Literal["alltoall", "deepep", "hybridep"] = "alltoall"
    """What sends tokens to the ranks of their experts. alltoall: NCCL's or gloo's all-to-all, a copy of a token for
    each of its experts. deepep: DeepEP's kernels, a copy for each node that has some. hybridep: those of its branch
    hybrid-ep, which also sort tokens by expert, and want one size of micro-batches (learner.padding). Both need GPUs
    and bfloat16, take buffers of their own that no plan counts, and have not been run."""


class Dispatcher(Option):
    """Chooses megatron-core's dispatcher.

    Ours are packed micro-batches, whose lengths differ: megatron-core's all-gather takes equal ones. So does HybridEP,
    whose ranks gather each other's routing maps (deep_ep's executor.cu, allgather_routing_map) into a buffer as long as
    the first micro-batch (moe/fused_a2a.py): with one size to pad to all are.
    """

    keys = DispatcherKeys

    def problems(self, learner: LearnerSection, shape: ModelShape | None) -> Iterator[str]:
        """Kernels on CPUs, in float32, without ranks to send to, for a model without experts; HybridEP of unequal
        lengths."""
        if learner.dispatcher == "alltoall":
            return
        given, d = f"learner.dispatcher={learner.dispatcher}", learner.dims
        if learner.device == "cpu":
            yield f"{given} with learner.device=cpu: its kernels need GPUs; set learner.dispatcher=alltoall"
        if learner.dtype == "float32":
            yield f"{given} with learner.dtype=float32: its kernels send bfloat16; set learner.dtype=bfloat16"
        if d.ep * d.etp == 1:
            yield f"{given} with learner.ep=1 and learner.etp=1: no token leaves its rank; leave it out"
        elif learner.dispatcher == "deepep" and d.ep * d.etp not in DEEPEP_RANKS:
            known = ", ".join(map(str, DEEPEP_RANKS))
            yield (
                f"{given} with learner.ep={d.ep} and learner.etp={d.etp}: DeepEP has no settings for {d.ep * d.etp} "
                f"ranks, only for {known}; change their product to one of them"
            )
        if learner.dispatcher == "hybridep" and len(learner.padding.sizes) != 1:
            yield (
                f"{given} with learner.padding.tokens={learner.padding.tokens or 'null'}: its ranks exchange routing "
                "maps of equal length; set it to one size for all micro-batches, "
                f"learner.padding.tokens={learner.max_tokens_per_micro_batch}"
            )
        if learner.dispatcher == "hybridep" and (
            odd := [n for n in learner.padding.sizes if n % (_CHUNK * d.tp * d.cp)]
        ):
            yield (
                f"{given} with learner.padding.tokens={odd[0]}, learner.tp={d.tp} and learner.cp={d.cp}: its kernels "
                f"take chunks of {_CHUNK} tokens of a rank; round it up to a multiple of {_CHUNK * d.tp * d.cp}"
            )
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
                "(https://github.com/deepseek-ai/DeepEP); install it, or set learner.dispatcher=alltoall"
            )
        if learner.dispatcher == "hybridep" and importlib.util.find_spec(_HYBRIDEP) is None:
            raise ConfigError(
                f"learner.dispatcher=hybridep: the package deep_ep here has no {_HYBRIDEP}; install that of the branch "
                "hybrid-ep (https://github.com/deepseek-ai/DeepEP/tree/hybrid-ep), or set learner.dispatcher=deepep"
            )
        backend = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": learner.dispatcher}
        return Keywords(model={**backend, **lengths})
