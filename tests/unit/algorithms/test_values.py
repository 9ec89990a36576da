"""The values that the arithmetic returns cannot be changed, and a misspelt field is refused."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType

import pytest

from rl_megatron import algorithms, types
from rl_megatron.data import packing
from rl_megatron.training.credit import shaping, state

MODULES = [
    importlib.import_module(f"{algorithms.__name__}.{m.name}") for m in pkgutil.iter_modules(algorithms.__path__)
]


def values_of(module: ModuleType) -> Iterator[type]:
    own = (kind for kind in vars(module).values() if getattr(kind, "__module__", None) == module.__name__)
    return (kind for kind in own if isinstance(kind, type) and dataclasses.is_dataclass(kind))


VALUES = [kind for module in (*MODULES, shaping, state, types, packing) for kind in values_of(module)]


@pytest.mark.parametrize("kind", VALUES, ids=lambda kind: kind.__name__)
def test_a_value_is_frozen_has_slots_and_public_ones_are_made_by_keywords(kind: type) -> None:
    fields = dataclasses.fields(kind)
    assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert set(kind.__slots__) >= {field.name for field in fields}  # type: ignore[attr-defined]
    if not kind.__name__.startswith("_"):
        assert all(field.kw_only for field in fields)
