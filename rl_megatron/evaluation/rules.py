"""What the figures of a set follow from beside the model: how its samples were judged, and how they were drawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from rl_megatron.config.resume import flat, is_free
from rl_megatron.config.sections.environment import EnvironmentSection
from rl_megatron.config.sections.reward import RANKS, RewardSection
from rl_megatron.config.sections.sandbox import SandboxSection
from rl_megatron.section import Section

_DRAWN = ("temperature", "top_p", "top_k", "min_p", "max_new_tokens")
_JUDGES: Mapping[str, type[Section]] = {"reward": RewardSection, "environment": EnvironmentSection}
_OF_PROGRAMS = ("type", "seconds", "memory_mb")


def judged_otherwise(*two: tuple[Mapping[str, Any], Mapping[str, Any]]) -> list[str]:
    """The keys by which samples of a set were judged otherwise, each with both values. ``two``: each side's
    configuration and the set's keys."""
    first, second = (_judging(config, section) for config, section in two)
    one, other = (_named(config, keys) for (config, _), keys in zip(two, (first, second), strict=True))
    both = one.keys() & other.keys()  # what one alone names differs by its name
    return [
        *unlike_keys(first, second),
        *unlike_keys(*({key: value for key, value in each.items() if key in both} for each in (one, other))),
    ]


def judging_keys(config: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
    """The values by which samples of a set with these keys were judged, by key, those of what the keys name too."""
    found = _judging(config, section)
    return {**found, **_named(config, found)}


def _judging(config: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
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


def _named(config: Mapping[str, Any], judges: Mapping[str, Any]) -> dict[str, Any]:
    """The values of other sections that ``judges`` go by, by key: those of the models that they name, and the
    sandbox's for tests and environments."""
    found = dict[str, Any]()
    for key, value in judges.items():
        *_, above, last = key.split(".")
        name = str(above if value is None else value)  # a part without a function has that of its name
        if name.startswith(RANKS):
            model = name.removeprefix(RANKS)
            found[f"reward_models.{model}.path"] = config.get("reward_models", {}).get(model, {}).get("path")
        elif last == "function" and (name == "tests" or (above == "environment" and value is not None)):
            limits = _whole(SandboxSection, config.get("sandbox") or {})
            found |= {f"sandbox.{limit}": limits.get(limit) for limit in _OF_PROGRAMS}
    return found


def drawing_keys(config: Mapping[str, Any], section: Mapping[str, Any], engine: str) -> dict[str, Any]:
    """The values by which samples of a set with these keys were drawn, by key."""
    rollout = config.get("rollout", {})
    found = {key: section[key] for key in _DRAWN if key in section}
    if found.get("max_new_tokens", 0) is None:
        found["max_new_tokens"] = rollout.get("max_new_tokens")
    return {
        "rollout.engine": engine,
        "learner.dtype": config.get("learner", {}).get("dtype"),
        **found,
        "rollout.ignore_eos": rollout.get("ignore_eos", False),
        "rollout.server.quantization": rollout.get("server", {}).get("quantization", "none"),
    }


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
