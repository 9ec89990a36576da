"""Writes what a rehearsal found: a table for people, and one file that can be sent to others."""

from __future__ import annotations

import io
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from launcher.rehearsal.table import TableLine
from rl_megatron.config.run import RunConfig
from rl_megatron.durable import write_atomically

_WIDTH = 120
_PRIVATE = {("slurm", "environment"), ("slurm", "setup"), ("slurm", "account")}
"""Keys of the configuration that the file does not hold."""


@dataclass(slots=True, kw_only=True)
class RehearsalReport:
    """What is known so far. `write` replaces both files."""

    config: RunConfig
    lines: list[TableLine] = field(default_factory=list)
    slow: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    nodes: Mapping[str, Any] = field(default_factory=dict)  # the answers of those that gave one
    hosts: Sequence[str] = ()  # the names of all nodes
    rows: Sequence[Mapping[str, Any]] = ()
    seconds: dict[str, float] = field(default_factory=dict)  # of each stage

    def text(self) -> str:
        """The table, and below it slow nodes, notes and failures."""
        table = Table(title=f"rehearsal of {self.config.run.name}", title_justify="left")
        for name in ("what", "predicted", "measured", "bound", "unit", "verdict"):
            table.add_column(name, justify="right" if name in ("predicted", "measured", "bound") else "left")
        for line in self.lines:
            bound = "" if line.bound is None else f"{'>=' if line.least else '<='} {_shown(line.bound)}"
            table.add_row(line.what, _shown(line.predicted), _shown(line.measured), bound, line.unit, line.verdict)
        out = io.StringIO()
        Console(file=out, width=_WIDTH, markup=False).print(table)
        stages = ", ".join(f"{stage} {seconds:.0f} s" for stage, seconds in self.seconds.items())
        said = [f"took: {stages}", "predictions of seconds and GB/s are by slurm.speeds, which are assumed"]
        said += [f"SLOW: {node}: {'; '.join(what)}" for node, what in self.slow.items()]
        said += [f"note: {each}" for each in self.notes]
        said += [f"FAILED: {each}" for each in self.failures]
        return out.getvalue() + "\n".join(said) + "\n"

    def write(self, folder: Path, *, hide_hosts: bool) -> Path:
        """Write ``rehearsal.txt`` and ``rehearsal.json``. Returns the latter."""
        write_atomically(folder / "rehearsal.txt", self.text().encode())
        data = json.dumps(self._data(), indent=1, default=str)
        if hide_hosts:
            data = with_hidden_hosts(data, self.hosts)
        path = folder / "rehearsal.json"
        write_atomically(path, data.encode())
        return path

    def _data(self) -> dict[str, Any]:
        config = self.config.model_dump(mode="json")
        for section, key in _PRIVATE:
            config[section].pop(key, None)
        return {
            "format": 1,
            "rl_megatron": next((own.version for own in distributions(name="rl-megatron")), None),
            "lines": [asdict(line) | {"verdict": line.verdict} for line in self.lines],
            "slow": self.slow,
            "notes": self.notes,
            "failures": self.failures,
            "seconds": self.seconds,
            "nodes": self.nodes,
            "metrics": list(self.rows),
            "config": config,
        }


def with_hidden_hosts(text: str, nodes: Sequence[str]) -> str:
    """The text with other names for nodes, the same for the same node; nothing leads back."""
    salt = secrets.token_bytes(16)
    names = {node: f"host-{sha256(salt + node.encode()).hexdigest()[:8]}" for node in nodes}
    if not names:
        return text
    found = "|".join(re.escape(node) for node in sorted(names, key=len, reverse=True))
    return re.sub(rf"(?<![A-Za-z0-9-])({found})(?![A-Za-z0-9-])", lambda match: names[match[1]], text)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
