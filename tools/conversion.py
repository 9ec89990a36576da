"""Convert a checkpoint with a progress display, for the conversion tools and ``rl-megatron convert``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from rl_megatron.errors import CheckpointError, ConfigError, RLMegatronError
from rl_megatron.weights.bytes.dtypes import DType
from rl_megatron.weights.checkpoints import convert
from rl_megatron.weights.checkpoints.contents import contents
from rl_megatron.weights.checkpoints.kind import is_megatron, total_bytes
from rl_megatron.weights.formats.hf_folder import has_tokenizer

DTYPES = (DType.F32, DType.BF16, DType.F16, DType.F8_E4M3)


def run(
    source: Path,
    out: Path,
    *,
    dtype: str | None = None,
    shard_gb: float | None = None,
    config: Path | None = None,
    family: str | None = None,
) -> None:
    """Convert to the other kind; ``source``'s own kind is detected. Raises RLMegatronError."""
    must_be_there(source)
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r} is unknown; one of: {', '.join(DTYPES)}")
    if shard_gb is not None and not shard_gb > 0:
        raise ConfigError(f"shard size {shard_gb} GB must be above 0")
    options = {} if shard_gb is None else {"shard_bytes": int(shard_gb * 1e9)}
    kind = None if dtype is None else DType(dtype)
    if out.exists():
        raise CheckpointError(f"{out} exists; remove it or give another name")
    backwards = is_megatron(source)
    note = convert.left_out(source, config, family)
    if note is not None:
        print(f"note: {note}", file=sys.stderr)
    with display(source) as progress:
        if backwards:
            convert.megatron_to_hf(source, out, config=config, family=family, dtype=kind, on_bytes=progress, **options)
        else:
            convert.hf_to_megatron(source, out, family=family, dtype=kind, on_bytes=progress, **options)
    same = "" if dtype else f" --against {source}"
    read = (f" --config {config}" if config else "") + (f" --family {family}" if family else "")
    _tell(source, out, f"rl-megatron verify {out}{same}{read}", f" learner.model={family}" if family else "")


def _tell(source: Path, out: Path, check: str, model: str) -> None:
    """Print what was written and what to do with it."""
    made = contents(out)
    tensors, parameters = sum(part.tensors for part in made.parts), sum(part.parameters for part in made.parts)
    print(f"{out}: {made.kind}, {tensors:,} tensors, {parameters:,} parameters, {total_bytes(out):,} bytes")
    print(f"check it: {check}")
    if has_tokenizer(out):
        print(f"train it: rl-megatron train model.path={out}{model} ...")
    else:
        print(f"note: {source} has no tokenizer, so {out} has none; copy one there before model.path={out}")


def must_be_there(folder: Path) -> None:
    """Raises ConfigError if the folder does not exist."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; give a Hugging Face or a megatron torch_dist checkpoint")


@contextmanager
def display(folder: Path) -> Iterator[Callable[[int], None]]:
    """A bar over the bytes of a checkpoint, with rate and time left, on stderr."""
    columns = (TextColumn(folder.name), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total_bytes(folder))
        yield lambda count: bar.advance(task, count)
        bar.update(task, completed=bar.tasks[0].total)


def say(work: Callable[[], None]) -> None:
    """Run a tool's work; print an error meant for the user to stderr and exit with status 1."""
    try:
        work()
    except RLMegatronError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
