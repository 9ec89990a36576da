"""Published runs beside what the planner predicts of them: memory of a GPU, and tokens a second.

published_runs.json has the points, each with its source. What the learner does not have (float8, moments in bfloat16,
drafts, other dispatchers) is added to the plan's bytes here, for the sake of the comparison alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rl_megatron.config.run import RunConfig
from rl_megatron.models.shape import LatentAttention, ModelShape
from rl_megatron.options.device import GPU
from rl_megatron.scaling.constants import FITTED, Constants
from rl_megatron.scaling.flops import training_flops
from rl_megatron.scaling.hardware import GB, GPUS
from rl_megatron.scaling.memory import footprints
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
_KEPT_IN_FLOAT8 = 1.35 / 2  # of what layers keep: inputs of products in one byte, the others in two
_REPLAYED = ("b200", "b300", "gb200", "gb300")  # whose recipes record their launches (Megatron-Bridge)
_TERMS = ("parameters", "gradients", "optimizer", "activations", "logits")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A published number beside the prediction: GB of a GPU, or tokens/s of one."""

    name: str
    group: tuple[str, str]  # model and GPU
    release: str
    predicted: float
    measured: float
    sparse: bool

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
        yield _prediction(point, tokens / step_seconds(work_of(point), constants), measured)


def predict_memory(points: Points) -> Iterator[Prediction]:
    """Yields the points whose peak of memory is known."""
    for point in points:
        if point["peak_memory_gb"] and point["shape"].get("vocab"):
            yield _prediction(point, _gigabytes(point), point["peak_memory_gb"])


def _prediction(point: Mapping[str, Any], predicted: float, measured: float) -> Prediction:
    return Prediction(
        name=point["id"],
        group=(str(point["model"]), str(point["gpu"])),
        release=str(point["released"]),
        predicted=predicted,
        measured=measured,
        sparse=bool(point["shape"]["experts"]),
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
        dims=_dims(point),
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


def _dims(point: Mapping[str, Any]) -> ParallelDims:
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


def _gigabytes(point: Mapping[str, Any]) -> float:
    """The plan's bytes on the fullest GPU, or on the last stage's where the point is logged there."""
    found = footprints(_config(point), shape_of_point(point))
    totals = [_total(point, f.terms) for f in found]
    return (totals[-1] if "last rank" in (point.get("notes") or "") else max(totals)) / GB


def _total(point: Mapping[str, Any], terms: Mapping[str, float]) -> float:
    """Bytes of a rank, with what the learner does not have."""
    held = dict(terms)
    if "8" in point["precision"]:
        held["activations"] *= _KEPT_IN_FLOAT8
    if point["optimizer_moments"] == "bf16":
        held["optimizer"] *= 8 / 12
    return sum(held[term] for term in _TERMS)


def _config(point: Mapping[str, Any]) -> RunConfig:
    """The learner's configuration in a point's layout.

    Without recomputing attention's core, which keeps no more than its inputs (FlashAttention), or norms, which are
    parts of TransformerEngine's linears.
    """
    d = _dims(point)
    recompute = point["recompute"] or []
    again: dict[str, Any] = {"uniform": 1} if recompute == "full" else dict.fromkeys(recompute, True)
    again = {name: on for name, on in again.items() if name not in ("core_attn", "layernorm")}
    tokens = (point["micro_batch"] or 0) * (point["sequence_tokens"] or 0)
    learner = {
        **{key: getattr(d, key) for key in ("tp", "pp", "vpp", "ep", "etp", "cp", "dp")},
        "stage_layers": _stage_layers(shape_of_point(point).num_layers, d),
        "device": GPU,
        "dtype": "bfloat16",
        "gradient_dtype": "bfloat16" if point["gradient_dtype"] == "bf16" else "float32",
        "layers": "auto",
        "max_tokens_per_micro_batch": max(2, tokens),
        "recompute": again,
        "offload": {"optimizer": (point["offload"] or {}).get("optimizer_fraction", 0)},
    }
    rollout = {"max_prompt_tokens": 1, "max_new_tokens": 1}  # which must fit into a micro-batch
    return RunConfig.model_validate({"learner": learner, "rollout": rollout})


def _stage_layers(layers: int, d: ParallelDims) -> str | None:
    """The layers of each chunk; the last ones have fewer, beside the output layer, where the degrees do not divide."""
    chunks = d.pp * d.vpp
    if layers % chunks == 0:
        return None
    each, rest = divmod(layers, chunks)
    return "+".join(str(each + (i < rest)) for i in range(chunks))
