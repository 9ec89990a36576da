"""Every key of a configuration with its value and its default, and how messages write them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pydantic import BaseModel


@dataclass(frozen=True, slots=True)
class Leaf:
    """A key that is no section: its value and its default."""

    value: object
    default: object


def set_leaves(name: str, section: BaseModel) -> Iterator[tuple[str, Leaf]]:
    """The keys of the section ``name`` and of its inner sections whose values differ from their defaults, so that a
    saved configuration, which has every key, sets none; by the key's full name."""
    values = section.__dict__
    for key, default in _defaults(type(section)).items():
        value = values[key]
        if isinstance(value, BaseModel):
            yield from set_leaves(f"{name}.{key}", value)
        elif value is not default and value != default:
            yield f"{name}.{key}", Leaf(value, default)


@functools.cache
def _defaults(section: type[BaseModel]) -> Mapping[str, object]:
    """Made once: pydantic copies a default each time it is asked for one."""
    return {key: field.get_default(call_default_factory=True) for key, field in section.model_fields.items()}


def is_in(leaf: str, key: str) -> bool:
    """Whether the leaf is the key, or in the section of that name."""
    return leaf == key or leaf.startswith(f"{key}.")


def does_nothing(name: str, leaf: Leaf, reason: str) -> str:
    """The problem of a set key that is not read, and what to do."""
    return (
        f"{name}={as_given(leaf.value)} does nothing: {reason}; leave it out, or set it to its default, "
        f"{as_given(leaf.default)}"
    )


def as_given(value: object) -> str:
    """The value as a user writes it on a command line."""
    if isinstance(value, BaseModel):
        return as_given(value.model_dump(mode="json", exclude_defaults=True))
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {as_given(one)}' for name, one in value.items())}}}"
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
