"""What vLLM 0.32.0 is started with and asked for, to hold adapters beside its model (vllm/lora, config/lora.py)."""

from __future__ import annotations

from rl_megatron.engines.adapter import AdapterPlaces
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import LoadedAdapters

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of --max-lora-rank


def started_with(places: AdapterPlaces | None) -> tuple[str, ...]:
    """The options for the places of adapters. Its scheduler samples with all of them in one batch."""
    if places is None:
        return ()
    rank, count = next(rank for rank in _RANKS if rank >= max(places.ranks)), str(places.count)
    out = ("--enable-lora", "--max-lora-rank", str(rank), "--max-loras", count, "--max-cpu-loras", count)
    return out if places.experts else (*out, "--lora-target-modules", *places.modules)  # experts are one module there


def obstacle(places: AdapterPlaces, shape: ModelShape, device: str) -> str:
    """Why it cannot hold them; or empty."""
    if (most := max(places.ranks)) > _RANKS[-1]:
        return f"learner.lora.rank={most}: vLLM 0.32.0 holds adapters of rank {_RANKS[-1]} at most; lower it"
    if shape.num_experts and device == "cpu":
        return (
            f"model_type={shape.family!r} has experts: wherever adapters are on, vLLM 0.32.0 computes experts by "
            "Triton's kernels, which need a GPU; use a dense model, or rollout=sglang with "
            "learner.lora.targets=attention"
        )
    return ""


def named(adapters: LoadedAdapters | None) -> dict[str, str]:
    """The part of a request that says with which adapters it is computed. An unknown name is refused (404)."""
    return {} if adapters is None else {"model": adapters.name}
