"""Layouts of LoRA adapters, derived from the layouts of their matrices. No row is written by hand.

A matrix that is cut along its rows has A whole and B cut alike; one that is cut along its columns has A cut alike and B
whole. A local matrix of several Hugging Face matrices (queries over keys and values, gate over up) has all their As,
one below the other. It has one B, with rows in the matrix's order. Names are peft's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from typing_extensions import override

from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.feature import AdapterLayouts
from rl_megatron.features.lora.feature import Adaptable, LoraSection, lora_section
from rl_megatron.models.shape import ModelShape
from rl_megatron.weights.layouts.families import megatron_layout
from rl_megatron.weights.layouts.layout import Band, Layout, ParamSpec, Piece, one

_LINEAR = re.compile(r"\.(linear_\w+|in_proj|out_proj)\.weight(\{expert\})?$")  # names in megatron-core, delta nets
_WEIGHT = re.compile(r"weight(\{expert\}|\d+)?$")
OF_EXPERTS_ALONE = {
    *("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"),
    *("olmoe", "qwen3_moe", "qwen3_next"),
}
"""Families in which peft 0.21 takes ``gate_proj``, ``up_proj`` and ``down_proj`` for names of routed experts only
(``_MOE_TARGET_MODULE_MAPPING`` of ``utils/transformers_weight_conversion.py``)."""
WITH_EXPERTS = OF_EXPERTS_ALONE | {"mixtral", "minimax_m2"}
"""Families for which it converts adapters of routed experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedRow:
    """A row of matrices with the rows of its adapters; ``parts`` are its Hugging Face matrices, in order."""

    base: ParamSpec
    a: ParamSpec
    b: ParamSpec
    parts: tuple[str, ...]
    rank: int


def adapter_name(weight: str, which: str) -> str:
    """Returns the learner's name of a weight's adapter ``which``, "A" or "B"."""
    return _WEIGHT.sub(rf"lora_{which}\1", weight)


def hf_adapter_name(weight: str, which: str) -> str:
    """Returns peft's name of a Hugging Face matrix's adapter, without its prefix ``base_model.model.``."""
    return f"{weight.removesuffix('.weight')}.lora_{which}.weight"


@dataclass(frozen=True, slots=True)
class LoraLayouts(AdapterLayouts):
    """The layouts of ``lora``'s adapters on ranks and in files."""

    lora: LoraSection
    section = "learner.lora"
    untrained = "rl_megatron.features.lora.merging:UntrainedAdapters"

    @override
    def __hash__(self) -> int:
        return hash(self.lora)

    @property
    @override
    def given(self) -> str:
        return f"{self.section}.rank={self.lora.rank}"

    @override
    def on_ranks(self, learner: Layout) -> Layout:
        found = adapted_rows(learner.rows(), learner.shape, self.lora)
        return replace(learner, table=[row for one in found for row in (one.a, one.b)])

    @override
    def file_layout(self, learner: Layout, hf: Layout) -> Layout:
        ranks = self.ranks(learner)
        found = [
            _adapted(spec, hf.shape, ranks[name], hf_adapter_name)
            for spec in hf.rows()
            if (name := hf.first_chunk(spec)[0].hf) in ranks
        ]
        return replace(hf, table=[row for one in found for row in (one.a, one.b)])

    @override
    def ranks(self, learner: Layout) -> Mapping[str, int]:
        rows = adapted_rows(learner.rows(), learner.shape, self.lora)
        return {part: one.rank for one in rows for part in one.parts}

    def described(self, shape: ModelShape, model: Path) -> Mapping[str, object]:
        """Returns the adapter_config.json of a folder of adapters for the model of the folder ``model``."""
        # peft 0.21 has experts of one tensor a layer, like transformers 5, gate and up in one: twice the rank there.
        # If it takes the linears' names for experts', those of dense layers and shared experts are named as
        # parameters, which vLLM 0.32 and SGLang 0.5.21 do not read.
        lora, by_part, rank = self.lora, self.ranks(megatron_layout(shape)), self.lora.rank or 0
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
            "base_model_name_or_path": str(model),
            "r": rank,
            "lora_alpha": lora.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": sorted({part.removesuffix(".weight").rpartition(".")[2] for part in by_part}),
            "target_parameters": beside or None,
            "rank_pattern": ranks,
            "alpha_pattern": alphas,
        }


def adapter_row_layouts(learner: LearnerSection) -> LoraLayouts:
    """Returns the layouts of the adapters of a learner that has some."""
    return LoraLayouts(lora_section(learner))


def adapted_rows(table: Sequence[ParamSpec], shape: ModelShape, lora: LoraSection) -> Iterator[AdaptedRow]:
    """Yields the rows of a table of the learner that have adapters."""
    ranks = lora.ranks(shape)
    for spec in table:
        if not spec.frozen and _LINEAR.search(spec.name) and (rank := ranks.get(_target(spec))) is not None:
            yield _adapted(spec, shape, rank, adapter_name)


def _target(spec: ParamSpec) -> Adaptable:
    if "{expert}" in spec.name:
        return "experts"
    return "attention" if ".self_attention." in spec.name else "mlp"


def _adapted(spec: ParamSpec, shape: ModelShape, rank: int, named: Callable[[str, str], str]) -> AdaptedRow:
    pieces = [piece.hf for band in spec.bands(shape, 1) for piece in band]
    parts = tuple(dict.fromkeys(hf for hf in pieces if hf is not None))

    def whole(which: str, size: Callable[[ModelShape], int]) -> Callable[[ModelShape, int], tuple[Band, ...]]:
        names = [hf_adapter_name(part, which) for part in parts]
        return lambda m, _: tuple((Piece(hf=name, start=0, stop=size(m)),) for name in names)

    def cut(which: str) -> Callable[[ModelShape, int], tuple[Band, ...]]:
        return lambda m, degree: tuple(
            tuple(replace(piece, hf=piece.hf and hf_adapter_name(piece.hf, which)) for piece in band)
            for band in spec.bands(m, degree)
        )

    def rank_size(_m: ModelShape) -> tuple[int]:
        return (rank,)

    by_rows = spec.dim == 0
    assert by_rows or len(parts) == 1, f"{spec.name}: columns of several matrices"
    a, b = (replace(spec, name=named(spec.name, which), padded=False) for which in "AB")
    if by_rows:
        a = replace(a, bands=whole("A", lambda _: rank), axis=None, unit=one)
        b = replace(b, bands=cut("B"), other_axes=rank_size)
    else:
        a = replace(a, bands=cut("A"), other_axes=rank_size)
        b = replace(
            b, bands=whole("B", lambda m: spec.other_axes(m)[0]), other_axes=rank_size, dim=0, axis=None, unit=one
        )
    return AdaptedRow(base=spec, a=a, b=b, parts=parts, rank=rank)
