"""Published steps of reinforcement learning beside what `rl_step` predicts of them. No torch.

Of such a point the learner's layout, the servers' tensor parallelism, the mean length of completions and the seconds of
a step are known. What else a point may say in ``rl`` is ``engine_gpus``, those that only sample, and the
``memory_fraction`` of servers. The rest is as in the recipes of NeMo-RL, from which the points are (NVIDIA-NeMo/RL,
examples/configs, v0.6.0): half of the GPUs sample where steps overlap (staleness above 0); servers have 0.8 of a GPU
there, else 0.6; a learner of several stages computes whole layers again; gradients are bfloat16 and travel while layers
compute; log-probs of the policy and of a reference are computed; and the optimizer waits in the host's memory while
servers on its GPUs sample. Prompts are as long as the median point's tokens a second say, and groups have 16
completions.

A push is NeMo-RL's own, which takes the whole model through each GPU (`_refit_seconds`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from pydantic import ValidationError

from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError
from rl_megatron.models.shape import ModelShape
from rl_megatron.scaling.hardware import GB, GPUS
from rl_megatron.scaling.memory import weights_served
from rl_megatron.scaling.published.points import Prediction, section_of_point, shape_of_point
from rl_megatron.scaling.rl_step import rl_step
from rl_megatron.scaling.rollouts import lengths_of

_GROUP = 16
_TURNS, _APART = 0.6, 0.8  # of a GPU for a server, that takes turns with the learner or has its own
_COLOCATED, _BROADCAST = 1342 / 47.2, 1342 / 14  # GB/s, of DeepSeek-V3 in bfloat16
_KEYS = ("mean_tokens", "samples_per_step", "train_batch", "engine_tp", "staleness")


def rl_predictions(points: Sequence[Mapping[str, Any]], refused: list[str] | None = None) -> Iterator[Prediction]:
    """Seconds of the steps of points of kind "rl" that say enough and are in bfloat16.

    Points whose layout cannot be are added to ``refused``, with the reason; without it, they raise ConfigError.
    """
    known = [point for point in points if _says_enough(point)]
    if not known:
        return
    prompt = max(1.0, median(_tokens(point) - point["rl"]["mean_tokens"] for point in known))
    for point in known:
        gpu = replace(GPUS[point["gpu"]], domain=point["nvlink_domain"])
        own, shape = point["rl"], shape_of_point(point)
        try:
            config = _config(point)
        except ConfigError as error:
            if refused is None:
                raise
            refused.append(f"{point['id']}: {error}")
            continue
        lengths = lengths_of(own["mean_tokens"], point["sequence_tokens"] - prompt)
        k = own["staleness"]
        found = rl_step(config, shape, gpu, lengths, prompt=prompt, staleness=k, push=_refit_seconds(config, shape))
        yield Prediction(
            name=point["id"],
            kind="rl",
            group=(str(point["model"]), str(point["gpu"])),
            release=str(point["released"]),
            predicted=found.seconds,
            measured=float(point["step_s"]),
            sparse=bool(shape.num_experts),
        )


def _says_enough(point: Mapping[str, Any]) -> bool:
    own = point.get("rl") or {}
    enough = (
        point["kind"] == "rl" and point.get("step_s") and point["tokens_per_s_per_gpu"] and point["sequence_tokens"]
    )
    return bool(enough and all(own.get(key) is not None for key in _KEYS) and point["precision"] == "bf16")


def _tokens(point: Mapping[str, Any]) -> float:
    """Of prompt and completion, by the rate that is published beside the step's seconds."""
    total: float = point["tokens_per_s_per_gpu"] * point["gpus"] * point["step_s"]
    return total / float(point["rl"]["samples_per_step"])


def _refit_seconds(config: RunConfig, shape: ModelShape) -> float:
    """Seconds in which NeMo-RL gathers the whole model on every GPU of the learner, and hands it to servers there, or
    broadcasts it to others.

    By what its authors measured of DeepSeek-V3 on H100: 47.2 s (v0.3, EP64 PP8 to TP64) and 14 s (posts "Journey of
    Optimizing Weight Transfer in Large MoE Models", 2025-08-12, and "Optimizing Non-Colocated Refit", 2026-02-26). The
    latter's 5 s and 1.5 s of Qwen3-235B-A22B and Qwen3-30B-A3B come out as 4.9 and 0.6.
    """
    whole = weights_served(config, shape).both
    return whole / GB / (_COLOCATED if config.rollout.server.colocated else _BROADCAST)


def _config(point: Mapping[str, Any]) -> RunConfig:
    """A run with the point's learner and servers. Raises ConfigError if its layout cannot be."""
    own, gpus, each = point["rl"], point["gpus"], GPUS[point["gpu"]].per_node
    overlaps = own["staleness"] > 0
    engines = own.get("engine_gpus") or (gpus // 2 if overlaps else gpus)
    unknown = {"recompute": "full" if point["pp"] > 1 else None, "gradient_dtype": "bf16"}
    learner = section_of_point({**point, **{k: v for k, v in unknown.items() if point[k] is None}})
    learner["overlap"] = {"gradients": True, "parameters": True}
    learner["dp"] = (gpus - engines * overlaps) // (learner["tp"] * learner["pp"] * learner["cp"])
    server = {"tp": own["engine_tp"], "replicas": engines // own["engine_tp"], "concurrency": 1 << 20}
    server["nodes"] = -(-own["engine_tp"] // each)
    server["memory_fraction"] = own.get("memory_fraction") or (_APART if overlaps else _TURNS)
    if not overlaps:
        server["colocated"] = True
        learner["offload"] = {"while_sampling": "optimizer"}
    tree = {
        "learner": learner,
        "algorithm": {"kl": {"coefficient": 0.01}},
        "train": {"minibatches": own["samples_per_step"] // own["train_batch"], "max_staleness": own["staleness"]},
        "weights": {"transport": "process_group" if overlaps else "carried"},
        "run": {"launcher": "slurm"},
        "rollout": {
            "engine": "vllm",
            "prompts_per_step": own["samples_per_step"] // _GROUP,
            "group_size": _GROUP,
            "max_prompt_tokens": 1,
            "max_new_tokens": point["sequence_tokens"] - 1,
            "slots": 256,
            "server": server,
        },
        "slurm": {
            "nodes": (gpus - engines * overlaps) // each,
            "gpus_per_node": each,
            "nvlink_nodes": max(1, point["nvlink_domain"] // each),
            "engines": {"nodes": engines // each if overlaps else 0},
        },
    }
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        found = "; ".join(str(one["msg"]).removeprefix("Value error, ") for one in error.errors())
        raise ConfigError(found) from error
