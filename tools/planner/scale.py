"""``rl-megatron scale``: searches layouts of a run on given GPUs, and writes the best as a configuration. No torch."""

from __future__ import annotations

import json
import shlex
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Console
from rich.table import Table

from rl_megatron.config import yaml_text
from rl_megatron.config.beside import separate
from rl_megatron.config.io import load_config
from rl_megatron.config.removed import new_name
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.learner import GPU
from rl_megatron.errors import GB, ConfigError
from rl_megatron.feature import adapter_layouts, features
from rl_megatron.models.named import NAMED
from rl_megatron.models.shape import length_problem
from rl_megatron.weights.layouts.learner import shape_with_features
from tools.convert.layouts import model_shape
from tools.planner.hardware import GPUS, RANGE, gpu_named
from tools.planner.layouts import Goal, SearchRequest, described
from tools.planner.rl_step import length_distribution
from tools.planner.search import PlannedRun, SearchResult, explain_term, search

_SHOWN = 3  # rejected layouts
_ORDER = (
    "the order of layouts is a guess: of five pairs of published steps that were kept back one came in the predicted "
    "order; time the first few layouts (docs/cluster.md)"
)
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
"""Keys that a run on GPUs has if the user gives none: those of the recipes."""
_FOR_GPUS = (
    "rollout.server.start_seconds",
    "learner.device",
    "learner.timeout_seconds",
    "weights.bucket_mb",
    "slurm.cpus_per_task",
    "slurm.memory_per_node",
    "slurm.signal_seconds",
)
"""Keys of `_USUAL` that a user's configuration gets, too, where it has the default."""
_SEARCHED = (
    *(f"learner.{key}" for key in ("tp", "pp", "vpp", "ep", "etp", "cp", "dp", "stage_layers", "dispatcher")),
    *(f"learner.{key}" for key in ("max_tokens_per_micro_batch", "recompute.uniform", "recompute.parts")),
    *(f"learner.offload.{key}" for key in ("optimizer", "while_sampling")),
    *(f"rollout.server.{key}" for key in ("colocated", "memory_fraction", "replicas", "tp", "dp", "ep")),
    *("rollout.server.max_concurrent_groups", "rollout.slots", "weights.transport"),
    *(f"slurm.{key}" for key in ("nodes", "ntasks_per_node", "gpus_per_node", "gpu_memory_gb", "engines.nodes")),
)
"""Keys that the search chooses. Their values in a user's configuration are replaced."""


def scale(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL KEYS",
            help="a folder with a config.json, a name as kimi-k2, or your configuration FILE.yaml; gpus=N, gpu= one of "
            f"{', '.join(GPUS)} or a YAML file, then if wanted goal=tokens, memory or step, "
            "mean_tokens=N of a completion, and keys of the run as rollout.group_size=16",
        ),
    ] = None,
    explain: Annotated[
        str | None, typer.Option(metavar="TERM", help="say what a term of memory or time is made of, as all-to-all")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print layouts, terms and reasons as JSON")] = False,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE.yaml", help="write the best layout as a configuration that train takes")
    ] = None,
) -> None:
    """Plan a run: search layouts of learner and servers on given GPUs, with memory and seconds by term."""
    started = time.perf_counter()
    asked = parse_request(arguments or [])
    with Console(stderr=True).status("planning the memory of layouts, the fastest first"):
        found = search(asked.wanted)
    text = configuration_file(asked, found.plans[0])
    if write is not None:
        write.write_text(text, encoding="utf-8")
    if as_json:
        print(json.dumps(as_tree(asked, found), indent=1))
        return
    console = Console(markup=False)
    show(console, asked, found, time.perf_counter() - started)
    if explain is not None:
        for line in explain_term(explain, found.plans[0]):
            console.print(line, soft_wrap=True, markup=False)
    if write is not None:
        name = " model.path=FOLDER" if asked.model in NAMED else ""
        console.print(
            f"written: {write}; rl-megatron submit {shlex.quote(str(write))}{name} --dry-run checks it", soft_wrap=True
        )


def show(console: Console, request: ScaleRequest, found: SearchResult, seconds: float) -> None:
    """Prints the best layout with its terms, the next ones, and the rejected ones with their reasons."""
    wanted, best = request.wanted, found.plans[0]
    console.print(
        f"{request.model} on {wanted.gpus:,} {request.gpu}, goal={wanted.goal}: {found.layouts:,} layouts timed and "
        f"{found.planned:,} plans of memory in {seconds:.1f} s",
        soft_wrap=True,
    )
    console.print(f"best: {described(best.keys)}", soft_wrap=True)
    keys = {
        key: value for key, value in request.changed(best).items() if wanted.shape.num_experts or key != "learner.etp"
    }
    console.print("  " + " ".join(f"{key}={_describe(value)}" for key, value in keys.items()), soft_wrap=True)
    for line in _rates(request, best):
        console.print(line, soft_wrap=True)
    console.print(_table("seconds of a step", best.step.parts, "s"))
    console.print(_table("seconds of training, by term", best.step.training, "s"))
    terms = {term: held / GB for term, held in best.footprint.terms.items()}
    title = f"GB of {wanted.gpu.memory:g} on stage {best.footprint.stage}"
    console.print(_table(title, terms, "GB"))
    console.print(_ORDER, soft_wrap=True)
    for plan in found.plans[1:4]:
        more = plan.step.seconds / best.step.seconds
        console.print(
            f"next: {described(plan.keys)}: {plan.step.seconds:,.1f} s ({more:.2f} times), "
            f"{plan.footprint.total / GB:.0f} GB",
            soft_wrap=True,
        )
    for line in found.reasons()[:_SHOWN]:
        console.print(f"rejected: {line}", soft_wrap=True, markup=False)


def _rates(request: ScaleRequest, best: PlannedRun) -> list[str]:
    step, gpus = best.step, request.wanted.gpus
    rate, (low, high) = step.tokens_a_second, RANGE
    lines = [
        f"a step: {step.seconds:,.1f} s, {rate:,.0f} tokens/s, {rate / gpus:,.0f} a GPU; expect training at {low:g} to "
        f"{high:g} times its rate, whole steps less surely (docs/cluster.md)",
        f"completions of {request.mean:,.0f} tokens in the mean, of at most {request.max_tokens:,} "
        "(mean_tokens=), are assumed",
    ]
    if step.sampled.held_back:
        lines.append(
            f"rollout.server.max_concurrent_groups={best.config.rollout.server.max_concurrent_groups} holds servers "
            f"back: {step.sampled.requests:,} requests, each of a group, fill their places"
        )
    if step.staleness:
        lines.append(
            f"train.max_staleness={step.staleness}: the longest completion takes {step.sampled.longest:,.0f} s; "
            f"{step.min_staleness} is the least at which no step waits for it"
        )
    if (dispatcher := best.keys.get("learner.dispatcher")) in ("deepep", "hybridep"):
        lines.append(f"learner.dispatcher={dispatcher} needs its package, and has not been run here")
    return lines


def _table(title: str, terms: Mapping[str, float], unit: str) -> Table:
    table = Table("", unit, "share", title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    total = sum(terms.values())
    for term, value in terms.items():
        if value >= 0.001 * total:
            table.add_row(term, f"{value:,.2f}", f"{value / total:.0%}")
    return table


def _describe(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def as_tree(request: ScaleRequest, found: SearchResult) -> dict[str, object]:
    """Returns plans and rejected layouts as plain values: seconds, and bytes of the fullest GPU, by term."""
    return {
        "model": request.model,
        "gpus": request.wanted.gpus,
        "gpu": request.gpu,
        "goal": request.wanted.goal,
        "layouts": found.layouts,
        "plans": [
            {
                "keys": dict(plan.keys),
                "seconds": plan.step.seconds,
                "tokens_per_second": plan.step.tokens_a_second,
                "parts": dict(plan.step.parts),
                "training": dict(plan.step.training),
                "bytes": dict(plan.footprint.terms),
                "stage": plan.footprint.stage,
            }
            for plan in found.plans
        ],
        "rejected": [{"keys": dict(one.keys), "reason": one.reason} for one in found.rejected],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRequest:
    """A search and its request: names of model and GPU, mean and longest completion in tokens.

    ``tree`` is the configuration that gets the layout's keys.
    """

    arguments: Sequence[str]
    wanted: SearchRequest
    model: str
    gpu: str
    mean: float
    max_tokens: int
    tree: Mapping[str, object]

    def changed(self, plan: PlannedRun) -> dict[str, object]:
        """Returns the layout's keys that are not defaults."""
        usual = RunConfig()
        return {key: value for key, value in plan.keys.items() if config_value(usual, key) != value}


def parse_request(arguments: Sequence[str]) -> ScaleRequest:
    """Parses a command line into a search. Raises ConfigError that names missing or wrong arguments."""
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
    is_file = Path(model).suffix == ".yaml"
    gpu, tree = gpu_named(own["gpu"]), _tree_of_file(Path(model), overrides) if is_file else _tree(model, overrides)
    _put(tree, "slurm.speeds.gpu", own["gpu"])
    if "mean_tokens" in own:
        _put(tree, "slurm.speeds.mean_tokens", _whole("mean_tokens", own["mean_tokens"]))
    base = _loaded(tree, ["learner.max_tokens_per_micro_batch=16777216", *overrides])
    _refuse_unplanned(base, goal)
    of_model = base.model.name or str(base.model.path) if is_file else model
    shape = shape_with_features(base, model_shape(of_model, base.learner.model))
    if too_long := length_problem(shape, base.named_longest, base.longest_sequence):
        raise ConfigError(too_long)
    most = base.rollout.max_new_tokens
    mean = _whole("mean_tokens", own["mean_tokens"]) if "mean_tokens" in own else max(1, most // 2)
    if mean > most:
        raise ConfigError(f"mean_tokens={mean} is more than rollout.max_new_tokens={most}; lower the first")
    names = (item.partition("=")[0] for item in overrides)
    keys = ((new_name(name, None, {}) or (name,))[0] for name in names)
    synchronous = ["train.max_staleness"] if is_file else []
    given = {key: config_value(base, key) for key in (*synchronous, *keys) if key not in _GROUPS}
    wanted = SearchRequest(
        base=base,
        shape=shape,
        gpu=gpu,
        gpus=gpus,
        lengths=length_distribution(mean, most),
        prompt=base.rollout.max_prompt_tokens / 2,
        goal=goal,
        given=given,
    )
    for key, value in given.items():
        _put(tree, key, value)
    return ScaleRequest(
        arguments=arguments, wanted=wanted, model=model, gpu=own["gpu"], mean=mean, max_tokens=most, tree=tree
    )


def _refuse_unplanned(base: RunConfig, goal: Goal) -> None:
    """Raises ConfigError for keys of runs that the search does not plan."""
    if base.rollout.server.pp != 1 or separate(base):
        raise ConfigError(
            "rollout.server.pp or roles: scale plans servers of one stage, and no nodes for a critic or a reference of "
            "their own; leave them out"
        )
    if (adapters := adapter_layouts(base.learner)) is not None:
        raise ConfigError(
            f"{adapters.given}: scale predicts seconds of training and pushing all weights, and adapters take "
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


def configuration_file(request: ScaleRequest, plan: PlannedRun) -> str:
    """Returns a plan as YAML for ``train`` and ``submit``. Raises ConfigError if the configuration's checks fail."""
    tree = _copied(request.tree)
    for key, value in request.changed(plan).items():
        _put(tree, key, value)
    _loaded(tree, [])
    path = "model.path=FOLDER " if request.model in NAMED else ""
    return (
        f"# Predicted, not measured: {plan.step.seconds:,.1f} s a step on {request.wanted.gpus} "
        f"{request.gpu}, found by\n"
        f"# rl-megatron scale {shlex.join(request.arguments)} --write FILE.yaml\n"
        f"# rl-megatron submit FILE.yaml {path}slurm.partition=NAME\n{yaml_text.write(tree)}"
    )


def config_value(config: RunConfig, key: str) -> object:
    """Returns the value of ``section.key``, or a section if the key names one."""
    found: Any = config
    for part in key.split("."):
        found = found[part] if isinstance(found, Mapping) else getattr(found, part)
    return found


def _tree(model: str, overrides: Sequence[str]) -> dict[str, object]:
    """Returns the configuration before a layout is chosen: groups, the model, and `_USUAL`."""
    chosen_groups = (item.partition("=") for item in overrides)
    groups = _GROUPS | {key: value for key, _, value in chosen_groups if key in _GROUPS}
    tree: dict[str, object] = {"defaults": [{group: name} for group, name in groups.items()]}
    _put(tree, "model.name" if model in NAMED else "model.path", model)
    chosen = {"data.chat_template", "reward.function"} if groups["data"] != _GROUPS["data"] else set()
    for key, value in _USUAL.items():
        if key not in chosen:
            _put(tree, key, value)
    return tree


def _tree_of_file(path: Path, overrides: Sequence[str]) -> dict[str, object]:
    """Returns a configuration that starts from the user's, with defaults of the keys that the search chooses.

    Raises ConfigError if the file is not valid, or samples without servers.
    """
    file = load_config(str(path), overrides)
    if file.rollout.engine == "local":
        raise ConfigError(f"{path}: rollout.engine=local has no servers to plan; add rollout=vllm or rollout=sglang")
    groups = [dict([item.split("=", 1)]) for item in overrides if item.partition("=")[0] in _GROUPS]
    tree: dict[str, object] = {"defaults": [str(path.absolute().with_suffix("")), *groups]}
    usual = RunConfig()
    for key in _SEARCHED:
        if config_value(file, key) != (default := config_value(usual, key)):
            _put(tree, key, default)
    for key in _FOR_GPUS:
        if config_value(file, key) == config_value(usual, key):
            _put(tree, key, _USUAL[key])
    return tree


def _loaded(tree: Mapping[str, object], overrides: Sequence[str]) -> RunConfig:
    """Loads a tree like any configuration; a model by name needs no folder here."""
    named = isinstance(section := tree.get("model"), Mapping) and "name" in section
    path = ["model.path=."] if named and not any(item.startswith("model.path=") for item in overrides) else []
    values = [item for item in overrides if item.partition("=")[0] not in _GROUPS]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "scale.yaml"
        file.write_text(yaml_text.write(tree), encoding="utf-8")
        return load_config(str(file), [*values, *path, "run.launcher=slurm"])


def _put(tree: dict[str, object], key: str, value: object) -> None:
    """Sets ``section.key`` of a tree."""
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
