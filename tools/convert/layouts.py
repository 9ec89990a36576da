"""Parses models and layouts from a command line: ``kimi-k2``, ``megatron,tp=4,pp=8,ep=8``."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

from rl_megatron.config.errors import closest_key, did_you_mean
from rl_megatron.config.sections.learner import COUNTS, layer_counts
from rl_megatron.errors import ConfigError, download_hint
from rl_megatron.models.named import NAMED
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import ParallelDims
from rl_megatron.weights.layouts.families import find_family, read_shape
from rl_megatron.weights.layouts.layout import VOCAB_MULTIPLE, Layout

_DEGREES = tuple(f.name for f in fields(ParallelDims))
_KEYS = (*_DEGREES, "vocab_multiple")


def parse_layout(side: str, text: str, shape: ModelShape) -> Layout:
    """Parses a layout ``table,key=number,...``, for example ``megatron,tp=4,pp=8,stages=11+12*6+11``.

    ``tp`` cuts an engine's experts if neither ``ep`` nor ``etp`` is given. Raises ConfigError.
    """
    tables = find_family(shape).tables
    table, *settings = text.split(",")
    if table not in tables:
        raise ConfigError(
            f"{side}={text}: there is no table {table!r}; allowed: {', '.join(tables)}, as in {side}=megatron,tp=4"
        )
    values: dict[str, int] = {}
    stages: tuple[int, ...] | None = None
    for setting in settings:
        key, _, value = setting.partition("=")
        if key == "stages" and COUNTS.fullmatch(value):
            stages = layer_counts(value)
        elif key in _KEYS and value.isdecimal() and int(value) > 0:
            values[key] = int(value)
        else:
            raise ConfigError(
                f"{side}={text}: {setting!r} is not a setting; allowed: a positive {', '.join(_KEYS)}, and the layers "
                "of each stage, as stages=11+12*6+11"
            )
    degrees = {key: value for key, value in values.items() if key in _DEGREES}
    if table == "engine" and not {"ep", "etp"} & degrees.keys():
        degrees["etp"] = degrees.get("tp", 1)  # vLLM and SGLang without expert parallelism
    dims = ParallelDims(**degrees)
    if table == "hf" and dims.world_size != dims.dp:
        raise ConfigError(f"{side}={text}: an hf layout consists of full copies; give dp alone")
    multiple = values.get("vocab_multiple", VOCAB_MULTIPLE)
    return Layout(table=tables[table], shape=shape, dims=dims, stages=stages, vocab_multiple=multiple)


def closest_name(model: str) -> str:
    """Returns ``" (did you mean 'x'?)"`` for up to three known models with longer names, or the one with the nearest;
    empty if no name is near. A name of the hub counts without its owner."""
    name = Path(model).name.lower()
    longer = [known for known in NAMED if name and known.startswith(name)]
    return did_you_mean(longer[:3]) or closest_key(name, NAMED)


def model_shape(model: str, family: str | None = None) -> ModelShape:
    """Returns sizes of a public model by name, or of a folder with a config.json, read by the custom ``family`` if that
    is given. Raises ConfigError."""
    if model in NAMED:
        return replace(NAMED[model], family_at=family)
    if not Path(model).is_dir():
        raise ConfigError(
            f"{model} is neither a folder nor a known model{closest_name(model)}; known: {', '.join(NAMED)}; for "
            f"another model give a folder with its config.json{download_hint(Path(model))}"
        )
    return read_shape(Path(model), family)
