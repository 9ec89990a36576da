"""``rollout.server.quantization``: servers hold weights in float8 or int8, quantized by the sending ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rl_megatron.feature import Feature
from rl_megatron.rules import CheckFunction, Excludes, Not, On

if TYPE_CHECKING:
    from rl_megatron.config.run import RunConfig
    from rl_megatron.models.shape import ModelShape

_QUANTIZED = On("rollout.server.quantization", Not("none"))
_NONE = "set rollout.server.quantization=none"


def _cut_blocks(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    from rl_megatron.features.quantize.encoding import block_problems

    return block_problems(config, shape)


FEATURE = Feature(
    name="quantize",
    rules=(
        Excludes(
            one=_QUANTIZED,
            other=On("learner.device", "cpu"),
            why="the engines' kernels for quantized weights need GPUs",
            fix=_NONE,
        ),
        Excludes(
            one=_QUANTIZED,
            other=On("learner.dtype", Not("bfloat16")),
            why="the engines' kernels compute in bfloat16",
            fix="set learner.dtype=bfloat16",
        ),
        Excludes(
            one=_QUANTIZED,
            other=On("rollout.server.addresses"),
            why="the run cannot see the format of running servers",
            fix=_NONE,
        ),
        Excludes(
            one=On("weights.push", "adapters"),
            other=_QUANTIZED,
            why="the run pushes the model only once, unchanged",
            fix="leave the key out, or set weights.push=merged",
        ),
        CheckFunction(_cut_blocks, where="shape"),
    ),
    encoding="rl_megatron.features.quantize.encoding:encoding",
)
