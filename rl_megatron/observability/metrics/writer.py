"""Writes a run's rows to metrics.jsonl, TensorBoard and W&B."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rl_megatron.durable import write_atomically
from rl_megatron.errors import ConfigError
from rl_megatron.observability.files import JsonlFile, JsonRow, JsonValue
from rl_megatron.observability.metrics.table import checked_row

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class MetricsWriter:
    """Records rows in ``folder``/metrics.jsonl, in TensorBoard files and in W&B. Controller process only.

    ``fresh``: the run begins or starts over, and is a new one at W&B. Raises ConfigError if ``wandb`` is requested but
    not installed.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tensorboard: bool = False,
        wandb: Literal["off", "offline", "online"] = "off",
        wandb_project: str = "rl_megatron",
        fresh: bool = True,
    ) -> None:
        self._file = JsonlFile(folder / "metrics.jsonl")
        self._tensorboard_folder = folder / "tensorboard" if tensorboard else None
        self._tensorboard: dict[str, SummaryWriter] = {}  # by phase
        self._wandb = _start_wandb(folder, wandb, wandb_project, fresh=fresh) if wandb != "off" else None

    def write(self, row: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
        """Append one row durably. Returns the row as written. Raises ValueError as `checked_row` does."""
        out = checked_row(row)
        self._file.append([out])
        tags, x = _tagged(out)
        if self._tensorboard_folder is not None:
            phase = str(out["phase"])
            if phase not in self._tensorboard:
                self._tensorboard[phase] = _open_tensorboard(self._tensorboard_folder / phase, purge_step=x)
            for tag, value in tags.items():
                self._tensorboard[phase].add_scalar(tag, value, x)
            self._tensorboard[phase].flush()
        if self._wandb is not None:
            self._wandb.log(tags)
        return out

    def truncate_after(self, step: int, *, warm_start_step: int | None = None, again: bool = False) -> int:
        """Prepare a resume from ``step``: remove later rows and a torn last line. Returns the number of rows removed.

        Of the step itself the row of phase ``eval`` goes too: the resume evaluates its weights again. ``step=-1``
        clears the file; ``warm_start_step`` is given for a checkpoint inside the warm start. ``again``: the row of the
        step itself goes too, as the resume writes it with the evaluation that a stop put off.
        TensorBoard itself hides its later points, from the next row on.
        """
        if warm_start_step is not None:
            return self._file.truncate_after(warm_start_step - again, "warm_start/step")

        def written_again(row: JsonRow) -> bool:
            return row.get("phase") == "eval" or (again and row["step"] == step and row.get("phase") != "warm_start")

        return self._file.truncate_after(step, late=written_again)

    def close(self) -> None:
        """Flush and close all files; mark the W&B run as finished."""
        self._file.close()
        for writer in self._tensorboard.values():
            writer.close()
        if self._wandb is not None:
            self._wandb.finish()


def _tagged(row: JsonRow) -> tuple[dict[str, float], int]:
    """A row's numbers by TensorBoard and W&B tag, and their x.

    A warm start has its own x axis, and in TensorBoard its own folder: a purge of RL steps after a resume compares
    only x, so it would remove the warm start's points too.
    """
    warm = row["phase"] == "warm_start"
    numbers = {n: v for n, v in row.items() if isinstance(v, int | float) and not (warm and n == "step")}
    if not warm:
        return numbers, int(numbers["step"])
    tags = {n if n.startswith("warm_start/") else f"warm_start/{n}": v for n, v in numbers.items()}
    return tags, int(tags.get("warm_start/step", 0))


def _open_tensorboard(folder: Path, *, purge_step: int) -> SummaryWriter:
    from torch.utils.tensorboard import SummaryWriter  # a second to import: only for runs that ask for it

    return SummaryWriter(str(folder), purge_step=purge_step)


def _start_wandb(folder: Path, mode: str, project: str, *, fresh: bool) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(
            f"log.wandb={mode} needs the package wandb, which is not installed; "
            "install it with `pip install 'rl-megatron[wandb]'` or set log.wandb=off"
        ) from error
    identity = _wandb_id(folder, fresh=fresh)
    run = wandb.init(project=project, name=folder.name, id=identity, dir=str(folder), mode=mode, resume="allow")
    run.define_metric("warm_start/*", step_metric="warm_start/step")
    run.define_metric("*", step_metric="step")
    return run


def _wandb_id(folder: Path, *, fresh: bool) -> str:
    """The run's id, which no other has, whatever the names of their folders. It is drawn once, and kept in the folder;
    a run whose folder has none was begun when its name was the id."""
    path = folder / "wandb_id.txt"
    if fresh:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, secrets.token_hex(8).encode())
    return path.read_text().strip() if path.exists() else folder.name
