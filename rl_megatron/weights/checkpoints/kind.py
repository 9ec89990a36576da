"""Which of the two kinds a checkpoint folder is, where in a folder of several it lies, and how large it is."""

from __future__ import annotations

import re
from pathlib import Path

from rl_megatron.errors import CheckpointError, ConfigError, shorten
from rl_megatron.weights.layouts.families import adapters_alone

_TRACKER = "latest_checkpointed_iteration.txt"  # of Megatron-LM, Megatron-Bridge and slime, beside their checkpoints
_STEP = re.compile(r"\d{1,12}")
_BACKEND = re.compile(r'"sharded_backend": *"(\w+)"')
_HUB_NAME = re.compile(r"^ *hf_model_id: *['\"]?([\w./-]+)", re.MULTILINE)
_SMALL = 1 << 20  # bytes that are read of a small file


def total_bytes(folder: Path) -> int:
    """Bytes of weights in a checkpoint of either kind."""
    return sum(path.stat().st_size for pattern in ("*.safetensors", "*.distcp") for path in folder.glob(pattern))


def is_megatron(folder: Path) -> bool:
    """Whether the folder is a ``torch_dist`` checkpoint. Raises ConfigError if it is of neither kind."""
    if (folder / ".metadata").is_file():
        return True
    if any(folder.glob("*.distcp")):
        raise CheckpointError(
            f"{folder}: it has shards (*.distcp) and no .metadata; copy that file too, which a copy of DIR/* leaves out"
        )
    if (folder / "config.json").is_file():
        return False
    if adapters := adapters_alone(folder):
        raise ConfigError(f"{folder}: {adapters}")
    shards = folder / "learner"  # of a run's checkpoint
    instead = f"; give {shards}" if (shards / ".metadata").is_file() else ""
    raise ConfigError(
        f"{folder}: it has neither .metadata (megatron torch_dist) nor config.json (Hugging Face){instead}"
    )


def newest_in(folder: Path) -> Path:
    """The folder itself, or the newest checkpoint in a folder where Megatron-LM or Megatron-Bridge saved its own.

    Raises CheckpointError or ConfigError if that is not there, not one, or in a format that is not read.
    """
    chosen = folder if (folder / ".metadata").is_file() else _tracked(folder)
    saved = _head(chosen / "metadata.json")
    backend = _BACKEND.search(saved)
    if backend and backend[1] != "torch_dist":
        raise ConfigError(f"{chosen} is of the format {backend[1]}; save it with --ckpt-format torch_dist")
    if not (chosen / ".metadata").is_file() and any(chosen.glob("mp_rank_*")):
        raise ConfigError(
            f"{chosen} is of the format torch, a file a rank; Megatron-LM writes it again with "
            "--ckpt-convert-format torch_dist --ckpt-convert-save FOLDER"
        )
    return chosen


def _tracked(folder: Path) -> Path:
    """What the tracker names, or the only checkpoint; the folder itself if it has none."""
    there = sorted(path.name for path in (*folder.glob("iter_*"), *folder.glob("release")) if path.is_dir())
    if not (folder / _TRACKER).is_file():
        if (folder / "config.json").is_file():
            return folder
        if len(there) > 1:
            raise ConfigError(
                f"{folder} has {len(there)} checkpoints and no {_TRACKER}; give one of {', '.join(there)}"
            )
        return folder / there[0] if there else folder
    step = _head(folder / _TRACKER).strip()
    if step != "release" and not _STEP.fullmatch(step):
        raise CheckpointError(
            f"{folder / _TRACKER} says {shorten(step)}, neither a step nor release; give a checkpoint"
        )
    name = step if step == "release" else f"iter_{int(step):07d}"
    if name not in there:
        raise CheckpointError(f"{folder / _TRACKER} names {name}, which is not there; there are: {', '.join(there)}")
    return folder / name


def _head(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(_SMALL)
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def must_have_config(folder: Path) -> None:
    """Raises ConfigError if a ``torch_dist`` checkpoint has no config.json, with what run_config.yaml says of it."""
    if (folder / "config.json").is_file():
        return
    hub = _HUB_NAME.search(_head(folder / "run_config.yaml"))
    of = f" of {hub[1]}, as its run_config.yaml says" if hub else ", with the model's config.json and tokenizer"
    raise ConfigError(f"{folder} has no config.json; give --config with the Hugging Face folder{of}")
