"""Conversions that tables of several frameworks name in ``as``: from their values to ours, each with its default."""

from __future__ import annotations

import re
from pathlib import Path

from rl_megatron.models.named import NAMED
from tools.migrate.given import SKIP, ToSet


def not_negative(value: object) -> object:
    """0 in place of a negative number, which turns a period or a limit off there."""
    return max(0, int(str(value)))


def skip_unless_positive(value: object) -> object:
    """Leaves out a number that is 0, negative or null."""
    return SKIP if value is None or float(str(value)) <= 0 else value


def skip_null(value: object) -> object:
    """Leaves out null."""
    return SKIP if value is None else value


def folder_name(value: object) -> object:
    """A name of a run, without characters that a folder's name cannot have."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", str(value)).strip("._-")
    return name or SKIP


def model_folder(value: object) -> object:
    """A model's folder; a name of the Hugging Face hub is written as it is, with what to do."""
    if value is None:
        return ToSet(SKIP, "model.path: give the folder of the model")
    text = str(value)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", text):
        return ToSet(text, f"model.path: download {text} (hf download {text} --local-dir FOLDER), and give its folder")
    return text


def public_name(value: object) -> object:
    """The known model that a folder's or a hub's name is of. Plans have its sizes without the folder."""
    name = re.sub(r"(-(base|instruct|chat|thinking|\d{4}))+$", "", str(value).rstrip("/").rsplit("/", 1)[-1].lower())
    return name if name in NAMED else SKIP


def data_file(value: object) -> object:
    """Returns the one file of data; several must be put into one folder."""
    files = value if isinstance(value, list | tuple) else [value]
    if len(files) == 1:
        return str(files[0])
    together = " and ".join(map(str, files))
    return ToSet(
        f"FOLDER_OF_{len(files)}_FILES",
        f"data: one file or one folder of .parquet files is read; put {together} in one",
    )


def count_rows(files: object) -> int | None:
    """Returns the number of rows of .parquet and .jsonl files; None if one of them cannot be read here."""
    total = 0
    try:
        for file in map(Path, map(str, files if isinstance(files, list) else [files])):
            if file.suffix == ".parquet":
                import pyarrow.parquet as pq  # heavy, and only parquet needs it

                total += pq.read_metadata(file).num_rows
            elif file.suffix == ".jsonl":
                total += sum(1 for line in file.open("rb") if line.strip())
            else:
                return None
    except (OSError, ValueError):  # pyarrow's errors of files are ValueErrors
        return None
    return total


def log_sinks(value: object) -> object:
    """The sinks of metrics, if Weights & Biases is among the trackers; TensorBoard is on here."""
    return ["tensorboard", "wandb"] if "wandb" in str(value) else SKIP


def either(first: object, second: object) -> object:
    """The first value, or the second if the first is null."""
    return second if first is None else first


def prompt_limit(value: object) -> object:
    """The most tokens of a prompt; the default here is short."""
    return value or ToSet(SKIP, "rollout.max_prompt_tokens: there is no limit there; set the longest prompt")
