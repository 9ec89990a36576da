"""Chooses the folder of a run, and locks it against other processes."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from launcher.runs.lock import lock
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import CheckpointError, ConfigError


def from_file(stem: str) -> str:
    """A valid ``run.name`` from the name of a configuration's file: ``my-run`` for ``my run.yaml``."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("._-")[:100] or "run"


def _by_resume(_: Path) -> str:
    return "add --resume to continue it, from its start if it has no checkpoint, or "


def _elsewhere(root: Path) -> str:
    begin = "begin a new run without --resume"
    if root.is_absolute():
        return begin
    return f"run.dir={root} is relative to the current folder, {Path.cwd()}: start where the run began, or {begin}"


def choose(
    config: RunConfig,
    config_name: str,
    *,
    resume: bool,
    taken: Callable[[Path], bool] = Path.exists,
    advice: Callable[[Path], str] = _by_resume,
) -> RunConfig:
    """The config with a run name: as given, or the config's name and the number after the last taken (resume: that).

    ``config_name`` is the stem of the configuration's file; ``taken`` tells if a folder holds a run,
    ``advice`` how to continue that. Raises ConfigError if a new run's folder exists or a resume finds none.
    """
    root, name = config.run.dir, config.run.name
    config_name = from_file(config_name)
    if name is None:
        names = [config_name if i == 1 else f"{config_name}-{i}" for i in range(1, 10_000)]
        there = [n for n in names if taken(root / n)]
        if resume and not there:
            raise ConfigError(f"--resume: there is no run {config_name!r} in {root}; {_elsewhere(root)}")
        if not resume and names[-1] in there:
            raise ConfigError(f"{root} has {names[-1]}, the last of its numbers; set run.name, or another run.dir")
        name = names[0] if not there else there[-1] if resume else names[names.index(there[-1]) + 1]
    elif resume and not (root / name).is_dir():
        raise ConfigError(f"--resume: {root / name} does not exist; {_elsewhere(root)}")
    elif not resume and taken(root / name):
        raise ConfigError(f"run.name={name}: {root / name} exists; {advice(root / name)}take another name")
    return config.model_copy(update={"run": config.run.model_copy(update={"name": name})})


def refuse_copied(config: RunConfig, file: Path, overrides: Sequence[str]) -> None:
    """Raises ConfigError where ``file`` lies in a run's folder, but names another run: the folder was copied or moved.

    Not where an override names the run.
    """
    here, named = file.absolute().parent, config.run.dir / str(config.run.name)
    holds_run = (here / "metrics.jsonl").is_file() or any(here.glob("checkpoints/*/manifest.json"))
    if (
        file.name == "config.yaml"
        and config.run.name is not None
        and holds_run
        and here.resolve() != named.resolve()
        and not any(override.startswith("run.name=") for override in overrides)
    ):
        away = "" if here.parent.resolve() == config.run.dir.resolve() else f" run.dir={shlex.quote(str(here.parent))}"
        other = f", or run.name={config.run.name} to continue {named}" if named.is_dir() else ""
        raise ConfigError(
            f"--resume: {file} is of the run {named}, but lies in {here}, as after a copy or a move, or where the "
            f"current folder is another; add run.name={here.name}{away} to continue the run that is there{other}"
        )


@contextlib.contextmanager
def claim(folder: Path, *, resume: bool) -> Iterator[Callable[[], None]]:
    """Make the run's folder (a resume: find it) and lock it against other processes while the context is open.

    Raises ConfigError if another process holds the lock. The lock ends with the process, however that ends. It is of a
    file for nothing else, as logs are rotated. Not of the folder, which NFS cannot lock.

    Yields what raises CheckpointError where ``folder`` no longer is this folder, as after a move, or with its file
    system unmounted; any thread may call it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir(exist_ok=resume)
    except FileExistsError as error:
        raise ConfigError(f"{folder}: another run has just taken this name; start again") from error
    with (folder / "lock").open("ab") as file:
        if not lock(file):
            raise ConfigError(f"{folder}: another process runs in it; wait for its end, or end it")
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # so that no other gets its number
        try:
            yield partial(_refuse_another, folder.absolute(), os.fstat(held))
        finally:
            os.close(held)


def _refuse_another(folder: Path, claimed: os.stat_result) -> None:
    try:
        if os.path.samestat(folder.stat(), claimed):
            return
        now = "another folder is there now"
    except OSError as error:
        now = str(error.strerror)
    raise CheckpointError(
        f"{folder} is no longer the folder that this run began in ({now}), so neither checkpoint nor export is "
        "written there: it was moved or removed, or its file system was unmounted; put it back, and resume"
    )
