"""A key that a family's config.json lacks is what transformers' configuration class of that family makes of it."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING

from rl_megatron.errors import ConfigError
from rl_megatron.models.families.fields import ConfigFields
from rl_megatron.models.shape import ModelShape
from rl_megatron.weights.layouts.families import FAMILIES, read_shape

_OWN: Mapping[str, Mapping[str, Any]] = {  # where a class's own defaults are no model
    "deepseek_v2": {"num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "glm4_moe": {"head_dim": 128},
}
_CLASSES = {"kimi_k2": "deepseek_v3"}
_OLDER: Mapping[str, Any] = {  # spellings of transformers 4
    "rope_theta": 2e4,
    "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
}


def shape_of(config: Mapping[str, Any], folder: Path) -> ModelShape:
    (folder / "config.json").write_text(json.dumps(config))
    return replace(read_shape(folder), draft_layers=0)  # of the key alone, as fields.py says


def trimmed(config: dict[str, Any], keys: Collection[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Without each of ``keys`` and each part of the ropes' and the text model's, or with null for it."""
    paths: list[tuple[str, ...]] = [(key,) for key in config if key in keys]
    paths += [(key, part) for key in ("rope_parameters", "text_config") for part in config.get(key) or ()]
    for *above, last in paths:
        for null in (False, True):
            changed = deepcopy(config)
            inner = changed[above[0]] if above else changed
            if null:
                inner[last] = None
            else:
                del inner[last]
            yield ".".join((*above, f"{last}={'null' if null else 'missing'}")), changed


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_config_lacks_is_as_transformers_has_it_or_refused(family: str, tmp_path: Path) -> None:
    kind = CONFIG_MAPPING[_CLASSES.get(family, family)]
    full = json.loads(json.dumps(kind(**_OWN.get(family, {})).to_dict() | {"model_type": family}, default=str))
    older = {} if "text_config" in full else {**full, "rope_parameters": None, **_OLDER}
    found, compared = {}, 0
    for config, keys in ((full, ConfigFields.model_fields.keys() - {"model_type"}), (older, _OLDER)):
        for name, less in trimmed(config, keys):
            try:
                known = kind.from_dict(deepcopy(less)).to_dict() | {"model_type": family}
                wanted = shape_of(json.loads(json.dumps(known, default=str)), tmp_path)
            except (
                ConfigError,
                StrictDataclassError,
                ArithmeticError,
                KeyError,
                TypeError,
            ):  # transformers has no such model, or this package
                continue
            try:
                read = shape_of(less, tmp_path)
            except ConfigError:
                continue
            compared += 1
            if read != wanted:
                found[name] = (read, wanted)
    assert not found
    assert compared > 10
