"""Finds the model that a run starts from, or makes a tiny one; and reads its sizes, without torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError
from rl_megatron.models.named import NAMED
from rl_megatron.models.shape import ModelShape
from rl_megatron.models.tiny import TinySizes, make_tiny_model, tiny_shape
from rl_megatron.weights.layouts.families import read_shape
from rl_megatron.weights.layouts.learner import job_shape


def starting_folder(config: RunConfig) -> Path:
    """Returns the folder of the model that the learner starts from; makes a tiny model if no path is given."""
    if config.model.path is not None:
        return config.model.path
    return make_tiny_model(_tiny(config), config.model.cache_dir, config.seed)


def starting_shape(config: RunConfig, *, off_cluster: bool = False) -> ModelShape:
    """Returns the sizes of the model that the run trains, without making it. Raises ConfigError for a folder without a
    model that is known and fits the job. ``off_cluster``: the folder may be missing if ``model.name`` is known."""
    named = NAMED.get(config.model.name or "")
    if off_cluster and named is not None and not (config.model.path or Path()).is_dir():
        return job_shape(config, named)
    if (path := config.model.path) is not None:
        if off_cluster and not path.is_dir():
            raise ConfigError(
                f"model.path={path}: there is no such folder here; for the plan, give a folder with the model's "
                f"config.json, or set model.name to one of {', '.join(NAMED)}"
            )
        return job_shape(config, read_shape(path, config.learner.model))
    return job_shape(config, tiny_shape(_tiny(config)))


def _tiny(config: RunConfig) -> TinySizes:
    """Returns the tiny model's sizes. vLLM's attention on CPUs supports no heads below 32, so servers get fewer."""
    sizes = TinySizes.of(config.model.tiny)
    return sizes if config.rollout.embedded else replace(sizes, num_heads=2, head_dim=32)
