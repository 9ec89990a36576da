"""Published steps of reinforcement learning beside what `rl_step` predicts of them. No torch.

Of such a point the learner's layout, the servers' tensor parallelism, the mean length of completions and the seconds of
a step are known. Assumed are: where steps overlap (staleness above 0), half of the GPUs sample; prompts are as long as
the median point's tokens a second say; log-probs of the policy and of a reference are computed; servers have as much of
a GPU as engines take by default, or 0.6 of it where they take turns with the learner; groups have 16 completions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from pydantic import ValidationError

from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError
from rl_megatron.scaling.hardware import GPUS
from rl_megatron.scaling.points import Prediction, section_of_point, shape_of_point
from rl_megatron.scaling.rl_step import rl_step
from rl_megatron.scaling.rollouts import lengths_of

_GROUP = 16
_TURNS = 0.6  # of a GPU for a server that takes turns with the learner
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
        found = rl_step(config, shape, gpu, lengths, prompt=prompt, staleness=own["staleness"])
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


def _config(point: Mapping[str, Any]) -> RunConfig:
    """A run with the point's learner and servers. Raises ConfigError if its layout cannot be."""
    own, gpus, each = point["rl"], point["gpus"], GPUS[point["gpu"]].per_node
    overlaps = own["staleness"] > 0
    engines = gpus // 2 if overlaps else gpus
    learner = section_of_point(point)
    learner["dp"] = (gpus - engines * overlaps) // (learner["tp"] * learner["pp"] * learner["cp"])
    server = {"tp": own["engine_tp"], "replicas": engines // own["engine_tp"], "concurrency": 1 << 20}
    server |= {} if overlaps else {"colocated": True, "memory_fraction": _TURNS}
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
