"""Finds the model that a run starts from, or makes a tiny one; and reads its sizes, without torch."""

from __future__ import annotations

import math
from pathlib import Path

from rl_megatron.config.run import RunConfig, TinyModelSection
from rl_megatron.models.shape import ModelShape
from rl_megatron.models.tiny import HEAD_DIM, make_tiny_model, tiny_shape
from rl_megatron.weights.layouts.families import read_shape
from rl_megatron.weights.layouts.learner import job_shape

_LEAST_HEAD_DIM = 32  # that vLLM's attention kernels on CPUs support


def starting_folder(config: RunConfig) -> Path:
    """The folder of the model that the learner starts from; makes a tiny model if no path is given."""
    if config.model.path is not None:
        return config.model.path
    return make_tiny_model(_tiny(config), config.model.cache_dir, config.seed)


def starting_shape(config: RunConfig) -> ModelShape:
    """The sizes of the model that the run trains, without making it. Raises ConfigError for a folder without a model
    that is known and fits the job."""
    if config.model.path is not None:
        return job_shape(config, read_shape(config.model.path, config.learner.model))
    return job_shape(config, tiny_shape(_tiny(config)))


def _tiny(config: RunConfig) -> TinyModelSection:
    """The tiny model's sizes. Servers' CPU kernels need wider heads, so for them it gets fewer heads."""
    tiny = config.model.tiny
    if tiny.head_dim is not None or config.rollout.embedded:
        return tiny
    heads = max(1, tiny.num_heads * HEAD_DIM // _LEAST_HEAD_DIM)
    kv_heads = math.gcd(heads, tiny.num_kv_heads)
    return tiny.model_copy(update={"head_dim": _LEAST_HEAD_DIM, "num_heads": heads, "num_kv_heads": kv_heads})
