"""What layers keep for the backward pass, where it is: on the GPU or the host, and with plain attention, by hand."""

from __future__ import annotations

import math

import pytest

from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError
from rl_megatron.models.named import NAMED
from rl_megatron.models.shape import ModelShape
from rl_megatron.options.table import problems
from rl_megatron.scaling.host_memory import host_bytes
from rl_megatron.scaling.memory import footprints

_MOE = "learner.offload.activations.moe=true"


def recipe(name: str, *keys: str) -> tuple[RunConfig, ModelShape]:
    config = load_config(name, ["model.path=/models/given", *keys])
    return config, NAMED[str(config.model.name)]


def test_halves_of_layers_wait_in_the_hosts_memory() -> None:
    """By hand, of TransformerEngine's layers: rows of 8 experts with gate, up and product, a norm, and a router."""
    keys = ("learner.recompute.uniform=null", "slurm.gpu_memory_gb=null", "rollout.server.memory_fraction=null")
    (before, shape), (config, _) = recipe("qwen3_30b_a3b", *keys), recipe("qwen3_30b_a3b", *keys, _MOE)
    each = 2 * (8 * (2048 + 3 * 768) + 2 * 2048) + 12 * 128  # bytes of a token of a layer, over tp 4
    layer = 16384 * each / 4
    assert host_bytes(before, shape) == 0
    assert host_bytes(config, shape) == 8 * math.ceil(48 * layer / 2**30) * 2**30
    stays, all_of_it = (footprints(one, shape)[0].terms["activations"] for one in (config, before))
    assert all_of_it - stays == pytest.approx(46 * layer, rel=0.01)  # of the last two the copies may run on


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("learner.recompute.uniform=1", "learner.recompute.uniform=1: .* set one of the two"),
        ("learner.recompute.moe_act=true", "learner.recompute.moe_act=true: .* is a part of what would be moved"),
        ("learner.cuda_graphs=true", "graphs keep activations in memory of their own, .* set one of the two"),
        ("learner.fp8=tensorwise", "keep copies of weights in float8 among activations"),
        ("learner.dispatcher=deepep", "dispatcher=deepep: tensors of other streams"),
        ("learner.layers=a.package:layers", "what layers of your own keep is not known; leave it out"),
        ("learner.device=cpu", "there is no GPU to leave; leave it out"),
        ("learner.offload.activations.mlp=true", "activations.mlp=true: the model has no dense layers; leave it out"),
    ],
)
def test_activations_stay_on_gpus_where_moving_them_would_be_wrong(keys: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _refused("qwen3_30b_a3b", "learner.recompute.uniform=null", _MOE, keys)


def _refused(name: str, *keys: str) -> None:
    config, shape = recipe(name, *keys)
    raise ConfigError(" ".join(problems(config.learner, shape)))  # those that need the model's sizes


def test_attention_without_a_fused_kernel_keeps_probabilities_of_its_longest_sequences() -> None:
    """By hand: torch's layers with keys of two ranks; 32 heads' probabilities in float32 over tp 4."""
    keys = ("learner.layers=torch", "learner.recompute.uniform=null", "slurm.gpu_memory_gb=null")
    keys = (*keys, "rollout.server.memory_fraction=null", "learner.cp=2", "learner.dp=1")
    (short, shape), (long, _) = (recipe("qwen3_30b_a3b", *keys, f"rollout.max_new_tokens={n}") for n in (1024, 9216))
    more = 8192 * 48 * 32 / 4 * 8192 * 4  # tokens of a rank, layers, heads, keys, bytes
    held = [footprints(config, shape)[0].terms["activations"] for config in (short, long)]
    assert held[1] - held[0] == pytest.approx(more, rel=0.05)  # and the working set of the layer that computes
