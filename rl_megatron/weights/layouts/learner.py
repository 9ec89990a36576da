"""The sizes of the model of each role, and its layout over the role's ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rl_megatron.config.beside import frozen_folders, in_words_of, reward_model_roles
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError
from rl_megatron.feature import active
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import ParallelDims
from rl_megatron.weights.layouts.families import family_of, megatron_layout, read_shape
from rl_megatron.weights.layouts.layout import Layout


def learner_layout(config: RunConfig, shape: ModelShape) -> Layout:
    """The layout of a model of ``shape`` over the learner's ranks. Raises ConfigError that names each size that a
    degree does not divide."""
    learner = config.learner
    try:
        return megatron_layout(shape, learner.dims, stages=learner.stages)
    except ConfigError as error:  # its text is for any layout and names no configuration key
        raise ConfigError("\n".join(f"learner: {line}" for line in str(error).splitlines())) from error


def role_layout(config: RunConfig, shape: ModelShape, role: str) -> Layout:
    """The layout of the model of ``role`` over its ranks, where the policy has ``shape``. Raises as `role_shape`."""
    try:
        return learner_layout(config.of_role(role), role_shape(config, shape, role))
    except ConfigError as error:
        raise ConfigError(in_words_of(config, role, str(error))) from error


def job_shape(config: RunConfig, shape: ModelShape) -> ModelShape:
    """The sizes of the model that a run trains which starts from a model of ``shape``. Raises ConfigError for a model
    that scores where log-probs are trained."""
    if config.kind.scores:
        return replace(shape, scores=True, tie_embeddings=False)
    if shape.scores:
        raise ConfigError(
            f"model.path={config.model.path} is a sequence classifier, which scores texts; job={config.job} needs a "
            "model with an output layer: give the one that it was trained from"
        )
    return shape_with_features(config, shape)


def shape_with_features(config: RunConfig, shape: ModelShape) -> ModelShape:
    """``shape`` with what active features add to a policy. Raises ConfigError for a family that one cannot extend."""
    for feature in active(config.learner):
        shape = feature.shape(config.learner, shape)
    return shape


def role_shape(config: RunConfig, shape: ModelShape, role: str, base: Path | None = None) -> ModelShape:
    """The sizes of the model on the ranks of ``role``: a separate reference, teachers and reward models have those of
    their folders, paths from ``base`` (the working directory), all others the policy's ``shape``, which alone has draft
    layers. Raises ConfigError as readers do."""
    folder, key = frozen_folders(config).get(role, (None, ""))
    if folder is None:
        return replace(shape, drafts=False) if role in ("reference", "critic") else shape
    try:
        found = read_shape((base or Path()) / folder, config.learner.model)
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.path=", f"{key}=")) from error
    if role in reward_model_roles(config):
        if found.scores:
            return found
        raise ConfigError(
            f"{key}={folder} is no sequence classifier, so it has no score; give the folder that job=reward_model "
            "exported, or another ...ForSequenceClassification"
        )
    if found.scores:
        raise ConfigError(
            f"{key}={folder} is a sequence classifier, which has no log-probs to compare with; give a "
            "model with an output layer"
        )
    return found


def engine_layout(config: RunConfig, shape: ModelShape) -> Layout | None:
    """The ranks of the servers that a run starts, by their degrees; None if nobody knows how they cut the model."""
    section, table = config.rollout.server, family_of(shape).tables.get("engine")
    if section.addresses is not None or table is None:
        return None
    tp, dp = section.tp, section.dp
    etp = 1 if section.ep > 1 else tp * dp
    dims = ParallelDims(tp=tp, etp=etp, ep=section.ep, pp=section.pp, dp=dp * section.count)
    each, rest = divmod(shape.num_layers, section.pp)  # the rest goes to the last stages but one (vLLM, get_pp_indices)
    stages = tuple(each + (section.pp - 1 - rest <= stage < section.pp - 1) for stage in range(section.pp))
    try:
        return Layout(table=table, shape=shape, dims=dims, stages=stages)
    except ConfigError:  # sizes that the degrees do not divide, which engines pad
        return None
