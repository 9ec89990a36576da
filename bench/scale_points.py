"""Rates of published runs beside those that the planner predicts. published_runs.json has each with its source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rl_megatron.models.shape import LatentAttention, ModelShape
from rl_megatron.scaling.constants import FITTED, Constants
from rl_megatron.scaling.flops import training_flops
from rl_megatron.scaling.hardware import GPUS
from rl_megatron.scaling.time import LearnerWork, step_seconds
from rl_megatron.types import ParallelDims

Points = Sequence[Mapping[str, Any]]
NEWEST = (2026, 8)
"""The release of the stack that the constants describe."""
_FAMILIES = {
    "qwen3": "qwen3_moe",
    "deepseek": "deepseek_v3",
    "moonlight": "deepseek_v3",
    "kimi": "kimi_k2",
    "mixtral": "mixtral",
    "llama": "llama",
    "gpt-oss": "gpt_oss",
}
_REPLAYED = ("b200", "b300", "gb200", "gb300")  # whose recipes record their launches (Megatron-Bridge)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A published rate beside the prediction, in tokens/s of a GPU."""

    name: str
    group: tuple[str, str]  # model and GPU
    release: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted / self.measured - 1


def predict_rates(points: Points, constants: Constants = FITTED) -> Iterator[Prediction]:
    """Yields the points whose rate is known, but those that a later release of the same software outruns."""
    for point in points:
        if point["superseded"] or (measured := _tokens_a_second(point)) is None:
            continue
        tokens = point["global_batch"] * point["sequence_tokens"] / point["gpus"]
        yield Prediction(
            name=point["id"],
            group=(str(point["model"]), str(point["gpu"])),
            release=str(point["released"]),
            predicted=tokens / step_seconds(work_of(point), constants),
            measured=measured,
        )


def ordered_pairs(rates: Sequence[Prediction]) -> tuple[int, int]:
    """Returns how many pairs of one model, GPU and release, whose rates are 15 % apart, are predicted in order, and how
    many pairs there are."""
    right = total = 0
    for i, one in enumerate(rates):
        for other in rates[i + 1 :]:
            if (one.group, one.release) != (other.group, other.release):
                continue
            ratio = one.measured / other.measured
            if max(ratio, 1 / ratio) < 1.15:
                continue
            total += 1
            right += (one.predicted > other.predicted) == (ratio > 1)
    return right, total


def work_of(point: Mapping[str, Any]) -> LearnerWork:
    """The optimizer step of a point of kind "train"."""
    year, month = map(int, str(point["released"]).split("."))
    dispatcher, recompute = point["dispatcher"], point["recompute"] or []
    return LearnerWork(
        shape=shape_of_point(point),
        dims=dims_of_point(point),
        gpu=replace(GPUS[point["gpu"]], domain=point["nvlink_domain"]),
        tokens=point["micro_batch"] * point["sequence_tokens"],
        length=point["sequence_tokens"],
        micro_batches=point["global_batch"] / (point["dp"] * point["micro_batch"]),
        drafts=point["shape"]["mtp_layers"] or 0,
        precision="float8" if "8" in point["precision"] else "bfloat16",
        gradient_bytes=2 if point["gradient_dtype"] == "bf16" else 4,
        dispatcher="alltoall" if dispatcher in ("alltoall", None) else "by_node",
        overlap=_overlap(point),
        natural=point["routing"] == "natural",
        again=frozenset(["full"] if recompute == "full" else recompute),
        graphs=point["gpu"] in _REPLAYED,
        sync_hidden=True,
        months=max(0, (NEWEST[0] - year) * 12 + NEWEST[1] - month),
    )


def _overlap(point: Mapping[str, Any]) -> float:
    """The share of `Constants.hidden` that a point has: 1, none, or half where nothing is said; DualPipe
    hides all that there is (arXiv:2412.19437)."""
    if point["dispatcher"] == "own":
        return 2.0
    return 0.5 if point["ep_overlap"] is None else float(point["ep_overlap"])


def shape_of_point(point: Mapping[str, Any]) -> ModelShape:
    """The sizes of a point's model, without its draft layers."""
    s = point["shape"]
    family = next((f for start, f in _FAMILIES.items() if str(point["model"]).startswith(start)), "qwen3_moe")
    latent = None
    if s["attention"] == "mla":
        latent = LatentAttention(
            query_rank=s["q_rank"],
            kv_rank=s["kv_rank"],
            nope_dim=s["nope_dim"],
            rope_dim=s["rope_dim"],
            value_dim=s["value_dim"],
        )
    experts, layers = s["experts"] or 0, s["layers"]
    return ModelShape(
        family=family,
        num_layers=layers,
        hidden_size=s["hidden"],
        num_heads=s["heads"],
        num_kv_heads=s["kv_heads"],
        head_dim=s["nope_dim"] + s["rope_dim"] if latent else s["head_dim"],
        num_experts=experts,
        experts_per_token=s["top_k"] or 0,
        expert_width=s["expert_ffn"] or 0,
        vocab_size=s["vocab"],
        rope_theta=1e6,
        norm_eps=1e-6,
        normalize_top_k=True,
        tie_embeddings=s["tied"],
        max_positions=1 << 20,
        latent=latent,
        dense_layers=s["dense_layers"] if experts else 0,
        dense_width=s["dense_ffn"] or 0,
        shared_width=s["shared_ffn"] or 0,
        qk_norm="head" if family == "qwen3_moe" else None,
        sinks=family == "gpt_oss",
        windows=tuple(s["window"] * (i % 2 == 0) for i in range(layers)) if s["window"] else (),
        expert_bias=family == "gpt_oss",
    )


def dims_of_point(point: Mapping[str, Any]) -> ParallelDims:
    """The degrees of a point's learner."""
    keys = ("tp", "pp", "vpp", "ep", "cp", "dp")
    return ParallelDims(etp=point.get("etp") or 1, **{key: point[key] for key in keys})


def _tokens_a_second(point: Mapping[str, Any]) -> float | None:
    """Of one GPU; from model FLOPs where a point has only those, with draft layers and their output layer."""
    if point["kind"] != "train" or not point["micro_batch"] or not point["shape"].get("vocab"):
        return None
    if point["tokens_per_s_per_gpu"]:
        return float(point["tokens_per_s_per_gpu"])
    if not point["model_tflops_per_gpu"]:
        return None
    shape, length, drafts = shape_of_point(point), point["sequence_tokens"], point["shape"]["mtp_layers"] or 0
    flops = training_flops(replace(shape, num_layers=shape.num_layers + drafts), [length])
    flops += drafts * 6 * length * shape.hidden_size * (shape.vocab_size + 2 * shape.hidden_size)
    return float(point["model_tflops_per_gpu"] * 1e12 / (flops / length))
