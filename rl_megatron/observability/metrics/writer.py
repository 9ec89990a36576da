"""Writes a run's rows to metrics.jsonl, TensorBoard and W&B."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rl_megatron.errors import ConfigError
from rl_megatron.files import naming, write_atomically
from rl_megatron.observability.files import JsonlFile, JsonRow, JsonValue, from_the_end
from rl_megatron.observability.metrics.table import checked_row

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


logger = logging.getLogger(__name__)

_WANDB_SECONDS = 30.0  # to take a row, or send the last ones: before a time limit each counts
_WANDB_BEGINS_SECONDS = 120.0  # its own limit is 90 s


class MetricsWriter:
    """Records rows in ``folder``/metrics.jsonl, in TensorBoard files and in W&B. Controller process only; one
    thread at a time.

    ``fresh``: the run begins or starts over, and is a new one at W&B. Raises ConfigError if ``wandb`` is requested but
    not installed; what fails at W&B later, and at TensorBoard, is warned of.
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
        self._tensorboard = _TensorBoard(folder / "tensorboard") if tensorboard else None
        self._wandb = _Wandb(folder, wandb, wandb_project, fresh=fresh) if wandb != "off" else None

    def write(self, row: Mapping[str, JsonValue], *, again: bool = False) -> dict[str, JsonValue]:
        """Append one row durably, with ``again`` in place of the last one, where that is of the same phase and step.
        Returns the row as written. Raises ValueError as `checked_row` does."""
        out = checked_row(row)
        if again:
            self._remove(out)
        self._file.append([out])
        tags, x = _tagged(out)
        if self._tensorboard is not None:
            self._tensorboard.log(str(out["phase"]), tags, x)
        if self._wandb is not None:
            self._wandb.log(tags)
        return out

    def truncate_after(self, step: int, *, warm_start_step: int | None = None) -> int:
        """Prepare a resume from ``step``: remove later rows and a torn last line. Returns the number of rows removed.

        ``step=-1`` clears the file; ``warm_start_step`` is given for a checkpoint inside the warm start. TensorBoard
        itself hides its later points, from the next row on; W&B takes none back.
        """
        if warm_start_step is not None:
            return self._file.truncate_after(warm_start_step, "warm_start/step")
        return self._file.truncate_after(step, late=_is_beside)

    def has_evaluation(self, step: int) -> bool:
        """Whether a row of this RL step has figures of an evaluation."""
        for row in from_the_end(self._file.path) if self._file.path.exists() else ():
            if row["step"] == step and any(name.startswith("eval/") for name in row):
                return True
            if int(str(row["step"])) < step and not _is_beside(row):
                return False
        return False

    def _remove(self, written: JsonRow) -> None:
        """Remove the row of that phase and step; rows of other phases at the step stay."""
        axis = "warm_start/step" if written["phase"] == "warm_start" else "step"
        place = {name: written[name] for name in ("phase", axis)}
        last, also = int(str(written[axis])), place.items()
        self._file.truncate_after(last, axis, late=_is_beside, also=lambda row: also <= row.items())

    def close(self) -> None:
        """Flush and close all files; mark the W&B run as finished: it has half a minute, and as much to begin first.

        Raises OSError that names metrics.jsonl, once all are closed."""
        with contextlib.ExitStack() as last_first:
            last_first.callback(self._file.close)
            if self._tensorboard is not None:
                last_first.callback(self._tensorboard.close)
            if self._wandb is not None:
                last_first.callback(self._wandb.finish)


def _is_beside(row: JsonRow) -> bool:
    """Whether the row is of an evaluation beside later steps, whose rows it may stand after."""
    return row.get("phase") == "eval"


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


class _TensorBoard:
    """TensorBoard's files, a folder for each phase. The first failure of the system is warned of, and ends what is
    written there, as the thread that writes has ended; none ends the training."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writers: dict[str, SummaryWriter] = {}  # by phase
        self._works = True

    def log(self, phase: str, values: Mapping[str, float], x: int) -> None:
        """Write a row, unless something has failed."""
        if not self._works:
            return
        with self._trying(self._folder / phase):
            if phase not in self._writers:
                self._folder.mkdir(exist_ok=True)  # TensorBoard would make the run's folder, too
                self._writers[phase] = _open_tensorboard(self._folder / phase, purge_step=x)
            for tag, value in values.items():
                self._writers[phase].add_scalar(tag, value, x)
            self._writers[phase].flush()

    def close(self) -> None:
        """Flush and close each file."""
        for phase, writer in self._writers.items():
            with self._trying(self._folder / phase):
                writer.close()

    @contextlib.contextmanager
    def _trying(self, path: Path) -> Iterator[None]:
        try:
            with naming(path):
                yield
        except OSError as error:
            if self._works:
                logger.warning(
                    "TensorBoard gets no more rows until a resume; the run goes on, and metrics.jsonl has all: %s",
                    error,
                )
            self._works = False


def _open_tensorboard(folder: Path, *, purge_step: int) -> SummaryWriter:
    from torch.utils.tensorboard import SummaryWriter  # a second to import: only for runs that ask for it

    return SummaryWriter(str(folder), purge_step=purge_step)


class _Wandb:
    """W&B's run. The first of its failures, or calls without an end, is warned of, and ends what is sent there; none
    ends the training."""

    def __init__(self, folder: Path, mode: str, project: str, *, fresh: bool) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                f"log.wandb={mode} needs the package wandb, which is not installed; "
                "install it with `pip install 'rl-megatron[wandb]'` or set log.wandb=off"
            ) from error
        self._package: Any = wandb
        self._run: Any = None  # where it did not begin
        self._works, self._hangs = True, False
        identity = _wandb_id(folder, fresh=fresh)

        def begin() -> None:
            self._run = run = wandb.init(
                project=project, name=folder.name, id=identity, dir=str(folder), mode=mode, resume="allow"
            )
            run.define_metric("warm_start/*", step_metric="warm_start/step")
            run.define_metric("*", step_metric="step")

        self._beginning = self._begin(begin)  # the first row waits for it, and no start of a run

    def log(self, values: Mapping[str, float]) -> None:
        """Send a row, unless something has failed."""
        self._begun(_WANDB_BEGINS_SECONDS)
        if self._works:
            self._ends(self._begin(lambda: self._run.log(values)), _WANDB_SECONDS, "it did not take a row")

    def finish(self) -> None:
        """Send what is left, in the time that it has."""
        self._begun(_WANDB_SECONDS)
        if self._run is not None and not self._hangs:
            self._ends(self._begin(self._run.finish), _WANDB_SECONDS, "its last rows are not sent")
        if self._hangs:  # else W&B waits for it when Python ends
            self._ends(self._begin(self._package.teardown), 1.0, "it does not end")

    def _begun(self, seconds: float) -> None:
        if self._works:
            self._ends(self._beginning, seconds, "it did not begin")

    def _begin(self, work: Callable[[], None]) -> threading.Thread:
        """Work in a thread of its own, which does not keep Python from ending."""
        thread = threading.Thread(target=self._try, args=(work,), name="W&B", daemon=True)
        thread.start()
        return thread

    def _ends(self, thread: threading.Thread, seconds: float, late: str) -> None:
        """Wait for its end; one that is ``late`` is left."""
        thread.join(seconds)
        if thread.is_alive():
            self._hangs = True
            self._fails(f"{late} in {seconds:g} s")

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  `_fails` logs it
            self._fails(f"{type(error).__name__}: {error}")

    def _fails(self, why: str) -> None:
        if self._works:
            logger.warning("W&B gets no more of this run, which goes on; metrics.jsonl has all rows: %s", why)
        self._works = False


def _wandb_id(folder: Path, *, fresh: bool) -> str:
    """The run's id, which no other has, whatever the names of their folders. It is drawn once, and kept in the folder
    beside the folder's name: a copy under another draws its own. Ids of older runs are without a name; where W&B's own
    folder is there and no id, the run was begun when its name was the id."""
    path = folder / "wandb_id.txt"
    if not fresh and path.exists():
        kept, _, name = path.read_text().strip().partition(" ")
        if name in ("", folder.name):
            return kept
    elif not fresh and (folder / "wandb").exists():
        return folder.name
    identity = secrets.token_hex(8)
    write_atomically(path, f"{identity} {folder.name}\n".encode())
    return identity
