from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.build import _check_fits
from rl_megatron.config import RunConfig
from rl_megatron.errors import ConfigError
from rl_megatron.models.named import NAMED
from rl_megatron.models.shape import Rope

SHAPE = NAMED["qwen3-30b-a3b"]


def test_only_what_the_engine_runs_starts() -> None:
    config = RunConfig()
    _check_fits(config, SHAPE)
    with pytest.raises(ConfigError, match=r"model_type='mixtral': the engine that samples.*; allowed: 'qwen3_moe'"):
        _check_fits(config, replace(SHAPE, family="mixtral", qk_norm=None))
    with pytest.raises(ConfigError, match=r"rope_type='yarn': the engine that samples here has plain rotary"):
        _check_fits(config, replace(SHAPE, rope=Rope(kind="yarn")))
