"""The shape of the model in a Hugging Face folder. No torch."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from rl_megatron.config.errors import shorten
from rl_megatron.errors import ConfigError
from rl_megatron.models.configs import READERS
from rl_megatron.models.configs.fields import ConfigFields
from rl_megatron.models.json_files import Fields, read_json
from rl_megatron.models.shape import ModelShape, problems


def read_shape(folder: Path, *, families: Collection[str] | None = None) -> ModelShape:
    """The shape of the checkpoint in ``folder``. Raises ConfigError for a model_type not known or not allowed.

    ``families`` narrows those that are known (``models.configs``).
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"model.path={folder}: no config.json there; give a Hugging Face checkpoint folder")
    raw = Fields(read_json(path, ConfigFields).model_dump(exclude_unset=True), path)
    allowed = READERS if families is None else families
    if raw.get("model_type") not in allowed:
        names = ", ".join(repr(family) for family in allowed)
        raise ConfigError(f"{path}: model_type={shorten(raw.get('model_type'))} is not supported; allowed: {names}")
    shape = READERS[raw["model_type"]](raw, path)
    if found := list(problems(shape)):
        raise ConfigError("\n".join(f"{path}: {problem}" for problem in found))
    return shape
