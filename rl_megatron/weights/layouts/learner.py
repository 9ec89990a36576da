"""The sizes of the model of each role, and its layout over the role's ranks."""

from __future__ import annotations

from pathlib import Path

from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError
from rl_megatron.models.shape import ModelShape
from rl_megatron.weights.layouts.families import megatron_layout, read_shape
from rl_megatron.weights.layouts.layout import Layout


def learner_layout(config: RunConfig, shape: ModelShape) -> Layout:
    """The layout over the learner's ranks. Raises ConfigError that names each size that a degree does not divide."""
    learner = config.learner
    try:
        return megatron_layout(shape, learner.dims, vocab_multiple=learner.vocab_multiple, stages=learner.stages)
    except ConfigError as error:  # its text is for any layout and names no configuration key
        raise ConfigError("\n".join(f"learner: {line}" for line in str(error).splitlines())) from error


def role_shape(config: RunConfig, shape: ModelShape, role: str, base: Path | None = None) -> ModelShape:
    """The sizes of the model on the ranks of ``role``: a separate reference has those of ``algorithm.kl.reference``, a
    path from ``base`` (the working directory), all others the policy's ``shape``. Raises ConfigError as readers do."""
    folder = config.algorithm.kl.reference
    if role != "reference" or folder is None:
        return shape
    try:
        return read_shape((base or Path()) / folder, config.learner.model)
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.path=", "algorithm.kl.reference=")) from error
