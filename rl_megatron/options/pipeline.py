"""``learner.pp``, ``vpp``, ``first_stage_layers``, ``last_stage_layers``: layers on several ranks."""

from __future__ import annotations

from rl_megatron.options.option import Option
from rl_megatron.section import Positive, Section


class PipelineKeys(Section):
    """Its keys."""

    pp: Positive = 1
    """Pipeline-parallel degree."""
    vpp: Positive = 1
    """Model chunks of each pipeline stage (interleaved schedule)."""
    first_stage_layers: Positive | None = None
    """Layers of the first pipeline stage; null: as the stages between, which share the rest equally."""
    last_stage_layers: Positive | None = None
    """Layers of the last pipeline stage; null: as the stages between."""


class Pipeline(Option):
    """Stages, by the 1F1B schedule; or chunks of stages, by its interleaved form (arXiv:2104.04473)."""

    keys = PipelineKeys
