"""Checks that the model's folder holds complete weights, a tokenizer and, if needed, a chat template."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from launcher.preflight.subject import Found, Subject, problem, unchecked
from rl_megatron.config.sections.data import FileKeys, data_sources
from rl_megatron.errors import RLMegatronError
from rl_megatron.weights.bytes.mapped import MappedFile, read_header
from rl_megatron.weights.checkpoints.kind import is_megatron
from rl_megatron.weights.formats.hf_folder import has_tokenizer, weight_files


def check(subject: Subject) -> Iterator[Found]:
    """Yields a problem for each file that ``model.path`` lacks. A tiny model, which the run makes, has none."""
    folder, sources = subject.model_folder, data_sources(subject.config.data)
    if folder is None or not (folder / "config.json").is_file():  # the check of sizes reports it
        return
    if not has_tokenizer(folder):
        yield problem(
            f"model.path={folder}: it has no tokenizer (tokenizer.json, tokenizer.model, ...); copy one from "
            "the model that this one was made from"
        )
    elif not _has_chat_template(folder):
        for key, data in sources.items():
            if isinstance(data, FileKeys) and data.chat_template:
                yield problem(
                    f"{key}.chat_template=true, but the tokenizer of model.path={folder} has no chat template; set it "
                    "to false"
                )
    if subject.config.model.random_weights:
        return
    if is_megatron(folder):
        yield unchecked("the weights, a megatron checkpoint: rl-megatron verify reads them all")
        return
    yield from _weights(folder)


def _weights(folder: Path) -> Iterator[Found]:
    """Yields each safetensors file that is missing, or shorter or longer than its header says."""
    try:
        files, _ = weight_files(folder)
    except RLMegatronError as error:
        yield problem(f"model.path: {error}")
        return
    for name in files:
        try:
            read_header(MappedFile(folder / name))
        except (RLMegatronError, ValueError, OSError) as error:  # ValueError: nothing to map in an empty file
            yield problem(f"model.path: {folder / name}: {error}")


def _has_chat_template(folder: Path) -> bool:
    """Whether there is a chat template, in its own file or in the tokenizer's configuration."""
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    path = folder / "tokenizer_config.json"
    try:
        return path.is_file() and bool(json.loads(path.read_text()).get("chat_template"))
    except (ValueError, AttributeError, OSError):
        return False
