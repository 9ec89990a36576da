"""What the figures of a set follow from beside the model: how its samples were judged, and how they were drawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from rl_megatron.config.resume import flat, is_free
from rl_megatron.config.sections.environment import EnvironmentSection
from rl_megatron.config.sections.reward import RewardSection
from rl_megatron.section import Section

_DRAWN = ("temperature", "top_p", "top_k", "min_p", "max_new_tokens")
_JUDGES: Mapping[str, type[Section]] = {"reward": RewardSection, "environment": EnvironmentSection}


def judging_keys(config: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
    """The values by which samples of a set with these keys were right, by key; defaults where older files have none."""
    of_run = section.get("data", {}).get("type", "run") == "run"
    sources = config.get("data", {}).get("sources", {}) if of_run else {}
    found = {"eval.success_reward": config.get("eval", {}).get("success_reward", 1.0)}
    for name, kind in _JUDGES.items():
        own, usual = section.get(name), config.get(name) or {}
        given = {name: own or usual}
        if own is None:
            given |= {f"data.sources.{source}.{name}": one.get(name) or usual for source, one in sources.items()}
        for key, values in given.items():
            found |= {leaf: value for leaf, value in flat(_whole(kind, values), f"{key}.") if _judges(leaf)}
    return found


def drawing_keys(config: Mapping[str, Any], section: Mapping[str, Any], engine: str) -> dict[str, Any]:
    """The values by which samples of a set with these keys were drawn, by key."""
    found = {key: section[key] for key in _DRAWN if key in section}
    if found.get("max_new_tokens", 0) is None:
        found["max_new_tokens"] = config.get("rollout", {}).get("max_new_tokens")
    return {"rollout.engine": engine, "learner.dtype": config.get("learner", {}).get("dtype"), **found}


def unlike_keys(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[str]:
    """A text for each key whose values differ, with both."""
    for key in dict.fromkeys([*first, *second]):
        if (one := first.get(key)) != (other := second.get(key)):
            yield f"{key} ({one} and {other})"


def _judges(key: str) -> bool:
    return not is_free(key) and not key.endswith(".on_error")  # what failed is wrong in any case


def _whole(kind: type[Section], given: Mapping[str, Any]) -> Mapping[str, Any]:
    """With defaults of keys that an older version did not have; as it is if it had others."""
    try:
        return kind.model_validate(given).model_dump(mode="json")
    except ValidationError:
        return given
