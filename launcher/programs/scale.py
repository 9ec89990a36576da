"""What ``rl-megatron scale`` is asked, as a search, and its best layout as a configuration file. No torch."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from rl_megatron.config import yaml_text
from rl_megatron.config.beside import separate
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError
from rl_megatron.feature import features
from rl_megatron.models.named import NAMED
from rl_megatron.models.shape import length_problem
from rl_megatron.options.device import GPU
from rl_megatron.weights.layouts.learner import shape_with_features
from rl_megatron.weights.layouts.parsing import model_shape
from tools.planner.hardware import gpu_named
from tools.planner.layouts import Goal, Wanted
from tools.planner.rollouts import lengths_of
from tools.planner.search import PlannedRun

_OWN = ("gpus", "gpu", "goal", "mean_tokens")
_GROUPS = {"algorithm": "gspo", "data": "gsm8k", "rollout": "vllm"}
_USUAL: Mapping[str, object] = {
    "data.chat_template": True,
    "reward.function": "final_number",
    "rollout.prompts_per_step": 128,
    "rollout.group_size": 16,
    "rollout.max_prompt_tokens": 1024,
    "rollout.max_new_tokens": 7168,
    "rollout.server.start_seconds": 1800,
    "rollout.server.memory_fraction": 0.85,
    "learner.device": GPU,
    "learner.dtype": "bfloat16",
    "learner.timeout_seconds": 1800,
    "learner.optimizer.beta2": 0.98,
    "train.learning_rate": 1e-6,
    "train.minibatches": 4,
    "checkpoint.every": 20,
    "weights.bucket_mb": 256,
    "slurm.cpus_per_task": 12,
    "slurm.memory_per_node": "0",
    "slurm.signal_seconds": 1800,
}
"""Keys of a run on GPUs where the user gives none: those of the recipes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A search, and what it was asked by: names of model and GPU, mean and longest completion in tokens.

    ``tree`` is the configuration that the layout's keys are added to.
    """

    arguments: Sequence[str]
    wanted: Wanted
    model: str
    gpu: str
    mean: float
    most: int
    tree: Mapping[str, object]

    def changed(self, plan: PlannedRun) -> dict[str, object]:
        """The layout's keys that are not defaults."""
        usual = RunConfig()
        return {key: value for key, value in plan.keys.items() if value_of(usual, key) != value}


def asked_of(arguments: Sequence[str]) -> Asked:
    """The search that a command line asks for. Raises ConfigError that says what is missing or wrong."""
    own = dict(item.split("=", 1) for item in arguments if item.partition("=")[0] in _OWN and "=" in item)
    models = [item for item in arguments if "=" not in item]
    if len(models) != 1 or not {"gpus", "gpu"} <= own.keys():
        raise ConfigError(
            "give a model, its GPUs and their kind, as in rl-megatron scale kimi-k2 gpus=1024 gpu=h100; given: "
            f"{' '.join(arguments) or 'nothing'}"
        )
    overrides = [item for item in arguments if "=" in item and item.partition("=")[0] not in _OWN]
    model, gpus, wish = models[0], _whole("gpus", own["gpus"]), own.get("goal", "tokens")
    goal = next((known for known in get_args(Goal) if known == wish), None)
    if goal is None:
        raise ConfigError(f"goal={wish}: must be one of {', '.join(get_args(Goal))}")
    gpu, tree = gpu_named(own["gpu"]), _tree(model, overrides)
    _put(tree, "slurm.speeds.gpu", own["gpu"])
    if "mean_tokens" in own:
        _put(tree, "slurm.speeds.mean_tokens", _whole("mean_tokens", own["mean_tokens"]))
    base = _loaded(tree, ["learner.max_tokens_per_micro_batch=16777216", *overrides])
    _refuse_unplanned(base, goal)
    shape = shape_with_features(base, model_shape(model, base.learner.model))
    if too_long := length_problem(shape, base.named_longest, base.longest_sequence):
        raise ConfigError(too_long)
    most = base.rollout.max_new_tokens
    mean = _whole("mean_tokens", own["mean_tokens"]) if "mean_tokens" in own else max(1, most // 2)
    if mean > most:
        raise ConfigError(f"mean_tokens={mean} is more than rollout.max_new_tokens={most}; lower the first")
    keys = (item.partition("=")[0] for item in overrides)
    given = {key: value_of(base, key) for key in keys if key not in _GROUPS}
    wanted = Wanted(
        base=base,
        shape=shape,
        gpu=gpu,
        gpus=gpus,
        lengths=lengths_of(mean, most),
        prompt=base.rollout.max_prompt_tokens / 2,
        goal=goal,
        given=given,
    )
    for key, value in given.items():
        _put(tree, key, value)
    return Asked(arguments=arguments, wanted=wanted, model=model, gpu=own["gpu"], mean=mean, most=most, tree=tree)


def _refuse_unplanned(base: RunConfig, goal: Goal) -> None:
    """Raises ConfigError for keys whose runs the search does not plan."""
    if base.rollout.server.pp != 1 or separate(base):
        raise ConfigError(
            "rollout.server.pp or roles: scale plans servers of one stage, and no nodes for a critic or a reference of "
            "their own; leave them out"
        )
    if (rank := base.learner.lora.rank) is not None:
        raise ConfigError(
            f"learner.lora.rank={rank}: scale predicts seconds of training and pushing all weights, and adapters take "
            "fewer; leave it out, and compare memory of layouts by rl-megatron plan --config"
        )
    for serving in (one.serving for one in features().values() if one.serving is not None):
        if given := serving.given(base):
            raise ConfigError(
                f"{serving.key}={given}: scale plans pushes straight into servers' ranks, which bring the policy "
                "alone; leave it out, and compare steps with and without it by rl-megatron plan --config"
            )
    for key, one in base.training_environments.items():
        raise ConfigError(
            f"{key}.function={one.function}: scale plans single completions, and not how long turns "
            "wait for each other; leave it out, and give a trajectory's tokens as rollout.max_new_tokens"
        )
    if goal == "step" and base.train.max_staleness:
        raise ConfigError(
            f"goal=step is synchronous, but train.max_staleness={base.train.max_staleness}; leave one of them out"
        )


def configuration_file(asked: Asked, plan: PlannedRun) -> str:
    """YAML of a plan, for ``train`` and ``submit``. Raises ConfigError if the configuration's checks refuse it."""
    tree = _copied(asked.tree)
    for key, value in asked.changed(plan).items():
        _put(tree, key, value)
    _loaded(tree, [])
    path = "" if asked.wanted.base.model.name is None else "model.path=FOLDER "
    return (
        f"# Predicted, not measured: {plan.step.seconds:,.1f} s a step on {asked.wanted.gpus} {asked.gpu}, found by\n"
        f"# rl-megatron scale {shlex.join(asked.arguments)} --write FILE.yaml\n"
        f"# rl-megatron submit FILE.yaml {path}slurm.partition=NAME\n{yaml_text.write(tree)}"
    )


def value_of(config: RunConfig, key: str) -> object:
    """The value of ``section.key``; a section of its own where the key names one."""
    found: Any = config
    for part in key.split("."):
        found = found[part] if isinstance(found, Mapping) else getattr(found, part)
    return found


def _tree(model: str, overrides: Sequence[str]) -> dict[str, object]:
    """The configuration before a layout is chosen: groups, the model, and `_USUAL`."""
    chosen_groups = (item.partition("=") for item in overrides)
    groups = _GROUPS | {key: value for key, _, value in chosen_groups if key in _GROUPS}
    tree: dict[str, object] = {"defaults": [{group: name} for group, name in groups.items()]}
    _put(tree, "model.name" if model in NAMED else "model.path", model)
    chosen = {"data.chat_template", "reward.function"} if groups["data"] != _GROUPS["data"] else set()
    for key, value in _USUAL.items():
        if key not in chosen:
            _put(tree, key, value)
    return tree


def _loaded(tree: Mapping[str, object], overrides: Sequence[str]) -> RunConfig:
    """The configuration of a tree, by the reader of all configurations; a model by name needs no folder here."""
    named = isinstance(section := tree["model"], Mapping) and "name" in section
    path = ["model.path=."] if named and not any(item.startswith("model.path=") for item in overrides) else []
    values = [item for item in overrides if item.partition("=")[0] not in _GROUPS]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "scale.yaml"
        file.write_text(yaml_text.write(tree), encoding="utf-8")
        return load_config(str(file), [*values, *path, "run.launcher=slurm"])


def _put(tree: dict[str, object], key: str, value: object) -> None:
    """Set ``section.key`` of a tree."""
    *sections, last = key.split(".")
    for section in sections:
        inner = tree.setdefault(section, {})
        assert isinstance(inner, dict)
        tree = inner
    tree[last] = str(value) if isinstance(value, Path) else value


def _copied(tree: Mapping[str, object]) -> dict[str, object]:
    return {key: _copied(value) if isinstance(value, Mapping) else value for key, value in tree.items()}


def _whole(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{name}={text}: must be a whole number above 0")
    return int(text)
