"""The options of the learner, and all of them at once."""

from __future__ import annotations

from collections.abc import Mapping

from rl_megatron.options.device import Device
from rl_megatron.options.dtype import Precision
from rl_megatron.options.experts import ExpertParallel
from rl_megatron.options.head import OutputHead
from rl_megatron.options.layers import Layers
from rl_megatron.options.optimizer import Optimizer
from rl_megatron.options.option import Option
from rl_megatron.options.pipeline import Pipeline
from rl_megatron.options.recompute import Recompute
from rl_megatron.options.replicas import Replicas
from rl_megatron.options.tensor import TensorParallel

OPTIONS: Mapping[str, Option] = {
    "device": Device(),
    "dtype": Precision(),
    "layers": Layers(),
    "recompute": Recompute(),
    "tensor": TensorParallel(),
    "pipeline": Pipeline(),
    "experts": ExpertParallel(),
    "replicas": Replicas(),
    "head": OutputHead(),
    "optimizer": Optimizer(),
}
"""By the name of their file, in the order in which they act on a rank's bytes: what layers keep of a micro-batch
before how many are in flight."""
