"""Prints what ranks of a layout hold and send, counted by dry runs at their real size, beside the formulas."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from launcher.programs.dry_run import counted_micro_batches, dry_runs
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError
from rl_megatron.models.shape import ModelShape
from rl_megatron.options.offload import ActivationsSection
from rl_megatron.placement.names import LEARNER
from rl_megatron.scaling.exact.collectives import collectives, layers_of, uncounted
from rl_megatron.scaling.hardware import GB
from rl_megatron.scaling.memory import footprints
from rl_megatron.types import DryRun

_SHOWN: dict[str, object] = {"recompute.layernorm": False, "recompute.mla_up_proj": False, "offload.optimizer": 0.0}
_SHOWN |= {"optimizer.moments_dtype": "float32", "dispatcher": "alltoall", "cuda_graphs": False}
_SHOWN |= {"offload.activations": ActivationsSection()}
"""Keys of the learner whose effect a step of torch's layers on a CPU does not show, and the value that it has."""


def visible(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """``config`` with torch's layers and without what a dry run does not show; the keys that differ but the layers."""
    learner, changed = config.learner, list[str]()
    sections = {name: getattr(learner, name) for name in ("recompute", "offload", "optimizer")}
    update: dict[str, object] = {"layers": "torch", "device": "cpu"}  # whose attention has fused kernels for all
    for key, value in _SHOWN.items():
        section, _, name = key.rpartition(".")
        if getattr(sections.get(section, learner), name) == value:
            continue
        changed.append(f"learner.{key}")
        if section:
            sections[section] = sections[section].model_copy(update={name: value})
        else:
            update[name] = value
    return config.model_copy(update={"learner": learner.model_copy(update={**sections, **update})}), changed


def refuse_hidden(config: RunConfig) -> None:
    """Raises ConfigError if the configuration has an option that a dry run does not show."""
    for key in visible(config)[1]:
        raise ConfigError(
            f"{key}: --exact makes a step of torch's layers on a CPU, which does not show what that does; "
            "leave it out beside --exact"
        )


def show_dry_runs(config: RunConfig, shape: ModelShape, model: str) -> None:
    """Print what ranks of the first, the middle, the fullest and the last stage hold and send in a step.

    Both sides are of torch's layers, and without what `visible` leaves out. Raises RLMegatronError if a stage cannot be
    built or make a step.
    """
    config, changed = visible(config)
    d, console = config.learner.dims, Console(markup=False)
    found = [one for one in footprints(config, shape) if one.role == LEARNER]
    planned = {one.stage: one.terms for one in reversed(found)}
    stages = sorted({0, d.pp // 2, d.pp - 1, max(found, key=lambda one: one.total).stage})
    if changed:
        console.print(f"A CPU does not show {', '.join(changed)}: both sides are without.", soft_wrap=True)
    console.print(
        f"Dry run of pipeline stages {', '.join(map(str, stages))}: builds their layers and makes a step of "
        f"{d.pp} micro-batches without memory; minutes …",
        soft_wrap=True,
    )
    runs = dry_runs(config, model, [stage * (d.world_size // d.pp) for stage in stages])
    console.print(_memory(runs, planned))
    console.print(_collectives(runs, config, shape, planned))
    if why := uncounted(config.learner, shape):
        console.print(f"The formula has no collectives of {why}.", soft_wrap=True)


def _memory(runs: list[DryRun], planned: Mapping[int, Mapping[str, float]]) -> Table:
    table = _table("GB of the policy's learner on a rank, torch's layers")
    for run in runs:
        terms = planned[run.stage]
        rows = {
            "parameters": (terms["parameters"], run.parameters),
            "gradients": (terms["gradients"], run.gradients),
            "optimizer": (terms["optimizer"], run.optimizer),
            "activations, logits": (terms["activations"] + terms["logits"], run.passes),
        }
        for said, (of_plan, counted) in rows.items():
            _add(table, run.stage, said, of_plan, counted)
        _add(table, run.stage, "together, in the passes", *(sum(pair) for pair in zip(*rows.values(), strict=True)))
        table.add_section()
    return table


def _collectives(
    runs: list[DryRun], config: RunConfig, shape: ModelShape, planned: Mapping[int, Mapping[str, float]]
) -> Table:
    learner = config.learner
    table = _table("GB of a rank's collectives in the step, by kind")
    for run in runs:
        formula: Mapping[str, float] = {}
        if not uncounted(learner, shape):
            layers = layers_of(learner, shape, run.stage)
            formula = collectives(
                learner,
                shape,
                run.stage,
                planned[run.stage],
                layers=layers,
                micro_batches=counted_micro_batches(learner),
            )
        for kind in {**run.collectives, **formula}:
            calls, size = run.collectives.get(kind, (0, 0))
            _add(table, run.stage, f"{kind}, {calls:,} calls", formula.get(kind), size)
        table.add_section()
    return table


def _table(title: str) -> Table:
    table = Table("stage", "", "planned", "counted", "planned over counted", title=title)
    for column in table.columns[2:]:
        column.justify = "right"
    return table


def _add(table: Table, stage: int, said: str, of_plan: float | None, counted: float) -> None:
    share = f"{of_plan / counted - 1:+.1%}" if of_plan is not None and counted else "-"
    table.add_row(str(stage), said, "-" if of_plan is None else f"{of_plan / GB:.2f}", f"{counted / GB:.2f}", share)
