"""Configurations of latent attention: what megatron's own gets, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.errors import ConfigError
from rl_megatron.learner.model.build import make_config
from rl_megatron.learner.model.decoder_config import LatentDecoderConfig
from rl_megatron.learner.model.latent import megatron_latent_keywords
from rl_megatron.models.named import NAMED
from rl_megatron.models.rotary import inverse_frequencies, softmax_scale
from rl_megatron.models.shape import Rope, Router
from rl_megatron.options.implementation import torch_only

V3 = NAMED["deepseek-v3"]


@pytest.mark.parametrize("name", ["deepseek-v3", "kimi-k2"])
def test_megatrons_own_rotary_embedding_turns_as_ours(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding, _yarn_get_mscale

    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")  # where it puts its frequencies
    shape = NAMED[name]
    options = megatron_latent_keywords(shape)
    theirs = YarnRotaryEmbedding(
        options["qk_pos_emb_head_dim"],
        rotary_base=options["rotary_base"],
        use_cpu_initialization=True,
        scaling_factor=options["rotary_scaling_factor"],
        original_max_position_embeddings=options["original_max_position_embeddings"],
        beta_fast=options["beta_fast"],
        beta_slow=options["beta_slow"],
        mscale=options["mscale"],
        mscale_all_dim=options["mscale_all_dim"],
    )
    angles, factor = theirs.get_emb(100)
    ours = torch.outer(torch.arange(100.0), inverse_frequencies(shape.rope_theta, 64, shape.rope, torch.device("cpu")))
    assert torch.allclose(angles[:, 0, 0, :32], ours, atol=1e-5)
    assert factor == pytest.approx(shape.rope.attention_factor)
    grown = _yarn_get_mscale(options["rotary_scaling_factor"], options["mscale_all_dim"])
    assert softmax_scale(shape.head_dim, shape.rope) == pytest.approx(grown * grown / math.sqrt(192))


@pytest.mark.parametrize("name", ["deepseek-v3", "kimi-k2"])
def test_megatrons_configuration_takes_the_options(name: str) -> None:
    shape = NAMED[name]
    config = LatentDecoderConfig(
        shape=shape,
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        **megatron_latent_keywords(shape),
    )
    assert config.multi_latent_attention
    assert (config.rope_type, config.kv_lora_rank, config.v_head_dim) == ("yarn", 512, 128)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope": Rope(kind="linear", factor=2.0)},
        {"rope": replace(V3.rope, truncate=False)},
        {"rope": replace(V3.rope, attention_factor=1.3)},
        {"norm_eps": 1e-5},
    ],
)
def test_what_megatrons_own_cannot_do_is_for_torch_layers(changes: dict[str, object]) -> None:
    assert torch_only(V3) is None
    assert "latent attention" in (torch_only(replace(V3, **changes)) or "")  # type: ignore[arg-type]


def test_groups_that_megatron_rates_otherwise_are_refused() -> None:
    make_config(V3, LearnerSection())
    best = Router(groups=8, top_groups=3, group_score="max", scaling=16.0)
    v2 = replace(V3, family="deepseek_v2", experts_per_token=6, router=best, normalize_top_k=False)
    with pytest.raises(ConfigError, match=r"a group of experts by its best 1; megatron scores it by its best .* = 2"):
        make_config(v2, LearnerSection())
    make_config(replace(v2, experts_per_token=3), LearnerSection())


def test_groups_with_fewer_experts_than_are_summed_are_refused() -> None:
    """torch says so only in the first pass: "selected index k out of range"."""
    single = replace(V3, router=replace(V3.router, groups=V3.num_experts, top_groups=V3.experts_per_token // 2))
    with pytest.raises(ConfigError, match=rf"{V3.num_experts} groups of 1 of .* best 2 count: set n_group in config"):
        make_config(single, LearnerSection())
