"""The options and files with which servers start if weights are quantised."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from launcher.servers.degrees import degree_problems
from launcher.servers.pool import ServedEngines, _tolerance
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError
from rl_megatron.models.named import NAMED
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.rollout.servers.vllm.adapter import VLLMAdapter
from rl_megatron.weights.formats.served import FORMATS
from rl_megatron.weights.layouts.families import hf_layout, read_shape
from rl_megatron.weights.servers.mirror import Mirror

METHODS = {"none": None, "fp8": "fp8", "int8": "compressed-tensors"}
GPU = ["rollout=vllm", "learner.device=cuda", "learner.dtype=bfloat16"]


SIZES = TinySizes(hidden_size=128, num_kv_heads=4, head_dim=32, expert_width=128)  # no block is cut


def config_with(*overrides: str) -> RunConfig:
    return load_config("tiny_cpu", [*GPU, *overrides])


@pytest.mark.parametrize("kind", ["none", "fp8", "int8"])
def test_servers_start_with_the_config_that_the_mirrors_folder_has(tmp_path: Path, kind: str) -> None:
    folder = make_tiny_model(SIZES, tmp_path / "cache", seed=0)
    own = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "of the folder"}}
    (folder / "config.json").write_text(json.dumps(own))
    shape, packages = read_shape(folder), tmp_path / "packages"
    packages.mkdir()
    config = config_with(f"rollout.server.quantization={kind}")
    ServedEngines(config, VLLMAdapter(shape), folder, tmp_path, shape)._write_models(packages)
    shapes = hf_layout(shape).local_shapes(0)
    path = tmp_path / "w" / "model.safetensors"
    Mirror.make(path, shapes, torch.bfloat16, folder / "config.json", FORMATS[kind])
    mirror = Mirror(path, shapes, torch.bfloat16, FORMATS[kind])
    text = mirror.path.with_name("config.json").read_text()
    for name in ("bare", "model"):
        assert (packages / name / "config.json").read_text() == text
    assert [path.name for path in (packages / "bare").iterdir()] == ["config.json"]
    assert (packages / "model" / "tokenizer.json").is_file()
    assert not list(packages.rglob("*.safetensors"))
    assert json.loads(text).get("quantization_config", {}).get("quant_method") == METHODS[kind]
    if kind != "none":
        assert mirror.num_bytes < 2 * sum(tensor.numel() for tensor in mirror.tensors.values())


def test_a_model_without_such_a_format_is_refused_before_anything_starts(tmp_path: Path) -> None:
    shape = replace(NAMED["qwen3-30b-a3b"], family="gpt_oss", num_layers=1)
    config = config_with("rollout.server.quantization=fp8")
    with pytest.raises(
        ConfigError, match=r"experts\.\w+ \[.*\] is not a matrix, and stacked experts cannot be quantised"
    ):
        ServedEngines(config, VLLMAdapter(shape), tmp_path, tmp_path, shape)


def test_the_probe_tolerates_what_quantising_does_unless_a_tolerance_is_given() -> None:
    fp8, given = "rollout.server.quantization=fp8", "rollout.server.probe_tolerance=0.5"
    assert [_tolerance(config_with(*more)) for more in ((), (fp8,), (fp8, given))] == [0.25, 1.0, 0.5]


@pytest.mark.parametrize(
    ("model", "keys", "told"),
    [
        ("qwen3-235b-a22b", ("tp=4",), []),
        ("qwen3-235b-a22b", ("tp=8", "ep=8"), []),
        ("qwen3-235b-a22b", ("tp=8",), ["192 of the 1536 rows of {experts}.gate_proj.weight"]),
        ("qwen3-30b-a3b", ("tp=8", "dp=1"), ["96 of the 768 rows of {experts}.gate_proj.weight"]),
        ("qwen3-30b-a3b", ("tp=2",), []),
        ("deepseek-v3", ("tp=16",), []),
        ("deepseek-v3", ("tp=32",), ["64 of the 2048 rows of {experts}.gate_proj.weight"]),
        ("deepseek-v3", ("tp=16", "dp=2", "ep=32"), []),
    ],
)
def test_degrees_that_cut_blocks_are_refused(model: str, keys: tuple[str, ...], told: list[str]) -> None:
    """By the sizes and degrees at which vLLM and SGLang end (validate_fp8_block_shape, fp8.py)."""
    config = config_with("rollout.server.quantization=fp8", *(f"rollout.server.{key}" for key in keys))
    found = degree_problems(config, NAMED[model])
    assert bool(found) == bool(told)
    for text in told:
        (line,) = [line for line in found if "{expert}.gate_proj" in line]
        assert text.format(experts="model.layers.{layer}.mlp.experts.{expert}") in line
        assert f"or set rollout.server.ep={config.rollout.server.tp}, so that ranks have whole experts" in line
    int8 = config_with("rollout.server.quantization=int8", *(f"rollout.server.{key}" for key in keys))
    assert degree_problems(int8, NAMED[model]) == []
