"""The layout of the model over the learner's ranks."""

from __future__ import annotations

from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError
from rl_megatron.models.shape import ModelShape
from rl_megatron.weights.layouts.families import megatron_layout
from rl_megatron.weights.layouts.layout import Layout


def learner_layout(config: RunConfig, shape: ModelShape) -> Layout:
    """The layout over the learner's ranks. Raises ConfigError that names each size that a degree does not divide."""
    learner = config.learner
    try:
        return megatron_layout(shape, learner.dims, vocab_multiple=learner.vocab_multiple, stages=learner.stages)
    except ConfigError as error:  # its text is for any layout and names no configuration key
        raise ConfigError("\n".join(f"learner: {line}" for line in str(error).splitlines())) from error
