"""Moments in few bits: their bytes by hand, and where they are refused."""

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


@pytest.mark.parametrize(("dtype", "each"), [("bfloat16", 4 + 2 + 2), ("float8", 4 + 1 + 2)])
def test_moments_in_few_bits_have_fewer_bytes_and_a_step_copies_some(dtype: str, each: int) -> None:
    """By hand: ``each`` bytes of state a parameter where 12 were; 2 ** 26 parameters at once have both moments in
    float32, or the embedding, if that is larger."""
    few = ("learner.max_tokens_per_micro_batch=8192", "learner.head_dtype=float32")
    low = (f"learner.optimizer.moments_dtype={dtype}",)
    whole, half = (
        max(footprints(*recipe("qwen3_30b_a3b_80gb", *keys)), key=lambda found: found.terms["optimizer"]).terms
        for keys in (few, low)
    )
    assert half["optimizer"] == pytest.approx(whole["optimizer"] * each / 12)
    tp = recipe("qwen3_30b_a3b_80gb")[0].learner.tp
    copied = min(half["optimizer"] / each, max(2**26, 151936 // tp * 2048))
    assert half["activations"] + half["logits"] + half["step"] == pytest.approx(
        max(half["activations"] + half["logits"], 8 * copied)
    )
    config, shape = recipe("qwen3_30b_a3b", *low, "learner.gradient_dtype=bfloat16")
    assert all(found.terms["step"] == 0 for found in footprints(config, shape))  # gradients are read as they are


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("learner.device=cpu", "TransformerEngine's Adam keeps them, on GPUs alone; leave it out"),
        ("learner.dtype=float32", "megatron-core can do this only with learner.dtype=bfloat16; set it"),
        ("learner.optimizer.distributed=false", "only with learner.optimizer.distributed=true; set it"),
        ("learner.optimizer.name=muon", "only with learner.optimizer.name=adamw; set it"),
        ("learner.offload.optimizer=0.5", "that needs a learner without TransformerEngine, .* set one of the two"),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float8"])
def test_moments_in_few_bits_are_refused_where_nothing_keeps_them(dtype: str, keys: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"learner.optimizer.moments_dtype={dtype}.*{message}"):
        recipe("qwen3_30b_a3b", f"learner.optimizer.moments_dtype={dtype}", keys)


@pytest.mark.parametrize(
    ("dtype", "key", "slow", "quick", "message"),
    [
        ("float8", "beta1", 0.945, 0.944, "float8 has 4 bits, .* set it below 0.9444"),
        ("float8", "beta2", 0.997, 0.996, "bfloat16 has 8 bits, .* set it below 0.9961"),
        ("bfloat16", "beta1", 0.997, 0.996, "bfloat16 has 8 bits, .* set it below 0.9961"),
    ],
)
def test_moments_in_few_bits_that_would_not_decay_are_refused(
    dtype: str, key: str, slow: float, quick: float, message: str
) -> None:
    """What is rounded to the nearest by torch decays, or stays, as the refusal says: every number of a binade."""
    bits, kept = {"float8": (4, torch.float8_e4m3fn), "bfloat16": (8, torch.bfloat16)}[message.split()[0]]
    every = 1 + torch.arange(2 ** (bits - 1)) / 2 ** (bits - 1)
    for decay, all_fall in ((slow, False), (quick, True)):
        assert bool(((every * decay).to(kept).float() < every).all()) is all_fall
    low = f"learner.optimizer.moments_dtype={dtype}"
    recipe("qwen3_30b_a3b", low, f"learner.optimizer.{key}={quick}")
    with pytest.raises(ConfigError, match=f"{low} with learner.optimizer.{key}={slow}: {message}, or leave"):
        recipe("qwen3_30b_a3b", low, f"learner.optimizer.{key}={slow}")
