"""Moments in bfloat16: their bytes by hand, and where they are refused."""

from __future__ import annotations

import pytest
import torch

from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError
from rl_megatron.models.named import NAMED
from rl_megatron.models.shape import ModelShape
from rl_megatron.scaling.memory import footprints


def recipe(name: str, *keys: str) -> tuple[RunConfig, ModelShape]:
    config = load_config(name, ["model.path=/models/given", *keys])
    return config, NAMED[str(config.model.name)]


LOW = "learner.optimizer.moments_dtype=bfloat16"


def test_moments_in_bfloat16_have_fewer_bytes_and_a_step_copies_some() -> None:
    """By hand: 8 bytes of state a parameter where 12 were; 2 ** 26 parameters at once have both moments in float32, or
    the embedding, if that is larger."""
    few = ("learner.max_tokens_per_micro_batch=8192", "learner.head_dtype=float32")
    each = 4 + 2 + 2
    whole, half = (
        max(footprints(*recipe("qwen3_30b_a3b_80gb", *keys)), key=lambda found: found.terms["optimizer"]).terms
        for keys in (few, (LOW,))
    )
    assert half["optimizer"] == pytest.approx(whole["optimizer"] * each / 12)
    tp = recipe("qwen3_30b_a3b_80gb")[0].learner.tp
    copied = min(half["optimizer"] / each, max(2**26, 151936 // tp * 2048))
    assert half["activations"] + half["logits"] + half["step"] == pytest.approx(
        max(half["activations"] + half["logits"], 8 * copied)
    )
    config, shape = recipe("qwen3_30b_a3b", LOW, "learner.gradient_dtype=bfloat16")
    assert all(found.terms["step"] == 0 for found in footprints(config, shape))  # gradients are read as they are


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("learner.device=cpu", "TransformerEngine's Adam keeps them, on GPUs alone; leave it out"),
        ("learner.dtype=float32", "megatron-core can do this only with learner.dtype=bfloat16; set it"),
        ("learner.optimizer.name=muon", "only with learner.optimizer.name=adamw; set it"),
        ("learner.offload.optimizer=0.5", "that needs a learner without TransformerEngine, .* set one of the two"),
    ],
)
def test_moments_in_bfloat16_are_refused_where_nothing_keeps_them(keys: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"{LOW}.*{message}"):
        recipe("qwen3_30b_a3b", LOW, keys)


@pytest.mark.parametrize("key", ["beta1", "beta2"])
def test_moments_in_bfloat16_that_would_not_decay_are_refused(key: str) -> None:
    """Torch's rounding to the nearest decides, for every number of a binade, as the refusal says."""
    every, slow, quick = 1 + torch.arange(2**7) / 2**7, 0.997, 0.996
    for decay, all_fall in ((slow, False), (quick, True)):
        assert bool(((every * decay).to(torch.bfloat16).float() < every).all()) is all_fall
    recipe("qwen3_30b_a3b", LOW, f"learner.optimizer.{key}={quick}")
    message = "bfloat16 has 8 bits, .* set it below 0.9961, or leave"
    with pytest.raises(ConfigError, match=f"{LOW} with learner.optimizer.{key}={slow}: {message}"):
        recipe("qwen3_30b_a3b", LOW, f"learner.optimizer.{key}={slow}")
