"""Extends megatron's configuration of a decoder by what our layers read: the model's shape and an option."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from rl_megatron.models.shape import ModelShape


@dataclass
class DecoderConfig(TransformerConfig):
    """Megatron's configuration, and the shape that it was made from."""

    shape: ModelShape = None  # type: ignore[assignment]  # megatron's fields before it have defaults
    recompute_up_projections: bool = False
    """Whether our latent attention discards queries, keys and values, and projects them again in the backward pass."""


@dataclass
class LatentDecoderConfig(DecoderConfig, MLATransformerConfig):
    """Adds the options of megatron's own latent attention, which only its TransformerEngine layers use."""


def device_of(config: TransformerConfig) -> torch.device:
    """The device that parameters are created on."""
    return torch.device("cpu") if config.use_cpu_initialization else torch.device("cuda", torch.cuda.current_device())
