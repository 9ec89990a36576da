"""``learner.offload``: state that waits in the host's memory, always or while servers sample on the same GPUs."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from rl_megatron.errors import ConfigError
from rl_megatron.options.option import Keywords, Option, Rank, Terms
from rl_megatron.section import Fraction, Section

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape


SLAB = 2**30
"""Bytes of the host that are pinned at once for what leaves a GPU while servers sample."""
_MOMENTS = 8 / 12  # of the state's bytes


class OffloadSection(Section):
    """What a rank keeps in the host's memory, not in its GPU's."""

    optimizer: Fraction = 0.0
    """Share of the optimizer's moments, rounded up to whole parameters. Those parameters are stepped on the CPU, which
    takes longer, and take 16 bytes each of the host's memory, or more: weight, moments and gradient in float32, of
    which weight and gradient are pinned in powers of two."""
    while_sampling: Literal["gradients", "optimizer"] | None = None
    """What leaves the GPU before servers that take turns with the learner (``rollout.server.colocated``) wake, until it
    is needed again: the memory of gradients and of weights' copies in float8, which costs nothing; or that, the
    optimizer's state, and the weights of a critic and a reference, which wait in as much pinned memory of the host."""


def leaving(learner: LearnerSection) -> frozenset[str]:
    """What leaves a GPU while servers sample: "gradients", without a copy, as do weights' copies in float8; and with a
    copy in the host's memory "optimizer", and "models", those whose weights are not pushed."""
    kinds = {"gradients": ("gradients",), "optimizer": ("gradients", "optimizer", "models")}
    return frozenset(kinds[learner.offload.while_sampling] if learner.offload.while_sampling else ())


class OffloadKeys(Section):
    """The section of keys of `Offload`."""

    offload: OffloadSection = OffloadSection()


class Offload(Option):
    """Steps a share of the parameters on the CPU (megatron-core's HybridDeviceOptimizer)."""

    keys = OffloadKeys

    def problems(self, learner: LearnerSection, shape: ModelShape | None) -> Iterator[str]:
        """CPU ranks, whose state is in the host's memory already, and state that is not shared out."""
        share = learner.offload.optimizer
        if share and learner.device == "cpu":
            yield f"learner.offload.optimizer={share:g} with learner.device=cpu would have no effect; leave it out"
        if (level := learner.offload.while_sampling) and learner.device == "cpu":
            yield (
                f"learner.offload.while_sampling={level} with learner.device=cpu would have no effect: there is no GPU "
                "to leave; leave it out"
            )
        lacking = {
            "learner.optimizer.name=adamw": learner.optimizer.name == "adamw",
            "learner.optimizer.distributed=true": learner.optimizer.distributed,
            "learner.dtype=bfloat16": learner.dtype == "bfloat16",
        }
        for key in (key for key, there in lacking.items() if share and not there):
            yield f"learner.offload.optimizer={share:g}: megatron-core can do this only with {key}; set it"

    def megatron(self, learner: LearnerSection, shape: ModelShape) -> Keywords:
        """The share, and copies that overlap with the step.

        Raises ConfigError where TransformerEngine or apex is installed: their Adam counts steps for all parameters,
        which an offloaded optimizer does not get back on a resume.
        """
        if not learner.offload.optimizer:
            return Keywords()
        for package in ("transformer_engine", "apex"):
            if importlib.util.find_spec(package) is not None:
                raise ConfigError(
                    f"learner.offload.optimizer={learner.offload.optimizer:g}: {package} is installed, with whose Adam "
                    "megatron-core 0.16.1 cannot resume an offloaded optimizer; set it to 0, or uninstall the package"
                )
        return Keywords(
            optimizer={
                "optimizer_cpu_offload": True,
                "optimizer_offload_fraction": learner.offload.optimizer,
                "overlap_cpu_optimizer_d2h_h2d": True,
            }
        )

    def memory(self, learner: LearnerSection, shape: ModelShape, rank: Rank, terms: Terms) -> Terms:
        """Bytes of the optimizer's state that stay: float32 weights, which ranks exchange, stay too."""
        return {**terms, "optimizer": terms["optimizer"] * (1 - _MOMENTS * learner.offload.optimizer)}
