"""Rates of published runs, and seconds of published steps of reinforcement learning, beside predictions.

published_runs.json has the runs with their sources. It has no steps of reinforcement learning: give a file that has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from rl_megatron.config.run import RunConfig
from rl_megatron.errors import GB
from rl_megatron.models.shape import LatentAttention, ModelShape
from rl_megatron.training.flops import training_flops
from rl_megatron.types import ParallelDims
from tools.planner.hardware import FITTED, GPUS, Constants
from tools.planner.memory import weights_served
from tools.planner.rl_step import length_distribution, rl_step
from tools.planner.time import LearnerWork, step_seconds

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
_GROUP = 16  # completions of a prompt in NeMo-RL's recipes
_RL_KEYS = ("mean_tokens", "samples_per_step", "train_batch", "engine_tp", "staleness")
_COLOCATED, _BROADCAST = 1342 / 47.2, 1342 / 14  # GB/s of NeMo-RL's pushes, of DeepSeek-V3 on H100 (its posts)
_REPLAYED = ("b200", "b300", "gb200", "gb300")  # whose recipes record their launches (Megatron-Bridge)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A published rate beside the prediction, in tokens/s of a GPU, or seconds of a step of reinforcement learning."""

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


def predict_rl_steps(points: Points) -> Iterator[Prediction]:
    """Yields published steps of reinforcement learning in bfloat16 of known lengths, in seconds.

    A point does not say all: the rest is as in NeMo-RL's recipes (examples/configs, v0.6.0). Half of the GPUs sample
    where steps overlap; a learner of several stages computes whole layers again; the optimizer waits in the host's
    memory while servers on its GPUs sample. A push is NeMo-RL's own, and nothing is fitted to these steps.
    """
    known = [p for p in points if p["kind"] == "rl" and p["precision"] == "bf16" and _says_enough(p)]
    if not known:
        return
    prompt = max(1.0, median(_rl_tokens(p) / p["rl"]["samples_per_step"] - p["rl"]["mean_tokens"] for p in known))
    for point in known:
        config, shape = _rl_config(point), shape_of_point(point)
        gpu = replace(GPUS[point["gpu"]], domain=point["nvlink_domain"])
        rate = _COLOCATED if config.rollout.server.colocated else _BROADCAST
        found = rl_step(
            config,
            shape,
            gpu,
            length_distribution(point["rl"]["mean_tokens"], point["sequence_tokens"] - prompt),
            prompt=prompt,
            staleness=point["rl"]["staleness"],
            push=weights_served(config, shape).both / GB / rate,
        )
        yield Prediction(
            name=point["id"],
            group=(str(point["model"]), str(point["gpu"])),
            release=str(point["released"]),
            predicted=found.seconds,
            measured=float(point["step_s"]),
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


def _says_enough(point: Mapping[str, Any]) -> bool:
    own = point.get("rl") or {}
    known = point.get("step_s") and point["tokens_per_s_per_gpu"] and point["sequence_tokens"]
    return bool(known) and all(own.get(key) is not None for key in _RL_KEYS)


def _rl_tokens(point: Mapping[str, Any]) -> float:
    """Tokens of a step, by the rate that is published beside its seconds."""
    return float(point["tokens_per_s_per_gpu"] * point["gpus"] * point["step_s"])


def _rl_config(point: Mapping[str, Any]) -> RunConfig:
    """A run with the learner and the servers of a point of kind "rl"."""
    own, gpus, each, d = point["rl"], point["gpus"], GPUS[point["gpu"]].per_node, point
    apart = own["staleness"] > 0
    engines = (own.get("engine_gpus") or gpus // 2) if apart else gpus
    rest, layers = gpus - engines * apart, point["shape"]["layers"]
    each_stage, more = divmod(layers, d["pp"] * d["vpp"])
    stages = "+".join(str(each_stage + (i < more)) for i in range(d["pp"] * d["vpp"])) if more else None
    learner = {
        **{key: d[key] for key in ("tp", "pp", "vpp", "cp")},
        "ep": min(d["ep"], rest // d["pp"]),  # at most the GPUs that train
        "etp": point.get("etp") or 1,
        "dp": rest // (d["tp"] * d["pp"] * d["cp"]),
        "stage_layers": stages,
        "device": "cuda",
        "dtype": "bfloat16",
        "gradient_dtype": "bfloat16",
        "max_tokens_per_micro_batch": max(2, (point["micro_batch"] or 1) * point["sequence_tokens"]),
        "recompute": {"uniform": 1} if d["pp"] > 1 or point["recompute"] == "full" else {},
        "overlap": {"gradients": True, "parameters": True},
        "offload": {} if apart else {"while_sampling": "optimizer"},
    }
    server = {"tp": own["engine_tp"], "replicas": engines // own["engine_tp"], "max_concurrent_groups": 1 << 20}
    server["nodes"] = -(-own["engine_tp"] // each)
    server |= {"memory_fraction": own.get("memory_fraction") or (0.8 if apart else 0.6), "colocated": not apart}
    rollout = {"engine": "vllm", "prompts_per_step": own["samples_per_step"] // _GROUP, "group_size": _GROUP}
    rollout |= {"max_prompt_tokens": 1, "max_new_tokens": point["sequence_tokens"] - 1, "slots": 256, "server": server}
    return RunConfig.model_validate(
        {
            "learner": learner,
            "algorithm": {"kl": {"coefficient": 0.01}},
            "train": {"minibatches": own["samples_per_step"] // own["train_batch"], "max_staleness": own["staleness"]},
            "weights": {"transport": "direct"},
            "run": {"launcher": "slurm"},
            "rollout": rollout,
            "slurm": {
                "nodes": rest // each,
                "gpus_per_node": each,
                "nvlink_nodes": max(1, point["nvlink_domain"] // each),
                "engines": {"nodes": engines // each if apart else 0},
            },
        }
    )
