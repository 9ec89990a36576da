"""``rl-megatron scale --check``: a run's folder beside what is predicted of it, as a table or JSON. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from launcher.build.model import starting_shape
from rl_megatron.config.io import load_config
from rl_megatron.errors import ConfigError
from rl_megatron.observability.files import read_jsonl
from rl_megatron.scaling.hardware import GB, GPUS, gpu_named
from rl_megatron.scaling.machines.calibration import read_calibration
from rl_megatron.scaling.machines.check import CheckedRun, check_run


def checked_run(folder: Path, machine: str | None) -> CheckedRun:
    """The comparison of a run's folder. ``machine``: a calibration's file, or a GPU's name.

    Raises ConfigError or DataError that says what is missing.
    """
    for name in ("config.yaml", "metrics.jsonl"):
        if not (folder / name).is_file():
            raise ConfigError(f"--check {folder}: it has no {name}; give a run's folder, as runs/NAME")
    config, rows = load_config(str(folder / "config.yaml"), []), read_jsonl(folder / "metrics.jsonl")
    if machine is None:
        machine = config.slurm.speeds.gpu
    if machine is None:
        raise ConfigError(
            "--check needs the machine that ran it: --machine FILE.json, which rl-megatron scale --calibrate FILE.json "
            f"writes there, or a GPU's name ({', '.join(GPUS)})"
        )
    found = read_calibration(Path(machine)) if machine.endswith(".json") else None
    if found is None and config.learner.device == "cpu":
        raise ConfigError(
            f"learner.device=cpu in the run, and {machine} is a GPU; give --machine FILE.json of a calibration"
        )
    ranks = config.learner.dims.world_size
    if config.run.launcher != "local":
        ranks = min(ranks, config.slurm.gpus_per_node)
    gpu = gpu_named(machine) if found is None else found.gpu(ranks)
    return check_run(config, starting_shape(config), rows, gpu, found)


def show(found: CheckedRun, *, as_json: bool) -> None:
    """Print the comparison."""
    if as_json:
        print(json.dumps(as_tree(found), indent=1))
        return
    console = Console(markup=False)
    console.print(f"steps {found.first} to {found.last}: medians of {found.steps}", soft_wrap=True)
    table = Table("seconds of a step", "predicted", "measured", "error")
    for row in found.phases:
        table.add_row(row.part, f"{row.predicted:.3f}", f"{row.measured:.3f}", f"{row.error:+.0%}")
    console.print(table)
    whole = sum(found.training.values())
    console.print(_terms("train, predicted by term", found.training, whole, 1.0, "s"))
    total = sum(found.memory.values())
    console.print(_terms("memory of the fullest rank, predicted by term", found.memory, total, GB, "GB"))
    if found.peak is not None:
        p = found.peak
        console.print(
            f"memory, in all: predicted {p.predicted / GB:.2f} GB, measured at most {p.measured / GB:.2f} GB "
            f"({p.error:+.0%})",
            soft_wrap=True,
        )
    for note in found.notes:
        console.print(f"note: {note}", soft_wrap=True, markup=False)


def as_tree(found: CheckedRun) -> dict[str, object]:
    """The comparison as plain values, with errors."""
    tree = asdict(found)
    tree["phases"] = [{**asdict(row), "error": row.error} for row in found.phases]
    tree["peak"] = None if found.peak is None else {**asdict(found.peak), "error": found.peak.error}
    return tree


def _terms(title: str, terms: Mapping[str, float], whole: float, unit: float, name: str) -> Table:
    table = Table("", name, "share", title=title)
    for term, value in terms.items():
        if value >= 0.001 * whole:
            table.add_row(term, f"{value / unit:.3f}", f"{value / whole:.0%}")
    return table
