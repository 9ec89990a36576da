"""The folder of adapters that peft and engines load, from a run's checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rl_megatron.config.sections.learner import LoraSection
from rl_megatron.errors import ConfigError
from rl_megatron.files import write_atomically
from rl_megatron.models.shape import ModelShape
from rl_megatron.weights.checkpoints.convert import options_of
from rl_megatron.weights.checkpoints.hugging_face import write_safetensors
from rl_megatron.weights.checkpoints.megatron import adapter_copies, held_lora, is_megatron
from rl_megatron.weights.checkpoints.streaming import OnProgress, Share, Sink, write_files
from rl_megatron.weights.formats.hf_folder import INDEX, SINGLE
from rl_megatron.weights.layouts.families import megatron_layout, read_shape
from rl_megatron.weights.layouts.lora import ranks_of_parts

PREFIX = "base_model.model."  # peft's, of every tensor
OF_EXPERTS_ALONE = {
    *("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"),
    *("olmoe", "qwen3_moe", "qwen3_next"),
}
"""Families in which peft 0.21 takes ``gate_proj``, ``up_proj`` and ``down_proj`` for names of routed experts alone
(``_MOE_TARGET_MODULE_MAPPING`` of ``utils/transformers_weight_conversion.py``)."""
WITH_EXPERTS = OF_EXPERTS_ALONE | {"mixtral", "minimax_m2"}
"""Families for which it converts adapters of routed experts."""


def adapters_to_peft(
    source: Path,
    out: Path,
    *,
    config: Path,
    family: str | None = None,
    on_progress: OnProgress = lambda n, total: None,
    share: Share | None = None,
) -> list[int]:
    """Write the adapters of a run's checkpoint as the folder that peft loads, in their stored dtype.

    ``config`` is the folder of the model that they stand beside; where it has weights, they are compared. Returns and
    raises as `megatron_to_hf`, and as `raise_other_base`.
    """
    lora, shape = held_lora(source), read_shape(config, family)
    if lora is None:
        raise ConfigError(f"{source} holds a whole model; there are no adapters to write")
    if of_unknown_base(source, config) is None:
        from rl_megatron.weights.adapters.merging import base_digest, raise_other_base  # imports torch

        raise_other_base(source, lora, base_digest(config, family), str(config))
    tensors, files = adapter_copies(source, shape, lora)
    named = tuple(replace(tensor, name=PREFIX + name) for name, tensor in tensors.items())
    told = json.dumps(peft_config(lora, shape, config), indent=2) + "\n"

    def finish(folder: Path, _: Mapping[str, list[dict[str, object]]]) -> None:
        write_atomically(folder / "adapter_config.json", told.encode())

    sink = Sink(name="adapter_model.safetensors", tensors=named, write=write_safetensors)
    options = options_of(config, family, None, 0)
    return write_files(
        source, out, [sink], files, on_progress, finish, companion=config, options=options, share=share or Share()
    )


def of_unknown_base(source: Path, base: Path) -> str | None:
    """Why nothing says whether the adapters of ``source`` were trained beside the model of ``base``; None if it can be
    known."""
    lora = held_lora(source)
    if lora is None or lora.base is None:
        return f"{source} does not say beside which model its adapters were trained"
    if is_megatron(base) or any((base / name).is_file() for name in (INDEX, SINGLE)):
        return None
    return f"{base} has no weights to compare with those that the adapters of {source} were trained beside"


def left_by_peft(source: Path, config: Path, family: str | None) -> str | None:
    """A line to show about adapters of ``source`` that peft leaves out, of the model of ``config``; None if it takes
    all."""
    lora, shape = held_lora(source), read_shape(config, family)
    if lora is None or shape.family in WITH_EXPERTS:
        return None
    if not any("{expert}" in part for part in ranks_of_parts(megatron_layout(shape), lora)):
        return None
    return (
        f"peft 0.21 leaves out the adapters of routed experts of model_type={shape.family!r}, without an error; "
        "--merge makes a model with all of them"
    )


def peft_config(lora: LoraSection, shape: ModelShape, base: Path) -> dict[str, object]:
    """peft's adapter_config.json.

    peft 0.21 has experts of one tensor a layer, as transformers 5 does, gate and up in one: twice the rank there. Where
    it takes the linears' names for experts', those of dense layers and shared experts are named as parameters, which
    vLLM 0.32 and SGLang 0.5.21 do not read.
    """
    by_part, rank = ranks_of_parts(megatron_layout(shape), lora), lora.rank or 0
    routed = {part.removesuffix(".weight"): each for part, each in by_part.items() if "{expert}" in part}
    ranks, alphas = dict[str, int](), dict[str, float]()
    for part, each in routed.items() if set(routed.values()) - {rank} else ():
        ranks[r"experts\.\d+\." + part.rpartition(".")[2]] = each
        ranks |= {r"experts\.gate_up_proj": 2 * each, r"experts\.down_proj": each}
        alphas[r"experts\.gate_up_proj"] = 2 * lora.alpha
    named = (part.rpartition("{layer}.")[2] for part in by_part if ".mlp." in part and "{expert}" not in part)
    beside = sorted(named) if shape.family in OF_EXPERTS_ALONE else []
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({part.removesuffix(".weight").rpartition(".")[2] for part in by_part}),
        "target_parameters": beside or None,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
    }
