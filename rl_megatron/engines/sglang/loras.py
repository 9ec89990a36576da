"""What SGLang 0.5.21 is started with and asked for, to hold adapters beside its model (srt/lora)."""

from __future__ import annotations

from rl_megatron.engines.adapter import AdapterPlaces, StartOptions
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import LoadedAdapters

_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")
_LINEARS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
    *_OF_EXPERTS,
)
"""Of SUPPORTED_LORA_TARGET_MODULES (srt/utils/common.py)."""


def started_with(options: StartOptions) -> tuple[str, ...]:
    """The options for the places of adapters. Its scheduler samples with all of them in one batch, and without any."""
    places = options.adapters
    if places is None:
        return ()
    return (
        *("--enable-lora", "--max-lora-rank", str(max(places.ranks)), "--max-loras-per-batch", str(places.count + 1)),
        *("--lora-target-modules", *places.modules),
        *(("--lora-backend", "torch_native") if options.device == "cpu" else ()),  # the others are Triton's
    )


def load_format(options: StartOptions) -> str:
    """Of the model's first weights, which a push replaces: random, or what memory held, for an empty file.

    SGLang reads adapters by the loader of this format, and the one of random weights reads nothing.
    """
    return "dummy" if options.adapters is None else "safetensors"


def obstacle(places: AdapterPlaces, shape: ModelShape, device: str, dp: int) -> str:
    """Why it cannot hold them; or empty."""
    if strange := sorted(set(places.modules) - set(_LINEARS)):
        return (
            f"learner.lora.targets: SGLang 0.5.21 has no adapters of {', '.join(strange)}; leave attention out of "
            "learner.lora.targets, or set rollout=vllm"
        )
    if len(places.ranks) > 1:
        return (
            "learner.lora: SGLang 0.5.21 computes with one rank and one scale for all of an adapter's matrices, and "
            f"given are {', '.join(map(str, sorted(places.ranks)))}; make learner.lora.expert_rank equal to rank, or "
            "leave experts out of learner.lora.targets"
        )
    if shape.num_experts and device == "cpu" and set(places.modules) & set(_OF_EXPERTS):
        return (
            "learner.lora.targets has experts, or linears that are called as theirs: SGLang 0.5.21 has only Triton's "
            "kernels for adapters of experts, which need a GPU; set learner.lora.targets=attention"
        )
    if dp > 1:
        return (
            f"rollout.server.dp={dp}: with attention's replicas SGLang 0.5.21 holds adapters only where they "
            "are pinned, and never gives their places to others; set rollout.server.dp=1"
        )
    return ""


def named(adapters: LoadedAdapters | None) -> dict[str, str]:
    """The part of a request that says with which adapters it is computed. An unknown name is refused."""
    return {} if adapters is None else {"lora_path": adapters.name}
