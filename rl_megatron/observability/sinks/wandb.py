"""Weights & Biases."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from typing_extensions import override

from rl_megatron.errors import ConfigError
from rl_megatron.observability.files import JsonRow
from rl_megatron.observability.sinks.sink import (
    MetricSink,
    RunEnd,
    SinkSettings,
    keep_id,
    kept_id,
    need_package,
    tagged_numbers,
)


class WandbSink(MetricSink):
    """Sends rows to a run of W&B with the name of the run's folder; ``wandb:offline`` stores them to send later."""

    def __init__(self, settings: SinkSettings) -> None:
        need_package("wandb", "wandb")
        if settings.argument not in ("", "offline"):
            raise ConfigError(f"log.sinks=wandb:{settings.argument!s:.80}: write wandb or wandb:offline")
        self._settings = settings
        self._run: Any = None

    @override
    def open(self) -> None:
        import wandb

        folder, options = self._settings.folder, {"mode": self._settings.argument or "online", "resume": "allow"}
        identity = _wandb_id(folder, fresh=self._settings.is_fresh)
        self._run = wandb.init(
            project=self._settings.project, name=folder.name, id=identity, dir=str(folder), **options
        )
        self._run.define_metric("warm_start/*", step_metric="warm_start/step")
        self._run.define_metric("*", step_metric="step")

    @override
    def log(self, row: JsonRow) -> None:
        self._run.log(tagged_numbers(row)[0])

    @override
    def close(self, end: RunEnd) -> None:
        self._run.finish(exit_code=int(end.state == "failed"))

    @override
    def abandon(self) -> None:
        import wandb

        wandb.teardown()  # otherwise W&B waits for its process when Python exits


def _wandb_id(folder: Path, *, fresh: bool) -> str:
    """Returns the run's id, which no other run has, whatever the names of folders. If W&B's own folder exists and no
    id, an older version began the run, and its name was the id."""
    path = folder / "wandb_id.txt"
    if (known := kept_id(path, fresh=fresh)) is not None:
        return known
    if not fresh and not path.exists() and (folder / "wandb").exists():
        return folder.name
    keep_id(path, identity := secrets.token_hex(8))
    return identity
