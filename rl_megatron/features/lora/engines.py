"""The engines' side of versions of adapters for one model: options, missing kernels, and loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from rl_megatron.feature import EngineHooks
from rl_megatron.features.lora.feature import AdapterSlots
from rl_megatron.features.lora.rows import LoraLayouts
from rl_megatron.types import NamedVersion
from rl_megatron.weights.layouts.families import megatron_layout

if TYPE_CHECKING:
    from rl_megatron.engines.http import Server


class HeldAdapters(EngineHooks):
    """Loads and unloads versions of adapters at ``path`` of a server, while it samples."""

    path: ClassVar[str]
    field: ClassVar[str]
    """The field of a request that names the version."""

    async def load(self, server: Server, version: NamedVersion, folder: Path) -> None:
        """Loads a folder of peft. Raises as `Server`, and EngineError with the server's answer if it refuses."""
        await server.post_for_text(
            f"{self.path}/load_lora_adapter", {"lora_name": version.name, "lora_path": str(folder)}
        )

    async def unload(self, server: Server, version: NamedVersion) -> None:
        """Unloads adapters; running requests with them continue in vLLM. Raises as `Server`."""
        await server.post_for_text(f"{self.path}/unload_lora_adapter", {"lora_name": version.name})

    @override
    def arguments(self, given: AdapterSlots | None, device: str) -> Sequence[str]:
        return () if given is None else self.options(given.max_versions, self.ranks(given), device)

    @override
    def problem(self, given: AdapterSlots, device: str, dp: int) -> str:
        ranks = self.ranks(given)
        why = self.lacks(ranks, device, dp) if ranks else ""
        return why and f"{why}; or set weights.push=merged"

    @override
    def fits(self, found: object, given: object) -> bool:
        """Returns True: a run starts its own servers, with their slots."""
        return True

    def ranks(self, given: AdapterSlots) -> Mapping[str, int]:
        """Returns the rank of each matrix that has adapters, by its pattern."""
        return LoraLayouts(given.lora).ranks(megatron_layout(self.shape))

    def options(self, count: int, ranks: Mapping[str, int], device: str) -> Sequence[str]:
        """Returns the options for ``count`` versions, which the scheduler samples with in one batch."""
        raise NotImplementedError

    def lacks(self, ranks: Mapping[str, int], device: str, dp: int) -> str:
        """Returns why the engine has no kernels for these ranks, or an empty string."""
        raise NotImplementedError


def _modules(ranks: Mapping[str, int]) -> list[str]:
    """Returns the last names of linears that have adapters, for example q_proj."""
    return sorted({part.removesuffix(".weight").rpartition(".")[2] for part in ranks})


_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values that --max-lora-rank takes


class VLLMAdapters(HeldAdapters):
    """vLLM 0.32.0 (vllm/lora)."""

    path, field = "/v1", "model"
    environment: ClassVar[Mapping[str, str]] = MappingProxyType({"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"})

    @override
    def options(self, count: int, ranks: Mapping[str, int], device: str) -> Sequence[str]:
        rank, held = next(rank for rank in _RANKS if rank >= max(ranks.values())), str(count)
        out = ("--enable-lora", "--max-lora-rank", str(rank), "--max-loras", held, "--max-cpu-loras", held)
        if any("{expert}" in part for part in ranks):  # experts are one module there
            return out
        return (*out, "--lora-target-modules", *_modules(ranks))

    @override
    def lacks(self, ranks: Mapping[str, int], device: str, dp: int) -> str:
        if (most := max(ranks.values())) > _RANKS[-1]:
            return f"learner.lora.rank={most}: vLLM 0.32.0 holds adapters of rank {_RANKS[-1]} at most; lower it"
        if self.shape.num_experts and device == "cpu":
            return (
                f"model_type={self.shape.family!r} has experts: wherever adapters are on, vLLM 0.32.0 computes "
                "experts by Triton's kernels, which need a GPU; use a dense model, or rollout=sglang with "
                "learner.lora.targets=attention"
            )
        return ""


_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")
_LINEARS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
    *_OF_EXPERTS,
)
"""Names in SUPPORTED_LORA_TARGET_MODULES (srt/utils/common.py)."""


class SGLangAdapters(HeldAdapters):
    """SGLang 0.5.21. It also samples without adapters, which takes a slot."""

    path, field = "", "lora_path"

    @override
    def options(self, count: int, ranks: Mapping[str, int], device: str) -> Sequence[str]:
        """Returns options that set the load format: SGLang reads adapters by the loader of the model's first weights,
        and that of random weights reads nothing. This one keeps the memory's values for an empty file."""
        return (
            *("--enable-lora", "--max-lora-rank", str(max(ranks.values())), "--max-loras-per-batch", str(count + 1)),
            *("--lora-target-modules", *_modules(ranks), "--load-format", "safetensors"),
            *(("--lora-backend", "torch_native") if device == "cpu" else ()),  # the others are Triton's
        )

    @override
    def lacks(self, ranks: Mapping[str, int], device: str, dp: int) -> str:
        if strange := sorted(set(_modules(ranks)) - set(_LINEARS)):
            return (
                f"learner.lora.targets: SGLang 0.5.21 has no adapters of {', '.join(strange)}; leave attention out of "
                "learner.lora.targets, or set rollout=vllm"
            )
        if len(found := sorted(set(ranks.values()))) > 1:
            return (
                "learner.lora: SGLang 0.5.21 computes with one rank and one scale for all of an adapter's matrices, "
                f"and given are {', '.join(map(str, found))}; make learner.lora.expert_rank equal to rank, or leave "
                "experts out of learner.lora.targets"
            )
        if self.shape.num_experts and device == "cpu" and set(_modules(ranks)) & set(_OF_EXPERTS):
            return (
                "learner.lora.targets has experts, or linears that are called as theirs: SGLang 0.5.21 has only "
                "Triton's kernels for adapters of experts, which need a GPU; set learner.lora.targets=attention"
            )
        if dp > 1:
            return (
                f"rollout.server.dp={dp}: with attention's replicas SGLang 0.5.21 holds adapters only where they "
                "are pinned, and never gives their places to others; set rollout.server.dp=1"
            )
        return ""
